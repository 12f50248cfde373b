"""From the loss flags to a loss, and what some losses need in training: noise, class counts, a temperature schedule."""

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn

from topk_losses import METHODS, RELAXATIONS, SortedSoftTopK, TopKOperator, make_loss, make_operator, resolve_settings
from topk_losses.methods import SINGLE_K, TOP1

# Settings that only some losses have: each is a flag of the same name and an argument of make_loss, and a run's name
# depends on it only where it is given.
OWN_SETTINGS = ("label_smoothing", "margin", "noise_rate", "q", "alpha", "beta", "tau")
# P_K without --p_k, as in Table 1; [.2 .2 .2 .2 .2] for the other methods.
DEFAULT_P_K = {
    **{method: [1.0, 0.0, 0.0, 0.0, 0.0] for method in TOP1},
    **{method: [0.0, 0.0, 0.0, 0.0, 1.0] for method in SINGLE_K},
}


def loss_settings(
    args: Namespace, top1_mode: str, inverse_temperatures: Mapping[str, float], m: int | None = None
) -> dict[str, Any]:
    """Fill in the arguments of make_loss: the script's defaults (top1_mode, temperatures, m), then the library's."""
    relaxed = args.method in RELAXATIONS
    settings = {
        "method": args.method,
        "p_k": args.p_k or DEFAULT_P_K.get(args.method, [0.2] * 5),
        "m": (args.m or m) if relaxed else None,  # published commands pass --m to every row of a table
        **operator_settings(args, inverse_temperatures, args.top1_mode or (top1_mode if relaxed else None)),
        **{name: getattr(args, name, None) for name in OWN_SETTINGS},
    }
    # 0 is the same as None; the noise_rate of forward_correction has another default.
    without = ("label_smoothing", "margin", *(["noise_rate"] if relaxed else []))
    return settings | {name: settings[name] or None for name in without}


def operator_settings(
    args: Namespace, inverse_temperatures: Mapping[str, float], top1_mode: str | None = None
) -> dict[str, Any]:
    """Fill in inverse_temperature, distribution, art_lambda, top1_mode. Raises SystemExit where one does not fit."""
    beta = args.inverse_temperature or inverse_temperatures.get(args.method)
    shape = (args.distribution, args.art_lambda, top1_mode)
    try:
        settings = resolve_settings(args.method, first_temperature(beta), *shape)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    return settings | ({"inverse_temperature": beta} if schedule_ends(beta) else {})


def build_operator(settings: Mapping[str, Any], num_scores: int, k: int, sorted: bool = False) -> TopKOperator:
    """Build a relaxed top-k operator with a row for each of k ranks. Raises SystemExit for settings that do not fit.

    sorted: soft_topk with a target point for each rank, by which Xie et al. tell the ranks apart.
    """
    beta = first_temperature(settings["inverse_temperature"])
    beta = None if beta == "auto" else beta
    try:
        if sorted:
            return SortedSoftTopK(k, beta)
        shape = (settings["distribution"], settings["art_lambda"])
        return make_operator(settings["method"], num_scores, k, beta, *shape)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def build_loss(
    settings: Mapping[str, Any], num_classes: int | None, device: torch.device, implementation: str = "ours"
) -> nn.Module:
    """Build the loss that loss_settings, or more arguments of make_loss, describe. num_classes: None where it varies.

    Raises:
        SystemExit: the settings do not fit one another or the number of classes.
    """
    ends = schedule_ends(settings["inverse_temperature"])
    arguments = {name: value for name, value in settings.items() if value is not None}
    try:
        if implementation == "difftopk":
            unknown = [name for name in OWN_SETTINGS if name in arguments] + (["temperature schedule"] if ends else [])
            if unknown:
                raise ValueError(f"difftopk has no {unknown[0]}: leave it out, or take --implementation ours")
            from experiments.common.official_loss import make_official_loss

            return make_official_loss(**arguments, num_classes=num_classes, device=device)
        arguments |= {"inverse_temperature": ends[0]} if ends else {}
        loss_fn = make_loss(**arguments, num_classes=num_classes).to(device)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except TypeError as error:  # an argument that the loss lacks
        raise SystemExit(f"error: {settings['method']} does not take these flags: {error}") from None
    if ends and not hasattr(loss_fn, "inverse_temperature"):
        raise SystemExit(f"error: the temperature of {settings['method']} is fixed: give one number")
    return loss_fn


def count_classes(loss_fn: nn.Module, method: str, labels: Tensor, num_classes: int) -> None:
    """Give imbalanced_noised_topk the number of training labels (N,) in each class, at least 1."""
    if method == "imbalanced_noised_topk":
        loss_fn.class_counts = torch.bincount(labels, minlength=num_classes).clamp(min=1)  # type: ignore[assignment]


def schedule_ends(beta: float | str | None) -> tuple[float, float] | None:
    """The two ends of a schedule such as "0.25:4"; None for a number, "auto" or None."""
    if not isinstance(beta, str) or ":" not in beta:
        return None
    start, end = map(float, beta.split(":"))
    return start, end


def first_temperature(beta: float | str | None) -> float | str | None:
    """The first value of a schedule; a number, "auto" or None as it is."""
    ends = schedule_ends(beta)
    return ends[0] if ends else beta


def set_temperature(loss_fn: nn.Module, beta: float | str | None, progress: float) -> None:
    """Set the inverse temperature of a schedule at this share of the training, in [0, 1]; it grows by equal factors."""
    if ends := schedule_ends(beta):
        loss_fn.inverse_temperature = ends[0] * (ends[1] / ends[0]) ** progress


def current_temperature(loss_fn: nn.Module | None, beta: float | str | None) -> dict[str, float]:
    """{"inverse_temperature": its current value} if it changes during training, else {}."""
    if not isinstance(beta, str):
        return {}
    auto = getattr(loss_fn, "auto", None)
    return {"inverse_temperature": float(loss_fn.inverse_temperature if auto is None else auto.value())}


def is_stochastic(method: str) -> bool:
    return METHODS[method].stochastic  # whether its loss draws noise


def seed_noise(loss_fn: nn.Module, device: torch.device, *numbers: int) -> None:
    """Let a loss or operator draw the same noise whenever these numbers (seed, epoch, rank) are the same."""
    loss_fn.generator = torch.Generator(device).manual_seed(mixed(*numbers))


def seed_all(*numbers: int) -> None:
    """Let whatever has no generator of its own draw the same whenever these numbers (seed, update) are the same."""
    torch.manual_seed(mixed(*numbers))


def mixed(*numbers: int) -> int:
    """Return one seed for several numbers. A CPU takes 32 bits of it: a sum or a shift would lose some of them."""
    return int(SeedSequence(numbers).generate_state(1, "uint64")[0]) >> 1


def check_finite(value: float, where: str) -> None:
    """Raise SystemExit, with advice, for a loss that is not finite."""
    if not math.isfinite(value):
        message = f"the loss became {value} {where}; nothing is recorded"
        raise SystemExit(f"error: {message}. Try a smaller --lr, --precision fp32, or another --inverse_temperature")


def compiled(module: nn.Module, wanted: bool, device: torch.device) -> nn.Module:
    """Compile a module if wanted; on a GPU its kernels are launched as one CUDA graph."""
    if not wanted:
        return module
    return torch.compile(module, mode="reduce-overhead" if device.type == "cuda" else None)


def check_convergence(loss_fn: nn.Module) -> None:
    """Let a loss that iterates warn if it did not converge. On a GPU this waits: once an epoch."""
    getattr(loss_fn, "check_convergence", lambda: None)()
