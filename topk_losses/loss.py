"""The top-k cross-entropy: the true class must be among the k highest, with k drawn from P_K; and the loss by name.

L(s, y) = -log sum_k P_K(k) sum_{r<=k} P[r, y]
(Petersen, Kuehne, Borgelt, Deussen, "Differentiable Top-k Classification Learning", ICML 2022).
"""

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_losses.checks import (
    PK,
    check_integer,
    check_k,
    check_m,
    check_num_classes,
    check_p_k,
    has_known_values,
)
from topk_losses.classification import ClassificationLoss, Settings, SoftmaxCrossEntropyLoss
from topk_losses.methods import METHODS, RELAXATIONS, make_operator, resolve_method, resolve_settings
from topk_losses.sorts import TopKOperator, largest


def guarded_log(p: Tensor) -> Tensor:
    """log(p (1 - 2e-7) + 1e-7), the official code's guard against log 0: finite for p in [0, 1]."""
    return torch.log(p * (1 - 2e-7) + 1e-7)


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


def top_m(scores: Tensor, labels: Tensor, m: int) -> Tensor:
    """The true class's score, then the m - 1 largest others, falling (Petersen et al. 2022, section 3.4): (rows, m).

    scores (rows, n), labels (rows,) int64. Among equal scores the choice is arbitrary.
    """
    index, true = largest(scores, m), labels.unsqueeze(1)
    behind = (index[:, :-1] == true).cumsum(1) > 0  # (rows, m - 1): the true class is among those before, or here
    return scores.gather(1, torch.cat([true, torch.where(behind, index[:, 1:], index[:, :-1])], dim=1))


