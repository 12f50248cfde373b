"""The loss of any method by its name."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsIndex

from torch import Tensor

from topk_losses.checks import PK, check_p_k, check_several
from topk_losses.classification import ClassificationLoss
from topk_losses.methods import (
    METHODS,
    make_operator,
    resolve_inverse_temperature,
    resolve_method,
    resolve_settings,
)
from topk_losses.topk_cross_entropy import TopKCrossEntropyLoss

Setting = bool | int | float | str | Tensor | Sequence[float] | Mapping[int, float] | None
DEFAULT_K = 5  # of losses of one k


def make_loss(
    method: str,
    p_k: PK | None = None,
    num_classes: SupportsIndex | None = None,
    m: SupportsIndex | None = None,
    inverse_temperature: float | Tensor | str | None = None,
    distribution: str | None = None,
    art_lambda: float | None = None,
    top1_mode: str | None = None,
    **settings: Setting,
) -> ClassificationLoss:
    """Build the loss of any method by its name.

    Args:
        method: a name of METHODS. Relaxed sorts give a TopKCrossEntropyLoss.
        p_k: as in TopKCrossEntropyLoss (default: 0.2 for each of 1 to 5). Losses without a k take None or [1, 0, ...],
            losses of one k a P_K with all mass on it (default: k = 5).
        num_classes: number of classes (default: that of the logits).
        m: number of scores that are sorted. All methods accept it, as published commands pass it to every run; losses
            without a sort see all scores.
        inverse_temperature: for smooth_topk and smooth_hard_topk it is tau itself, as in the paper.
        distribution, art_lambda: of a relaxed network.
        top1_mode: as in TopKCrossEntropyLoss.
        settings: other arguments of the class, such as weight, reduction, margin, noise_rate or q.

    Raises:
        ValueError: an unknown method (the message has the nearest name), or settings that do not fit it.
    """
    method = resolve_method(method)
    resolve_settings(method, inverse_temperature, distribution, art_lambda, top1_mode)
    given: dict[str, Setting] = dict(settings)
    warn_if_incomplete(method, given)
    loss = METHODS[method].loss
    if loss is not None:
        if inverse_temperature is not None:
            if loss.temperature_name in given:
                raise ValueError(f"{method} takes its {loss.temperature_name} as inverse_temperature: give one of them")
            given[loss.temperature_name] = resolve_inverse_temperature(METHODS[method], inverse_temperature)
        return make_loss_without_operator(method, loss, p_k, check_several("num_classes", num_classes), given)
    if p_k is not None:
        given["p_k"] = p_k
    build: Callable[..., ClassificationLoss] = TopKCrossEntropyLoss
    return build(
        make_operator(method, distribution, art_lambda),
        num_classes=num_classes,
        m=m,
        inverse_temperature=inverse_temperature,
        top1_mode=top1_mode or "sm",
        **given,
    )


def warn_if_incomplete(method: str, settings: Mapping[str, Setting]) -> None:
    """Warn where a method lacks the argument that its name promises."""
    expected = METHODS[method].expects
    if expected and settings.get(expected) is None:
        message = f"{method} without {expected} treats all classes alike: give {expected}"
        warnings.warn(message, UserWarning, stacklevel=3)


def make_loss_without_operator(
    method: str,
    loss: Callable[..., ClassificationLoss],
    p_k: PK | None,
    num_classes: int | None,
    settings: Mapping[str, Setting],
) -> ClassificationLoss:
    """Build a loss of one k or without a k; raise ValueError for a P_K with several ranks."""
    has_k = METHODS[method].takes == "one k"
    if p_k is None:
        p_k = DEFAULT_K if has_k else 1
    rows = check_p_k(p_k, num_classes, num_classes)
    has_one_rank = rows.dim() == 1 and int((rows > 0).sum()) == 1
    if not has_one_rank or (not has_k and len(rows) > 1):
        which = "the first: P_K = [1, 0, ..]"
        if has_k:
            which = "for instance 0 0 0 0 1 for top-5 only"
        raise ValueError(
            f"{method} optimises a single k: p_k must have all its mass on one entry, {which}; got {rows.tolist()}"
        )
    if "k" in settings:
        raise ValueError(f"{method} takes its k as p_k={settings['k']}")
    if has_k:
        return loss(len(rows), num_classes=num_classes, **settings)
    return loss(num_classes=num_classes, **settings)
