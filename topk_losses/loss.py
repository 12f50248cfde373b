"""The top-k cross-entropy: the true class must be among the k highest, with k drawn from P_K; and the loss by name."""

import math
import warnings
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from topk_losses import checks
from topk_losses.checks import PK, check_p_k, has_known_values
from topk_losses.classification import CallSettings, ClassificationLoss
from topk_losses.methods import METHODS, TOP1, TOP1_MODES, make_operator, resolve_method, resolve_settings
from topk_losses.operator import (
    MASKED,
    TopKOperator,
    guarded_log,
    has_masked,
    is_mass,
    largest,
    log_mixture,
    log_softmax,
    ranks_like,
)
from topk_losses.temperature import AutoTemperature


def top_m(scores: Tensor, target: Tensor, m: int, row: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keep the scores (rows, m) of the true class and then of the m - 1 largest others (Petersen et al. 2022, 3.4).

    Also returned: the target among them. It is a label (rows,), or (pairs,) with the `row` of each; or a set of right
    answers (rows, n), all of which are kept. A row with at most m live classes keeps them in their order, as without m.
    """
    few = (scores > -torch.inf).sum(1, keepdim=True) <= m if has_masked(scores) else None  # (rows, 1)
    if is_mass(target):
        number = int((target > 0).sum(1).max()) if has_known_values(target) and target.numel() else 0
        if number > m:
            raise ValueError(f"m={m} scores cannot hold {number} right answers; raise m")
        index = largest(scores.detach().masked_fill(target > 0, torch.inf), m)  # (rows, m)
    else:
        index, true = largest(scores, m), target.unsqueeze(1)
        if row is not None:
            index, few = index[row], None if few is None else few[row]
        at_or_behind = (index[:, :-1] == true).cumsum(1) > 0  # (rows, m - 1): the true class is at this place or before
        index = torch.cat([true, torch.where(at_or_behind, index[:, 1:], index[:, :-1])], dim=1)
    if few is not None:
        index = torch.where(few, index.sort(1).values, index)
    kept = scores.gather(1, index) if row is None else scores[row.unsqueeze(1), index]
    if is_mass(target):
        return kept, target.gather(1, index)
    return kept, torch.zeros_like(target) if few is None else (index == true).int().argmax(1)


class TopKCrossEntropyLoss(ClassificationLoss):
    """Differentiable top-k cross-entropy (Petersen et al. 2022), with the interface of torch.nn.CrossEntropyLoss.

    L(s, y) = -log sum_k P_K(k) sum_{r<=k} P[r, y], P the relaxed permutation matrix.

    Args:
        method: one of RELAXATIONS (default: "splitter_selection").
        p_k: P_K, the weights of top-1, top-2, ...: p_k[j] = P(k = j + 1), non-negative and summing to 1. Shape (K,), or
            (num_classes, K) with a row for each class; or an integer k, for top-k only; or a mapping, {1: 0.5, 5: 0.5}.
            It can be set at any time; P_K of each sample is an argument of the call.
        num_classes: n (default: that of the logits).
        m: number of scores that are sorted, at least 2: the true class's and the m - 1 largest others. The softmax term
            sees these m scores too. None (default), or m >= n: all.
        inverse_temperature: above 0, larger = closer to the hard sort; a tensor () that requires a gradient is learned;
            "auto" follows the standard deviation of the logits (AutoTemperature). It can be set at any time. None: the
            method's default.
        distribution: sorting networks only, one of DISTRIBUTIONS (default: "logistic_phi").
        art_lambda: logistic_phi only, in [0, 1) (default: 0.5).
        top1_mode: how the k = 1 term is computed: "sort", by the relaxed permutation matrix, as in L above; "sm"
            (default), by softmax, inside the same logarithm; "smce", by a cross-entropy of its own. sparse_topk and
            perturbed_topk need "sm" or "smce", with P_K(1) > 0.
        weight, label_smoothing, soft_labels, ignore_index, reduction: as in ClassificationLoss.
        operator: a TopKOperator of your own, instead of method; its inverse temperature is the default.
        noise_rate: eta in [0, 1) (default: 0): forward correction (Patrini et al. 2017) for symmetric label noise, L =
            -log((1 - eta) u_y + eta E[k] / n), where -log u_y is the loss without it and E[k] the mean of P_K. Not with
            top1_mode "smce" nor soft_labels "any".

    A NaN or +inf logit makes the loss of its sample NaN and touches no other. A class at -inf is masked out. Networks
    without m then sort the other classes only on a CPU; elsewhere (CUDA, torch.compile, torch.func) leave masked
    columns out, or give m. docs/methods/index.md has the modes' formulas and the epsilon of the logarithm.

    Example:
        >>> loss_fn = TopKCrossEntropyLoss("splitter_selection", p_k={1: 0.5, 5: 0.5}, m=16)
        >>> loss_fn(torch.arange(20.0).expand(2, 20), torch.tensor([19, 14]))
        tensor(1.0019)
    """

    constants = ("weight", "p_k", "shares")
    fixed: tuple[str, ...] = ("method", "m", "distribution", "art_lambda", "top1_mode", "noise_rate")
    shown = ("p_k", "inverse_temperature", *fixed, *ClassificationLoss.shown)
    fixed += ("operator", *ClassificationLoss.fixed)
    p_k: Tensor

    def __init__(
        self, method: str | None = None, p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2),
        num_classes: SupportsIndex | None = None, m: SupportsIndex | None = None,
        inverse_temperature: float | Tensor | str | None = None, distribution: str | None = None,
        art_lambda: float | None = None, top1_mode: str | None = None,
        weight: Tensor | None = None, label_smoothing: float = 0.0, soft_labels: str = "expected",
        ignore_index: int = -100, reduction: str = "mean", operator: TopKOperator | None = None,
        noise_rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(num_classes, weight, label_smoothing, soft_labels, ignore_index, reduction)
        if operator is None:
            method = resolve_method(method or "splitter_selection", relaxed=True)
            settings = resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode)
            inverse_temperature, distribution, art_lambda, top1_mode = settings.values()
            operator = make_operator(method, None, check_p_k(p_k).shape[-1], None, distribution, art_lambda)
        elif (method, distribution, art_lambda) != (None, None, None):
            raise ValueError("an operator takes the place of method, distribution and art_lambda: leave them out")
        elif not isinstance(operator, TopKOperator):
            raise TypeError(f"operator must be a TopKOperator, got {type(operator).__name__}")
        self.method, self.operator, self.stochastic = method, operator, operator.stochastic
        self.distribution, self.art_lambda = distribution, art_lambda
        self.m, self.memory = checks.check_several("m", m), 2 if operator.whitens else 1
        self.top1_mode = checks.check_choice("top1_mode", top1_mode or "sm", TOP1_MODES)
        self.noise_rate = checks.check_fraction("noise_rate", noise_rate)
        if noise_rate and (self.top1_mode == "smce" or soft_labels == "any"):
            raise ValueError(
                "noise_rate corrects one logarithm of one true class: take top1_mode 'sm' or 'sort' and "
                f"soft_labels 'expected'; got top1_mode={self.top1_mode!r} and {soft_labels=}"
            )
        beta = operator.inverse_temperature if inverse_temperature is None else inverse_temperature
        self.inverse_temperature: Any = beta
        self.p_k = p_k  # type: ignore[assignment]
        if self._num_scores(self.num_classes) == 2 and operator.whitens:
            message = (
                f"{method or operator} whitens the scores, and two scores are the same two numbers then: "
                "they get next to no gradient. Sort three or more, or take another method"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    @property
    def k(self) -> int:
        """Largest rank with a weight in P_K."""
        return self.p_k.shape[-1]

    def _auto(self) -> AutoTemperature | float | None:
        return None if self.method is None else METHODS[self.method].auto()

    def _checked_setting(self, name: str, value: Any) -> Any:
        return self._read_p_k(value) if name == "p_k" else super()._checked_setting(name, value)

    def _num_scores(self, n: int | None) -> int | None:
        """How many of n scores are sorted; None if that is not known."""
        return min(filter(None, (self.m, n)), default=None)

    def _read_p_k(self, p_k: PK) -> Tensor:
        """Check P_K, in float64 where the device has it, and keep the ranks with a weight and their weights."""
        rows = check_p_k(p_k, self.num_classes, self._num_scores(self.num_classes))
        if rows.dim() == 2 and self.num_classes is None:
            raise ValueError(f"p_k with one row per class needs num_classes={len(rows)}; got num_classes=None")
        if self.top1_mode != "sort" and bool((rows[..., 0] == 1).all()):
            raise ValueError(
                f"top1_mode={self.top1_mode!r} leaves nothing to sort when P_K(1) = 1: the loss would be softmax "
                f"cross-entropy. Use method='softmax_cross_entropy', or top1_mode='sort'; got p_k={rows.tolist()}"
            )
        self._check_top1(rows)
        self.ranks = [rank for rank in range(1, rows.shape[-1] + 1) if bool((rows[..., rank - 1] > 0).any())]
        before = self.__dict__.get("p_k", rows)
        rows = rows.to(before.device, before.dtype)
        self.shares = torch.stack([rows[..., rank - 1] for rank in self.ranks], dim=-1)  # (J,) or (num_classes, J)
        return rows

    def _check_top1(self, p_k: Tensor) -> None:
        """Refuse a P_K (..., K) that leaves classes without a gradient where P has zeros."""
        if self.operator.has_zeros and (self.top1_mode == "sort" or bool((p_k[..., 0] <= 0).any())):
            raise ValueError(
                f"{self.method or self.operator} gives exactly 0 to a class far below the k highest, where the loss "
                f"would have no gradient; give the softmax a part, P_K(1) > 0 with top1_mode 'sm' or 'smce': got "
                f"p_k={p_k.tolist()} with top1_mode={self.top1_mode!r}"
            )

    def check_convergence(self) -> float:
        """Return the largest error that the operator's solver left since the last call; 0 for a closed form."""
        return self.operator.check_convergence()

    def forward(self, logits: Tensor, labels: Tensor, p_k: Tensor | None = None) -> Tensor:
        """Compute the loss of logits and labels.

        Args:
            logits, labels: as in ClassificationLoss.
            p_k: P_K of each sample instead of the loss's own, (..., K) for labels (...): non-negative, rows summing to
                1. It receives a gradient.
        """
        if p_k is None:
            return self._reduced(logits, labels, None)
        if not isinstance(p_k, Tensor):
            raise TypeError(f"p_k of a call must be a tensor, got {type(p_k).__name__}; convert with torch.as_tensor")
        checks.check_logits(logits)
        shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else ()
        if p_k.shape[:-1] != shape:
            raise ValueError(f"p_k must have shape {(*shape, 'K')}, a row per sample, got {tuple(p_k.shape)}")
        rows = p_k.reshape(-1, p_k.shape[-1])  # (rows, K)
        if has_known_values(p_k) and rows.numel():
            check_p_k(rows)
            self._check_top1(rows)
        return self._reduced(logits, labels, rows)

    def _losses(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Any:
        if target is None and (self.operator.pairwise or self._num_scores(scores.shape[1]) != scores.shape[1]):
            return None  # with m each class has scores of its own
        return self._topk_losses(scores, target, call)

    def _losses_of_pairs(self, scores: Tensor, row: Tensor, column: Tensor, call: CallSettings) -> Tensor:
        return self._topk_losses(scores, column, call.select(row), row)

    def _topk_losses(
        self, scores: Tensor, target: Tensor | None, call: CallSettings, row: Tensor | None = None
    ) -> Tensor:
        """As _losses; with `row`, of the pairs of these rows of scores (rows, n) and the labels (pairs,)."""
        if self.m is None or self.m >= scores.shape[1]:
            kept, place = scores if row is None else scores[row], target
        else:
            assert target is not None
            kept, place = top_m(scores, target, self.m, row)  # (rows or pairs, m)
        shares = self._shares(scores, target, call)
        losses = self._mixed(kept, place, shares, call)
        if not self.noise_rate:
            return losses
        live = (scores > -torch.inf).sum(1, keepdim=True).clamp(min=1)  # (rows, 1), the number of classes
        return self._corrected(losses, live if row is None else live[row], shares, call)

    def _ranks(self, call: CallSettings) -> list[int]:
        """The ranks of the shares."""
        return self.ranks if call.p_k is None else list(range(1, call.p_k.shape[1] + 1))

    def _shares(self, scores: Tensor, target: Tensor | None, call: CallSettings) -> Tensor:
        """P_K(k) of the ranks: (1 or rows, J), for masses their mean; for every class (1 or rows, J, 1 or n)."""
        rows = (self.shares if call.p_k is None else call.p_k).to(scores)
        if rows.dim() == 1 or call.p_k is not None:
            rows = rows.view(-1, rows.shape[-1])
            return rows.unsqueeze(2) if target is None else rows
        if target is None:
            return rows.T.unsqueeze(0)
        if not is_mass(target):
            return rows[target]
        share = target / target.sum(1, keepdim=True)
        return (share.unsqueeze(2) * rows).sum(1)

    def _mixed(self, scores: Tensor, target: Tensor | None, shares: Tensor, call: CallSettings) -> Tensor:
        """-log of the mixture of P(rank <= k), by P_K, for scores all of which are sorted."""
        ranks, n, operator = self._ranks(call), scores.shape[1], self.operator
        if ranks[-1] > n:
            raise ValueError(f"p_k reaches rank {ranks[-1]}, but only {n} scores are sorted (n, or m); shorten p_k")
        softmax = self.top1_mode != "sort" and ranks[0] == 1
        within = operator.within(scores, target, ranks[softmax:], call.beta, self.generator)  # (rows, J[, n])
        if is_mass(target):
            # the sum over a set counts how many are expected within k; above 1, one is
            within = within.clamp(max=1 if operator.guarded else 0)
        if softmax:
            log_top1, first = log_softmax(scores, target), shares[:, 0]  # (rows[, n])
            if self.top1_mode == "smce":
                return -first * log_top1 - (1 - first) * self._log_mixture(within, shares[:, 1:], call)
            top1 = log_top1.exp() if operator.guarded else log_top1
            within = torch.cat([top1.unsqueeze(1), within], dim=1)
        return -self._log_mixture(within, shares, call)

    def _log_mixture(self, within: Tensor, shares: Tensor, call: CallSettings) -> Tensor:
        """log sum_k P_K(k) P(rank <= k), (rows[, n]), of what the operator computes, (rows, J[, n])."""
        if self.operator.guarded:  # columns of NeuralSort and SoftSort may sum to more than 1
            return guarded_log((within * shares).sum(1).clamp(max=1))
        return log_mixture(within, shares, all_positive=call.p_k is None and self.p_k.dim() == 1)

    def _corrected(self, losses: Tensor, live: Tensor, shares: Tensor, call: CallSettings) -> Tensor:
        """Forward correction for noise_rate of losses (rows,), or (rows, n) of every class."""
        within = ranks_like(self._ranks(call), losses).minimum(live)  # (rows, J), classes within k
        if losses.dim() == 2:
            within = within.unsqueeze(2)
        else:
            live = live.squeeze(1)
        wrong = self.noise_rate * (within * shares).sum(1) / live  # (rows[, 1 or n])
        right = math.log1p(-self.noise_rate) - losses.clamp(max=-MASKED)
        return -torch.logaddexp(right, wrong.log().expand_as(right))


def make_loss(
    method: str, p_k: PK | None = None, num_classes: SupportsIndex | None = None, m: SupportsIndex | None = None,
    inverse_temperature: float | Tensor | str | None = None, distribution: str | None = None,
    art_lambda: float | None = None, top1_mode: str | None = None, **settings: Any,
) -> ClassificationLoss:  # fmt: skip
    """Build the loss of any method by its name.

    Args:
        method: a name of METHODS. Relaxed sorts give a TopKCrossEntropyLoss.
        p_k: as in TopKCrossEntropyLoss (default: 0.2 for each of 1 to 5). Losses without a k take None or [1, 0, ...],
            losses of one k a P_K with all mass on it (default: k = 5).
        num_classes: number of classes (default: that of the logits).
        m: number of scores that are sorted. All methods accept it, as published commands pass it to every run; losses
            without a sort see all scores.
        inverse_temperature: for smooth_topk and smooth_hard_topk it is tau itself, as in the paper.
        distribution, art_lambda, top1_mode: as in TopKCrossEntropyLoss.
        settings: other arguments of the class, such as weight, reduction, margin, noise_rate or q.

    Raises:
        ValueError: an unknown method (the message has the nearest name), or settings that do not fit it.
    """
    method = resolve_method(method)
    spec = METHODS[method]
    if spec.loss is None:
        p_k = (0.2,) * 5 if p_k is None else p_k
        return TopKCrossEntropyLoss(
            method, p_k, num_classes, m, inverse_temperature, distribution, art_lambda, top1_mode, **settings
        )
    beta = resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode)["inverse_temperature"]
    n, has_k = checks.check_several("num_classes", num_classes), method not in TOP1
    rows = check_p_k((5 if has_k else 1) if p_k is None else p_k, n, n)
    if rows.dim() != 1 or int((rows > 0).sum()) != 1 or (not has_k and len(rows) > 1):
        which = "for instance 0 0 0 0 1 for top-5 only" if has_k else "the first: P_K = [1, 0, ..]"
        raise ValueError(
            f"{method} optimises a single k: p_k must have all its mass on one entry, {which}; got {rows.tolist()}"
        )
    arguments = [len(rows)] if has_k else []
    arguments += [] if beta is None else [beta]
    return spec.loss(*arguments, num_classes=n, **settings)
