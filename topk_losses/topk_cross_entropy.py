"""The top-k cross-entropy: the true class must be among the k highest, with k drawn from P_K.

L(s, y) = -log sum_k P_K(k) sum_{r<=k} P[r, y] = -log sum_r w_r P[r, y],  w_r = sum_{k>=r} P_K(k)
(Petersen, Kuehne, Borgelt, Deussen, "Differentiable Top-k Classification Learning", ICML 2022).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from topk_losses.backend import use_numba
from topk_losses.checks import (
    check_choice,
    check_logits_and_labels,
    check_m,
    check_p_k,
)
from topk_losses.operator import to_compute_dtype
from topk_losses.registry import make_operator, resolve_relaxation, resolve_settings
from topk_losses.top_m import select_top_m

REDUCTIONS = ("mean", "sum", "none")
FEW_SCORES = 256  # per sample: up to here PyTorch's operations take longer to call than to run, and a kernel pays


def guarded_log(p: Tensor) -> Tensor:
    """log(p (1 - 2e-7) + 1e-7), the official code's guard against log 0: finite for p in [0, 1]."""
    return torch.log(p * (1 - 2e-7) + 1e-7)


def rank_weights(p_k: Tensor, top1_mode: str) -> Tensor:
    """w_r = sum_{k>=r} P_K(k) for r = 1..K: (..., K), of the ranks that the sorting method pays for.

    In the modes sm and smce the softmax pays for P_K(1), so that the sum starts at k = 2.
    """
    if top1_mode != "sort":
        p_k = torch.cat([torch.zeros_like(p_k[..., :1]), p_k[..., 1:]], dim=-1)
    return p_k.flip(-1).cumsum(-1).flip(-1)


