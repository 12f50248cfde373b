"""The top-k cross-entropy: the true class must be among the k highest, with k drawn from P_K; and the loss by name."""

import warnings
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from topk_losses.checks import AS_TENSOR, PK, check_integer, check_logits, check_p_k, check_several, has_known_values
from topk_losses.classification import ClassificationLoss
from topk_losses.methods import METHODS, RELAXATIONS, TOP1, make_operator, resolve_method, resolve_settings
from topk_losses.operator import TopKOperator, guarded_log, is_mass, largest, pick_ranks


def log_mixture(logs: Tensor, shares: Tensor, positive: bool) -> Tensor:
    """log sum_j shares_j exp(logs_j) over dimension 1, which is dropped; 0 where there is no share at all.

    positive: no share is 0. Where some may be it is written as a linear function of them, which has finite gradients.
    """
    if positive:
        return (logs + shares.log()).logsumexp(1)
    shares = shares.expand_as(logs)
    if not logs.shape[1]:
        return torch.zeros_like(logs.sum(1))
    paid = shares > 0
    highest = logs.detach().masked_fill(~paid, -torch.inf).amax(1, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    total = ((logs - highest).clamp(max=50).exp() * shares).sum(1)  # what is above the highest has no share
    return total.masked_fill(~paid.any(1), 1).log() + highest.squeeze(1)


def top_m(scores: Tensor, target: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The scores that are sorted, (rows, m), and the target among them (Petersen et al. 2022, section 3.4).

    Of labels: the true class's score, then the m - 1 largest others, falling. Of a set, no right answer is left out.
    Among equal scores the choice is arbitrary.
    """
    if not is_mass(target):
        index, true = largest(scores, m), target.unsqueeze(1)
        behind = (index[:, :-1] == true).cumsum(1) > 0  # (rows, m - 1): the true class is among those before, or here
        index = torch.cat([true, torch.where(behind, index[:, 1:], index[:, :-1])], dim=1)
        return scores.gather(1, index), torch.zeros_like(target)
    if has_known_values(target) and target.numel() and int((target > 0).sum(1).max()) > m:
        raise ValueError(f"m={m} scores cannot hold {int((target > 0).sum(1).max())} right answers; raise m")
    index = largest(scores.detach().masked_fill(target > 0, torch.inf), m)
    return scores.gather(1, index), target.gather(1, index)


class TopKCrossEntropyLoss(ClassificationLoss):
    """Differentiable top-k cross-entropy, a drop-in for torch.nn.CrossEntropyLoss: loss(logits, labels).

    L(s, y) = -log sum_k P_K(k) sum_{r<=k} P[r, y], P the relaxed permutation matrix (Petersen et al. 2022).

    Args:
        method: a relaxation, one of topk_losses.RELAXATIONS.
        p_k: P_K, the distribution that k is drawn from: p_k[j] = P(k = j + 1), (K,) for all, or (num_classes, K) with
            one row per class, non-negative, each row summing to 1; or an integer, for that k alone; or a mapping,
            {1: .5, 5: .5}. Zeros at the end cost nothing. It can be set at any time; for one P_K per sample pass
            (batch, K) to the call.
        num_classes: n, the number of logits; None takes it from them. (torch.compile wants it said, or m.)
        m: keep the true class and the m - 1 largest others, m >= 2; None (default) and all that is larger than n keep
            all. The softmax term sees the m scores too.
        inverse_temperature: > 0, larger = closer to hard sorting; a tensor of shape () that requires a gradient is
            learned; "auto" follows the spread of the logits (AutoTemperature). It can be set at any time. None: the
            method's default (topk_losses.METHODS).
        distribution: networks only: logistic, logistic_phi (default), gaussian, reciprocal, cauchy, optimal.
        art_lambda: logistic_phi only: in [0, 1), default .5.
        top1_mode: who answers for P_K(1). "sort": the relaxed permutation matrix, L exactly as above. "sm"
            (default): softmax(logits)_y inside the same logarithm. "smce": a cross-entropy of its own,
            P_K(1) CE - (1 - P_K(1)) log sum_{k>=2} P_K(k) sum_{r<=k} P[r, y].
        weight, label_smoothing, soft_labels, ignore_index, reduction: as in ClassificationLoss, and so are shapes.

    log P(rank <= k) is log(p (1 - 2e-7) + 1e-7), the official code's guard, where P is a number: for sorts, networks,
    sinkhorn_sort, sparse_topk and perturbed_topk. The others stay in exact logarithms. sparse_topk and perturbed_topk
    want P_K(1) > 0 with top1_mode "sm" or "smce". A NaN or +inf logit makes the loss of its sample NaN and touches no
    other; a logit of -inf is a class that takes no part.
    Raises ValueError on construction for settings that do not fit, with a sentence saying which.
    """

    constants = ("weight", "p_k", "shares")
    fixed = ("num_classes", "method", "m", "distribution", "art_lambda", "top1_mode")
    shown = ("p_k", "inverse_temperature", *fixed[1:], *ClassificationLoss.shown)

    def __init__(
        self, method: str = "splitter_selection", p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2),
        num_classes: SupportsIndex | None = None, m: SupportsIndex | None = None,
        inverse_temperature: float | Tensor | str | None = None, distribution: str | None = None,
        art_lambda: float | None = None, top1_mode: str | None = None,
        weight: Tensor | None = None, label_smoothing: float = 0.0, soft_labels: str = "expected",
        ignore_index: int = -100, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(num_classes, weight, label_smoothing, soft_labels, ignore_index, reduction)
        settings = resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode, relaxed=True)
        beta, self.distribution, self.art_lambda, self.top1_mode = settings.values()
        self.method, self.m = resolve_method(method), check_several("m", m)
        self.operator: TopKOperator | None = None
        self.inverse_temperature: float | Tensor | str = beta
        self.p_k: Tensor = p_k  # type: ignore[assignment]
        num_scores = self._num_scores(self.num_classes)
        if num_scores is not None:
            self._operator_for(num_scores, self.k)

    @property
    def k(self) -> int:
        """K, the largest rank that P_K pays for."""
        return self.p_k.shape[-1]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "k":
            raise AttributeError("k is the length of p_k: set p_k")
        super().__setattr__(name, value)
        if name == "p_k":  # read here, once: where P_K is on a GPU its numbers would have to be waited for
            has_mass = (self.p_k.reshape(-1, self.k) > 0).any(0).tolist()
            self.ranks = [k for k, any_mass in enumerate(has_mass, start=1) if any_mass]
            self.shares = pick_ranks(self.p_k.reshape(-1, self.k), self.ranks).reshape(*self.p_k.shape[:-1], -1)
        operator = self.__dict__.get("operator")
        if operator is not None and name in ("generator", "inverse_temperature"):
            self._bind(operator)

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "inverse_temperature":
            value = resolve_settings(self.method, value)["inverse_temperature"]
            self.auto = METHODS[self.method].auto() if isinstance(value, str) else None
            return value
        return self._checked_p_k(value) if name == "p_k" else super()._checked_setting(name, value)

    def _num_scores(self, n: int | None) -> int | None:
        """How many of n scores are sorted; None if that is not known."""
        return min(filter(None, (self.m, n)), default=None)

    def _checked_p_k(self, p_k: PK) -> Tensor:
        """P_K as it is kept: float64 where the device has it."""
        rows = check_p_k(p_k, self.num_classes, self._num_scores(self.num_classes))
        if rows.dim() == 2 and self.num_classes is None:
            raise ValueError(f"p_k with one row per class needs num_classes={len(rows)}; got num_classes=None")
        if self.top1_mode != "sort" and bool((rows[..., 0] == 1).all()):
            raise ValueError(
                f"top1_mode={self.top1_mode!r} leaves nothing to sort when P_K(1) = 1: the loss would be softmax "
                f"cross-entropy. Use method='softmax_cross_entropy', or top1_mode='sort'; got p_k={rows.tolist()}"
            )
        self._check_top1(rows)
        before = self.__dict__.get("p_k")
        return rows if before is None else rows.to(before.device, before.dtype)

    def _check_top1(self, p_k: Tensor) -> None:
        """Refuse a P_K (..., K) that leaves classes without a gradient where the method's masks have zeros."""
        has_zeros = getattr(METHODS[self.method].operator, "has_zeros", False)
        if has_zeros and (self.top1_mode == "sort" or bool((p_k[..., 0] <= 0).any())):
            raise ValueError(
                f"{self.method} gives exactly 0 to a class far below the k highest, where the loss would have no "
                f"gradient; give the softmax a part, P_K(1) > 0 with top1_mode 'sm' or 'smce': got "
                f"p_k={p_k.tolist()} with top1_mode={self.top1_mode!r}"
            )

    def check_convergence(self) -> float:
        """The operator's largest relative error since the last call; warns if it is above the tolerance.

        On the CPU each call does this by itself. On CUDA it waits for the device: call it once per epoch, say.
        """
        return 0.0 if self.operator is None else self.operator.check_convergence()

    def forward(self, logits: Tensor, labels: Tensor, p_k: Tensor | None = None) -> Tensor:
        """The loss: () for reduction mean and sum, the shape of int64 labels for none.

        logits (batch, n), (n,) or (batch, n, d1, ...) floating point; labels int64 of the same shape without n, or a
        distribution over classes (or a set of right answers: soft_labels) of the shape of the logits. p_k: P_K of each
        sample in place of the loss's own, (..., K) where labels are (...): non-negative, rows summing to 1; it receives
        a gradient if it wants one. Raises TypeError or ValueError for shapes, types and values that do not fit.
        """
        if p_k is None:
            return self._reduced(logits, labels, None)
        if not isinstance(p_k, Tensor):
            raise TypeError(f"p_k of a call must be a tensor, got {type(p_k).__name__}; convert with {AS_TENSOR}")
        check_logits(logits)
        shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else logits.shape[:0]
        if p_k.shape[:-1] != shape or p_k.dim() == 0:
            raise ValueError(f"p_k must have shape {(*shape, 'K')}, a row per sample, got {tuple(p_k.shape)}")
        rows = p_k.reshape(-1, p_k.shape[-1])  # (rows, K)
        num_scores = self._num_scores(logits.shape[min(1, logits.dim() - 1)])
        check_integer("the length of p_k", rows.shape[1], 1, num_scores, "the number of scores that are sorted, ")
        if has_known_values(p_k) and rows.numel():
            check_p_k(rows)
            self._check_top1(rows)
        return self._reduced(logits, labels, rows)

    def _operator_for(self, num_scores: int, k: int) -> TopKOperator:
        """The operator for that many scores and k ranks, built anew only where these change."""
        if k > num_scores:
            raise ValueError(f"p_k reaches rank {k}, but only {num_scores} scores are sorted (n, or m); shorten p_k")
        operator = self.operator
        if operator is None or operator.k != k or getattr(operator, "n", num_scores) != num_scores:
            if num_scores == 2 and METHODS[self.method].family == "transports":
                warnings.warn(
                    f"{self.method} whitens the scores, and two scores are the same two numbers then: they get next to "
                    "no gradient. Sort three or more, or take another method",
                    RuntimeWarning,
                    stacklevel=4,
                )
            beta = None if isinstance(self.inverse_temperature, str) else self.inverse_temperature
            settings = (beta, self.distribution, self.art_lambda)
            with torch.inference_mode(False):  # training may follow a first call for inference
                operator = make_operator(self.method, num_scores, k, *settings).to(self.p_k.device)
            # Not a submodule: it comes and goes, and a learned temperature is saved once.
            object.__setattr__(self, "operator", self._bind(operator))
        return operator

    def _bind(self, operator: TopKOperator) -> TopKOperator:
        """Hand an operator what can be set of the loss."""
        beta: Any = self.inverse_temperature if self.auto is None else self.auto.beta
        operator.generator, operator.inverse_temperature = self.generator, beta
        return operator

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TopKCrossEntropyLoss":
        super()._apply(fn, recurse)
        if self.operator is not None:
            self._bind(self.operator)._apply(fn, recurse)
        return self

    def _shares(self, p_k: Tensor | None, scores: Tensor, target: Tensor | None) -> Tensor:
        """P_K(k) of the ranks with mass, in the scores' dtype: (1 or rows, J), or (1 or rows, J, 1 or n) for all.

        With one P_K per class: those of the labels (rows,), their mean for masses (rows, n).
        """
        rows = (self.shares if p_k is None else p_k).to(scores)
        if p_k is None and rows.dim() == 2:
            if target is None:
                return rows.T.unsqueeze(0)
            return (target / target.sum(1, keepdim=True)) @ rows if is_mass(target) else rows[target]
        rows = rows if rows.dim() == 2 else rows.unsqueeze(0)
        return rows.unsqueeze(2) if target is None else rows

    def _losses(self, scores: Tensor, target: Tensor | None, p_k: Tensor | None) -> Any:
        ranks = self.ranks if p_k is None else list(range(1, p_k.shape[1] + 1))
        shares = self._shares(p_k, scores, target)
        if self.m is not None:
            if target is None:
                return None  # each class has scores of its own
            scores, target = top_m(scores, target, min(self.m, scores.shape[1]))
        operator = self._operator_for(scores.shape[1], self.k if p_k is None else max(p_k.shape[1], self.k))
        softmax = self.top1_mode != "sort" and ranks[0] == 1
        within, log_top1 = operator.within(scores, target, ranks[softmax:], softmax)  # (rows, J[, n]), (rows[, n])
        first, shares = (shares[:, 0], shares[:, 1:]) if softmax else (shares[:, 0], shares)
        if target is not None and is_mass(target):
            # the sum over a set counts how many are expected within k; above 1, one is
            within = within.clamp(max=1 if operator.guarded else 0)
        if operator.guarded:
            total = (within * shares).sum(1)
            if log_top1 is not None and self.top1_mode == "sm":
                total = total + first * log_top1.exp()
            mixture = guarded_log(total)
        else:
            if log_top1 is not None and self.top1_mode == "sm":
                within = torch.cat([log_top1.unsqueeze(1), within], dim=1)
                shares = torch.cat([first.unsqueeze(1), shares], dim=1)
            mixture = log_mixture(within, shares, p_k is None and self.p_k.dim() == 1)
        if log_top1 is None or self.top1_mode == "sm":
            return -mixture
        return -first * log_top1 - (1 - first) * mixture


def make_loss(
    method: str, p_k: PK | None = None, num_classes: SupportsIndex | None = None, m: SupportsIndex | None = None,
    inverse_temperature: float | Tensor | str | None = None, distribution: str | None = None,
    art_lambda: float | None = None, top1_mode: str | None = None, **settings: Any,
) -> ClassificationLoss:  # fmt: skip
    """Build the loss of any method in METHODS, as loss(logits, labels). None means the method's default.

    Relaxations give TopKCrossEntropyLoss (p_k default .2 x5). softmax_cross_entropy and ldr_kl take p_k None or
    [1, 0, ..], the other losses one with all mass on one k (default k = 5); the inverse_temperature of smooth_topk and
    smooth_hard_topk is tau itself, the one exception the paper made. m is accepted for all methods, since published
    commands pass it to every row of a table, and has an effect on relaxations alone: the others see all scores.
    settings: what else the class takes, such as weight or reduction. Raises ValueError with a sentence for an unknown
    method (naming the nearest) and for settings that do not fit it.
    """
    method = resolve_method(method)
    if method in RELAXATIONS:
        p_k = (0.2,) * 5 if p_k is None else p_k
        of_sort = (m, inverse_temperature, distribution, art_lambda, top1_mode)
        return TopKCrossEntropyLoss(method, p_k, num_classes, *of_sort, **settings)
    beta = resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode)["inverse_temperature"]
    build, n, has_k = METHODS[method].loss, check_several("num_classes", num_classes), method not in TOP1
    assert build is not None
    rows = check_p_k((5 if has_k else 1) if p_k is None else p_k, n, n)
    if rows.dim() != 1 or int((rows > 0).sum()) != 1 or (not has_k and len(rows) > 1):
        which = "for instance 0 0 0 0 1 for k = 5" if has_k else "the first: P_K = [1, 0, ..]"
        raise ValueError(
            f"{method} optimises a single k: p_k must have all its mass on one entry, {which}; got {rows.tolist()}"
        )
    given = (*((len(rows),) if has_k else ()), *(() if beta is None else (beta,)))
    return build(*given, num_classes=n, **settings)