class TopKCrossEntropyLoss(ClassificationLoss):
    """Differentiable top-k cross-entropy, a drop-in for torch.nn.CrossEntropyLoss: loss(logits, labels).

    Args:
        method: a relaxation: neuralsort, softsort, sinkhorn_sort, soft_topk, lml, lapsum, sparse_topk, capped_softmax,
            subset_topk, df_topk, recall_surrogate, perturbed_topk, odd_even, bitonic, splitter_selection (default).
        p_k: P_K, the distribution that k is drawn from: p_k[j] = P(k = j + 1), (K,) for all, or (num_classes, K) with
            one row per class, non-negative, each row summing to 1; or an integer, for that k alone; or a mapping,
            {1: .5, 5: .5}. Zeros at the end cost nothing. It can be set at any time; for one P_K per sample pass
            (batch, K) to the call.
        num_classes: n, the number of logits; None takes it from them. (torch.compile wants it said, or m.)
        m: keep the true class and the m - 1 largest others, 2 <= m <= n; None (default) keeps all. The softmax
            term sees the m scores too.
        inverse_temperature: > 0, larger = closer to hard sorting; a tensor of shape () that requires a gradient is
            learned; "auto" follows the spread of the logits (AutoTemperature). It can be set at any time. Defaults:
            networks 1, neuralsort and softsort .5 (published for ImageNet with m = 16; for all 100 scores of CIFAR-100
            .5 and .0625 were published), sinkhorn_sort 100, soft_topk 10 (epsilon .01 and .1), others: METHODS.
        distribution: networks only: logistic, logistic_phi (default), gaussian, reciprocal, cauchy, optimal.
        art_lambda: logistic_phi only: in [0, 1), default .5.
        top1_mode: who answers for P_K(1). "sort": the relaxed permutation matrix, L exactly as above. "sm"
            (default): softmax(logits)_y inside the same logarithm. "smce": a cross-entropy of its own,
            P_K(1) CE - (1 - P_K(1)) log sum_{k>=2} P_K(k) sum_{r<=k} P[r, y].
        settings: weight, label_smoothing, soft_labels, ignore_index, reduction as in ClassificationLoss, and so are
            shapes.

    Every logarithm but CE's is log(p (1 - 2e-7) + 1e-7), as in the official code; lml, lapsum, capped_softmax,
    subset_topk, df_topk and recall_surrogate, which it does not have, stay in exact logarithms instead. sparse_topk and
    perturbed_topk want P_K(1) > 0 with top1_mode "sm" or "smce". A NaN or +inf logit makes the loss of its sample NaN
    and touches no other; a logit of -inf is a class that takes no part.
    Raises ValueError on construction for settings that do not fit, with a sentence saying which.
    """

    constants = ("weight", "p_k", "shares")
    fixed = ("num_classes", "method", "m", "distribution", "art_lambda", "top1_mode")

    def __init__(
        self,
        method: str = "splitter_selection",
        p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2),
        num_classes: SupportsIndex | None = None,
        m: SupportsIndex | None = None,
        inverse_temperature: float | Tensor | str | None = None,
        distribution: str | None = None,
        art_lambda: float | None = None,
        top1_mode: str | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(num_classes, **settings)
        resolved = resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode, relaxed=True)
        self.method = resolve_method(method)
        self.distribution, self.art_lambda = resolved["distribution"], resolved["art_lambda"]
        self.top1_mode: str = resolved["top1_mode"]
        self.m = check_m(m, self.num_classes)
        self.operator: TopKOperator | None = None
        self.inverse_temperature: float | Tensor | str = resolved["inverse_temperature"]
        self.p_k: Tensor = p_k  # type: ignore[assignment]
        num_scores = self.m or self.num_classes
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
        if self.__dict__.get("operator") is not None and (
            name == "generator" or (name == "inverse_temperature" and self.auto is None)
        ):
            setattr(self.operator, name, getattr(self, name))

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "inverse_temperature":
            value = resolve_settings(self.method, value)["inverse_temperature"]
            self.auto = METHODS[self.method].auto() if isinstance(value, str) else None
            return value
        if name == "p_k":
            return self._checked_p_k(value)
        return super()._checked_setting(name, value)

    def _checked_p_k(self, p_k: PK) -> Tensor:
        """P_K as it is kept: float64 where the device has it. Sets the ranks that have mass, and their shares."""
        rows = check_p_k(p_k, self.num_classes, self.m or self.num_classes)  # (K,) or (num_classes, K)
        if rows.dim() == 2 and self.num_classes is None:
            raise ValueError(f"p_k with one row per class needs num_classes={len(rows)}; got num_classes=None")
        first = 1 if self.top1_mode == "sort" else 2
        if first == 2 and bool((rows[..., 0] == 1).all()):
            raise ValueError(
                f"top1_mode={self.top1_mode!r} leaves nothing to sort when P_K(1) = 1: the loss would be softmax "
                f"cross-entropy. Use method='softmax_cross_entropy', or top1_mode='sort'; got p_k={rows.tolist()}"
            )
        self._check_top1(rows)
        before = self.__dict__.get("p_k")
        if before is not None:
            rows = rows.to(before.device, before.dtype)
        has_mass = (rows.reshape(-1, rows.shape[-1]) > 0).any(0).tolist()
        self.ranks = [k for k, any_mass in enumerate(has_mass, start=1) if any_mass and k >= first]
        self.shares = rows[..., [k - 1 for k in self.ranks]]  # (J,) or (num_classes, J)
        self.pays_for_top1 = first == 2 and has_mass[0]
        return rows

    def _check_top1(self, p_k: Tensor) -> None:
        """Refuse a P_K (..., K) that leaves classes without a gradient where the method's masks have zeros."""
        has_zeros = getattr(METHODS[self.method].operator, "has_zeros", False)
        if has_zeros and (self.top1_mode == "sort" or bool((p_k[..., 0] <= 0).any())):
            raise ValueError(
                f"{self.method} gives exactly 0 to a class far below the k highest, where the loss would have no "
                f"gradient; give the softmax a part, P_K(1) > 0 with top1_mode 'sm' or 'smce': got "
                f"p_k={p_k.tolist()} with top1_mode={self.top1_mode!r}"
            )

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        p_k = [round(p, 6) for p in self.p_k.tolist()] if self.p_k.dim() == 1 else f"<{tuple(self.p_k.shape)}>"
        return f"method={self.method}, p_k={p_k}, m={self.m}, top1_mode={self.top1_mode}, {super().extra_repr()}"

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
        shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else logits.shape[:0]
        if p_k.shape[:-1] != shape or p_k.dim() == 0:
            raise ValueError(f"p_k must have shape {(*shape, 'K')}, a row per sample, got {tuple(p_k.shape)}")
        rows = p_k.reshape(-1, p_k.shape[-1])  # (rows, K)
        check_integer("the length of p_k", rows.shape[1], 1, self.m or logits.shape[min(1, logits.dim() - 1)])
        if has_known_values(p_k) and rows.numel():
            check_p_k(rows)
            self._check_top1(rows)
        return self._reduced(logits, labels, rows)

    def _operator_for(self, num_scores: int, k: int) -> TopKOperator:
        """The operator for that many scores and k ranks, built anew only where these change."""
        check_k(k, num_scores)
        operator = self.operator
        if operator is None or operator.k != k or getattr(operator, "n", num_scores) != num_scores:
            beta = None if isinstance(self.inverse_temperature, str) else self.inverse_temperature
            settings = (beta, self.distribution, self.art_lambda)
            operator = make_operator(self.method, num_scores, k, *settings).to(self.p_k.device)
            operator.generator = self.generator
            # Not a submodule: it comes and goes, and a learned temperature is saved once.
            object.__setattr__(self, "operator", operator)
        if self.auto is not None:
            operator.inverse_temperature = self.auto.value()
        return operator

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TopKCrossEntropyLoss":
        super()._apply(fn, recurse)
        if self.operator is not None:
            self.operator._apply(fn, recurse)
        return self

    def _ranks_and_operator(self, scores: Tensor, p_k: Tensor | None) -> tuple[list[int], TopKOperator]:
        """The k for which P(rank <= k) is wanted, rising, and who computes it; p_k (rows, K) or None."""
        if p_k is None:
            return self.ranks, self._operator_for(scores.shape[1], self.k)
        first = 1 if self.top1_mode == "sort" else 2
        K = p_k.shape[1]
        return list(range(first, K + 1)), self._operator_for(scores.shape[1], max(K, self.k))

    def _shares(self, p_k: Tensor | None, scores: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """P_K(1), (1 or rows or n,), and P_K(k) for the k of interest, (1 or rows or n, J), in the scores' dtype.

        With one P_K per class: those of the labels (rows,) int64, their mean for masses (rows, n), all for None.
        """
        if p_k is None:
            first, shares = self.p_k[..., :1].to(scores), self.shares.to(scores)
            if first.dim() == 1:
                return first, shares.unsqueeze(0)
            if labels is None:
                return first.squeeze(1), shares
            if labels.is_floating_point():
                mean = labels / labels.sum(1, keepdim=True)
                return (mean @ first).squeeze(1), mean @ shares
            return first[labels].squeeze(1), shares[labels]
        p_k = p_k.to(scores)
        return p_k[:, 0], p_k if self.top1_mode == "sort" else p_k[:, 1:]

    def _has_softmax(self, p_k: Tensor | None) -> bool:
        """Whether softmax answers for P_K(1), and there is any."""
        return self.top1_mode != "sort" and (p_k is not None or self.pays_for_top1)

    def _total(
        self, guarded: bool, within: Tensor, shares: Tensor, top1: Tensor | None, first: Tensor, own: bool
    ) -> Tensor:
        """The loss from P(rank <= k), or its logarithm if not guarded, (rows, J, ...), P_K(k), -log of softmax where it
        answers for P_K(1), and P_K(1); broadcast to one shape. own: P_K is the loss's own, whose ranks have mass.
        """
        if top1 is not None and self.top1_mode == "sm":  # one more term of the mixture
            term = torch.exp(-top1) if guarded else -top1
            within = torch.cat([term.unsqueeze(1), within], dim=1)
            shares, top1 = torch.cat([first.unsqueeze(1), shares], dim=1), None
        if guarded:
            log = guarded_log((within * shares).sum(1))
        else:
            log = log_mixture(within, shares, own and self.p_k.dim() == 1)
        return -log if top1 is None else first * top1 - (1 - first) * log

    def _losses(self, scores: Tensor, labels: Tensor, p_k: Tensor | None) -> Tensor:
        first, shares = self._shares(p_k, scores, labels)
        if self.m is not None:
            scores, labels = top_m(scores, labels, self.m), torch.zeros_like(labels)  # (rows, m)
        ranks, operator = self._ranks_and_operator(scores, p_k)
        top1: Tensor | None = None
        if self._has_softmax(p_k):
            within, top1 = operator._beside_softmax(scores, labels, ranks)  # (rows, J), (rows,)
        else:
            within = (operator._within if operator.guarded else operator._log_within)(scores, labels, ranks)
        return self._total(operator.guarded, within, shares, top1, first, p_k is None)

    def _losses_of_all(self, scores: Tensor, p_k: Tensor | None) -> Tensor | None:
        if self.m is not None:
            return None  # each class has scores of its own
        first, shares = self._shares(p_k, scores, None)
        ranks, operator = self._ranks_and_operator(scores, p_k)
        per_class = p_k is None and len(shares) > 1
        shares = shares.T.unsqueeze(0) if per_class else shares.unsqueeze(2)  # (1, J, n), or (1 or rows, J, 1)
        within = (operator._all_within if operator.guarded else operator._log_all_within)(scores, ranks)  # (rows, J, n)
        first = first.unsqueeze(0 if per_class else 1)  # (1, n), or (1 or rows, 1)
        top1 = -scores.log_softmax(1) if self._has_softmax(p_k) else None
        return self._total(operator.guarded, within, shares, top1, first, p_k is None)

    def _losses_of_any(self, scores: Tensor, mass: Tensor, p_k: Tensor | None) -> Tensor:
        first, shares = self._shares(p_k, scores, mass)
        if self.m is not None:
            if has_known_values(mass) and mass.numel() and int((mass > 0).sum(1).max()) > self.m:
                raise ValueError(f"m={self.m} scores cannot hold {int((mass > 0).sum(1).max())} right answers; raise m")
            index = largest(scores.detach().masked_fill(mass > 0, torch.inf), self.m)
            scores, mass = scores.gather(1, index), mass.gather(1, index)  # (rows, m), no right answer left out
        ranks, operator = self._ranks_and_operator(scores, p_k)
        # The sum over the set counts how many are expected within k; where that exceeds 1, one is.
        if operator.guarded:
            within = operator._within(scores, mass, ranks).clamp(max=1)  # (rows, J)
        else:
            within = operator._log_within(scores, mass, ranks).clamp(max=0)
        top1 = scores.logsumexp(1) - (scores + mass.log()).logsumexp(1) if self._has_softmax(p_k) else None
        return self._total(operator.guarded, within, shares, top1, first, p_k is None)


def _single_k(method: str, p_k: PK, num_classes: SupportsIndex | None) -> int:
    n = check_num_classes(num_classes)
    rows = check_p_k(p_k, n, n)
    if rows.dim() != 1 or int((rows > 0).sum()) != 1:
        raise ValueError(
            f"{method} optimises a single k: p_k must have all its mass on one entry, for instance "
            f"0 0 0 0 1 for k = 5; got {rows.tolist()}"
        )
    return len(rows)


def make_loss(
    method: str,
    p_k: PK | None = None,
    num_classes: SupportsIndex | None = None,
    m: SupportsIndex | None = None,
    inverse_temperature: float | Tensor | str | None = None,
    distribution: str | None = None,
    art_lambda: float | None = None,
    top1_mode: str | None = None,
    **settings: Any,
) -> ClassificationLoss:
    """Build the loss of any method in METHODS, as loss(logits, labels). None means the method's default.

    Relaxations give TopKCrossEntropyLoss (p_k default .2 x5). softmax_cross_entropy takes p_k None or [1, 0, ..]. The
    other losses take a p_k with all mass on one k (default k = 5); the inverse_temperature of smooth_topk and
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
    if method == "softmax_cross_entropy":
        if p_k is not None and _single_k(method, p_k, num_classes) != 1:
            raise ValueError(f"softmax_cross_entropy is the loss of P_K = [1, 0, ..], got p_k={p_k}")
        return SoftmaxCrossEntropyLoss(num_classes, **settings)
    build = METHODS[method].loss
    assert build is not None
    k = _single_k(method, 5 if p_k is None else p_k, num_classes)
    return build(k, *(() if beta is None else (beta,)), num_classes=num_classes, **settings)