class TopKCrossEntropyLoss(nn.Module):
    """Differentiable top-k cross-entropy, a drop-in for torch.nn.CrossEntropyLoss: loss(logits, labels).

    Args:
        method: a relaxation: neuralsort, softsort, sinkhorn_sort, soft_topk, odd_even, bitonic,
            splitter_selection (default).
        p_k: P_K, p_k[j] = P(k = j + 1): (K,) for all, or (num_classes, K) with one row per class. Non-negative,
            each row summing to 1, K < m (K < num_classes without m).
        num_classes: n, the number of logits.
        m: keep the true class and the m - 1 largest others, 2 <= m <= n; None (default) keeps all. The softmax
            term sees the m scores too.
        inverse_temperature: > 0, larger = closer to hard sorting. Defaults: networks 1, neuralsort and softsort
            .5 (published for ImageNet with m = 16; for all 100 scores of CIFAR-100 .5 and .0625 were published),
            sinkhorn_sort 100 and soft_topk 10 (epsilon .01 and .1).
        distribution: networks only: logistic, logistic_phi (default), gaussian, reciprocal, cauchy, optimal.
        art_lambda: logistic_phi only: in [0, 1), default .5.
        top1_mode: who answers for P_K(1). "sort": the relaxed permutation matrix, L exactly as above. "sm"
            (default): softmax(logits)_y inside the same logarithm. "smce": a cross-entropy of its own,
            P_K(1) CE - (1 - P_K(1)) log sum_{k>=2} P_K(k) sum_{r<=k} P[r, y].
        reduction: "mean" (over the labels that are not ignored), "sum" or "none" (0 where ignored).
        ignore_index: label of samples that do not count.

    Every logarithm but CE's is log(p (1 - 2e-7) + 1e-7), as in the official code. Half-precision logits are
    computed in float32 and give a float32 loss. A NaN or +inf logit makes the loss of its sample NaN; a -inf logit
    does too, unless m leaves it out or the method has a limit there (softsort). Other samples are not touched.
    Raises ValueError on construction for settings that do not fit, with a sentence saying which.
    """

    def __init__(
        self,
        method: str = "splitter_selection",
        p_k: Sequence[float] | Tensor = (0.2, 0.2, 0.2, 0.2, 0.2),
        num_classes: int = 1000,
        m: int | None = None,
        inverse_temperature: float | None = None,
        distribution: str | None = None,
        art_lambda: float | None = None,
        top1_mode: str = "sm",
        reduction: str = "mean",
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.method = resolve_relaxation(method)
        settings = resolve_settings(self.method, inverse_temperature, distribution, art_lambda, top1_mode)
        self.inverse_temperature, self.distribution = settings["inverse_temperature"], settings["distribution"]
        self.art_lambda, self.top1_mode = settings["art_lambda"], settings["top1_mode"]
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.ignore_index = int(ignore_index)
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise ValueError(f"num_classes must be an integer of at least 2, got {num_classes!r}")
        self.num_classes = num_classes
        self.m = check_m(m, num_classes)
        num_scores = self.m or num_classes
        rows = check_p_k(p_k, num_classes=num_classes, num_scores=num_scores)  # (K,) or (num_classes, K)
        self.k = rows.shape[-1]
        if self.top1_mode != "sort" and bool((rows[..., 0] == 1).all()):
            raise ValueError(
                f"top1_mode={self.top1_mode!r} leaves nothing to sort when P_K(1) = 1: the loss would be softmax "
                f"cross-entropy. Use method='softmax_cross_entropy', or top1_mode='sort'; got p_k={rows.tolist()}"
            )
        self.register_buffer("p_k", rows.float(), False)

        weights = rank_weights(rows, self.top1_mode)  # (..., K)
        falls = weights > torch.nn.functional.pad(weights[..., 1:], (0, 1))  # (..., K) w_r > w_{r+1}
        boundaries = (falls.reshape(-1, self.k).any(0).nonzero().squeeze(1) + 1).tolist()
        options = (self.inverse_temperature, self.distribution, self.art_lambda)
        self.operator = make_operator(self.method, num_scores, self.k, *options, boundaries)
        # With P_K given per sample every rank needs an anchor of its own, where a method has anchors.
        shared = self.method != "soft_topk" or len(boundaries) == self.k
        self.per_sample_operator = self.operator if shared else make_operator(self.method, num_scores, self.k, *options)

    def extra_repr(self) -> str:
        """The configuration, for printing."""
        p_k = [round(p, 6) for p in self.p_k.tolist()] if self.p_k.dim() == 1 else f"<{tuple(self.p_k.shape)}>"
        return (
            f"method={self.method}, p_k={p_k}, num_classes={self.num_classes}, m={self.m}, "
            f"top1_mode={self.top1_mode}, reduction={self.reduction}"
        )

    def check_convergence(self) -> float:
        """The operators' largest relative error so far; warns once if above the tolerance (see sinkhorn.py).

        On the CPU each call does this by itself. On CUDA it waits for the device: call it once per epoch, say.
        """
        return max(self.operator.check_convergence(), self.per_sample_operator.check_convergence())

    def forward(self, logits: Tensor, labels: Tensor, p_k: Tensor | None = None) -> Tensor:
        """The loss: () for reduction mean and sum, (batch,) for none; float32, or float64 for float64 logits.

        logits (batch, num_classes) floating point; labels (batch,) int64, or (batch, num_classes), a distribution
        over classes carried in place of the one-hot (with p_k per class: the expectation of its rows); p_k
        (batch, K), one P_K per sample, in place of the one given on construction (checked on the CPU only).
        Raises TypeError or ValueError for shapes, types and labels that do not fit.
        """
        check_logits_and_labels(logits, labels, self.num_classes, self.ignore_index, allow_distribution=True)
        batch = logits.shape[0]
        if labels.is_floating_point():
            counts = torch.ones(batch, dtype=torch.bool, device=logits.device)
        else:
            counts = labels != self.ignore_index  # (batch,)
            labels = torch.where(counts, labels, 0)

        operator = self.operator
        if p_k is not None:
            operator = self.per_sample_operator
            if p_k.shape != (batch, self.k):
                raise ValueError(f"p_k must have shape (batch, K) = ({batch}, {self.k}), got {tuple(p_k.shape)}")
            if p_k.device.type == "cpu" and not torch.compiler.is_compiling():
                check_p_k(p_k, num_classes=batch)
        elif self.p_k.dim() == 1:
            p_k = self.p_k  # (K,)
        elif labels.is_floating_point():
            p_k = labels.to(self.p_k.dtype) @ self.p_k  # (batch, K)
        else:
            p_k = self.p_k[labels]  # (batch, K)
        if self.m is None:
            scores = to_compute_dtype(logits)  # (batch, n)
        else:
            scores, labels = select_top_m(logits, labels, self.m)  # (batch, m)
        p_k = p_k.to(scores.dtype)
        column = operator._rank_probabilities(scores, labels)  # (batch, K), P[1..K, y]
        loss = self._losses(scores, labels, column, p_k)  # (batch,)
        if self.reduction == "none":
            return torch.where(counts, loss, 0.0)
        total = torch.where(counts, loss, 0.0).sum()
        return total if self.reduction == "sum" else total / counts.sum()

    def _losses(self, scores: Tensor, labels: Tensor, column: Tensor, p_k: Tensor) -> Tensor:
        """The loss of each sample, (batch,): scores (batch, n or m), column (batch, K), p_k (K,) or (batch, K)."""
        has_kernel = not (labels.is_floating_point() or p_k.requires_grad)
        if has_kernel and scores.shape[1] <= FEW_SCORES and use_numba(scores):
            from topk_losses.numba_loss import row_losses

            return row_losses(scores, labels, column, p_k, self.top1_mode, self._losses_by_operations)
        return self._losses_by_operations(scores, labels, column, p_k)

    def _losses_by_operations(self, scores: Tensor, labels: Tensor, column: Tensor, p_k: Tensor) -> Tensor:
        within = (rank_weights(p_k, self.top1_mode) * column).sum(1)  # (batch,)
        if self.top1_mode == "sort":
            return -guarded_log(within)
        if self.top1_mode == "sm":
            softmax = scores.softmax(1)  # (batch, n or m)
            if labels.is_floating_point():
                top1 = (labels.to(scores.dtype) * softmax).sum(1)  # (batch,)
            else:
                top1 = softmax.gather(1, labels.unsqueeze(1)).squeeze(1)  # (batch,)
            return -guarded_log(p_k[..., 0] * top1 + within)
        soft_labels = labels.to(scores.dtype) if labels.is_floating_point() else labels
        top1 = cross_entropy(scores, soft_labels, reduction="none")  # (batch,)
        return p_k[..., 0] * top1 - (1 - p_k[..., 0]) * guarded_log(within)
