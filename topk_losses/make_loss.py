"""One builder for every method of the paper and its baselines, with the names of the command line."""

from collections.abc import Sequence

from torch import Tensor, nn

from topk_losses.checks import check_logits_and_labels, check_p_k
from topk_losses.operator import to_compute_dtype
from topk_losses.registry import RELAXATIONS, resolve_method, resolve_settings
from topk_losses.smooth_topk import SmoothHardTopKLoss, SmoothTopKLoss
from topk_losses.topk_cross_entropy import TopKCrossEntropyLoss


class SoftmaxCrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss that refuses what the other losses refuse, and computes in float32 as they do."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (batch, n), labels (batch,) int64 or (batch, n) a distribution -> () or (batch,)."""
        check_logits_and_labels(logits, labels, None, self.ignore_index, allow_distribution=True)
        scores = to_compute_dtype(logits)  # (batch, n)
        return super().forward(scores, labels.to(scores.dtype) if labels.is_floating_point() else labels)


def _single_k(method: str, p_k: Sequence[float] | Tensor, num_classes: int) -> int:
    rows = check_p_k(p_k, num_classes=num_classes, num_scores=num_classes)
    if rows.dim() != 1 or int((rows > 0).sum()) != 1:
        raise ValueError(
            f"{method} optimises a single k: p_k must have all its mass on one entry, for instance "
            f"0 0 0 0 1 for k = 5; got {rows.tolist()}"
        )
    return int(rows.argmax()) + 1


def make_loss(
    method: str,
    p_k: Sequence[float] | Tensor | None = None,
    num_classes: int = 1000,
    m: int | None = None,
    inverse_temperature: float | None = None,
    distribution: str | None = None,
    art_lambda: float | None = None,
    top1_mode: str | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> nn.Module:
    """Build the loss of any method in METHODS, as loss(logits, labels). None means the method's default.

    Relaxations give TopKCrossEntropyLoss (p_k default .2 x5). softmax_cross_entropy takes p_k None or [1, 0, ..].
    smooth_topk and smooth_hard_topk take a p_k with all mass on one k (default k = 5); their inverse_temperature is
    tau itself, the one exception the paper made. m is accepted for these three, since published commands pass it
    to every row of a table, and has no effect: they see all scores. Raises ValueError with a sentence for an
    unknown method (naming the nearest) and for settings that do not fit it.
    """
    method = resolve_method(method)
    settings = resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode)
    common = {"reduction": reduction, "ignore_index": ignore_index}
    if method in RELAXATIONS:
        p_k = (0.2,) * 5 if p_k is None else p_k
        return TopKCrossEntropyLoss(method, p_k, num_classes, m, **settings, **common)
    if method == "softmax_cross_entropy":
        if p_k is not None and _single_k(method, p_k, num_classes) != 1:
            raise ValueError(f"softmax_cross_entropy is the loss of P_K = [1, 0, ..], got p_k={list(p_k)}")
        return SoftmaxCrossEntropyLoss(**common)
    k = _single_k(method, (0, 0, 0, 0, 1) if p_k is None else p_k, num_classes)
    loss = SmoothTopKLoss if method == "smooth_topk" else SmoothHardTopKLoss
    return loss(k, tau=settings["inverse_temperature"], num_classes=num_classes, **common)
