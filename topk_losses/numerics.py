"""Functions of scores (rows, n) and of logarithms that losses and operators are written with."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from topk_losses.compilers import has_known_values

# Stands in for the score -inf of a class that is masked out. All operators have reached their limit there, up to
# rounding, and its square is still a float32 number.
MASKED = -1e18
CHUNK = 8  # scores that largest_by_chunks takes the maximum of


def to_compute_dtype(logits: Tensor) -> Tensor:
    """Return the logits as float64 or float32; half precision becomes float32."""
    if logits.dtype == torch.float64:
        return logits
    return logits.float()


def is_above(scores: Tensor, bound: float) -> bool:
    """Tell whether all scores are known to lie above a bound, without waiting for a device."""
    if not has_known_values(scores):
        return False
    return scores.numel() == 0 or float(scores.detach().amin()) > bound


def has_masked(scores: Tensor) -> bool:
    """Tell whether scores are known to hold a class at -inf, or NaN."""
    return has_known_values(scores) and not is_above(scores, -torch.inf)


def finite(scores: Tensor) -> Tensor:
    """Replace -inf by MASKED; NaN and +inf stay, and spoil their own sample only."""
    if is_above(scores, MASKED):  # takes a tenth of the time of a clamp and its gradient
        return scores
    return scores.clamp(min=MASKED)


def centered(scores: Tensor) -> Tensor:
    """Subtract the maximum of each row (rows, n), so that an offset of the logits costs no digits; -inf is MASKED.

    A row with NaN or +inf becomes NaN as a whole.
    """
    highest = scores.detach().amax(1, keepdim=True)  # (rows, 1)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    nan_of_infinity = 0 * highest
    return finite(scores) - (highest + nan_of_infinity)


def largest(scores: Tensor, m: int) -> Tensor:
    """Return the classes of the m largest scores of each row (rows, n), falling: (rows, m) int64."""
    scores = scores.detach()
    if has_known_values(scores) and scores.shape[1] >= 4 * CHUNK * max(m, 1):
        return largest_by_chunks(scores, m)
    return scores.topk(m, dim=1).indices


def largest_by_chunks(scores: Tensor, m: int) -> Tensor:
    """Compute `largest` in half the time that torch.topk takes on a CPU.

    The m largest scores lie in the m chunks with the largest maxima, or in the rest, which fills no chunk.
    """
    n = scores.shape[1]
    num_chunks = n // CHUNK
    rest_begins = CHUNK * num_chunks
    chunks = scores[:, :rest_begins].unflatten(1, (CHUNK, num_chunks))  # a chunk is a column
    best_chunks = chunks.amax(1).topk(m, dim=1, sorted=False).indices  # (rows, m)
    offsets = torch.arange(0, rest_begins, num_chunks, device=scores.device)  # (CHUNK,)
    in_best_chunks = (best_chunks.unsqueeze(1) + offsets.view(1, -1, 1)).flatten(1)  # (rows, CHUNK m)
    rest = torch.arange(rest_begins, n, device=scores.device).expand(scores.shape[0], -1)
    classes = torch.cat([in_best_chunks, rest], dim=1)
    places = scores.gather(1, classes).topk(m, dim=1).indices  # (rows, m)
    return classes.gather(1, places)


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Return 1 at the labels (rows,) and 0 elsewhere, of the shape and type of scores (rows, n)."""
    return torch.zeros_like(like).scatter(1, labels.unsqueeze(1), 1)


def select_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Select the labels (rows,) from values of every class (rows, J, n): (rows, J)."""
    index = labels.view(-1, 1, 1).expand(-1, values.shape[1], 1)
    return values.gather(2, index).squeeze(2)


def select_ranks(values: Tensor, ks: Sequence[int]) -> Tensor:
    """Select the ranks ks from values of the ranks 1, 2, ..., (rows, K, ...): (rows, len(ks), ...)."""
    if len(ks) in (0, values.shape[1]):
        return values[:, : len(ks)]
    # slices, since an index would be copied to the device
    return torch.stack([values[:, k - 1] for k in ks], dim=1)


def ranks_like(ks: Sequence[int], like: Tensor) -> Tensor:
    """Return ks as numbers like a tensor's, (1, len(ks)), made on its device."""
    all_ranks = torch.arange(1, max(ks, default=0) + 1, dtype=like.dtype, device=like.device)
    return select_ranks(all_ranks.unsqueeze(0), ks)


def rank_differences(within: Tensor) -> Tensor:
    """Return P(rank = r) from P(rank <= r), r = 1..k, (rows, k, ...)."""
    first_rank = within[:, :1]
    other_ranks = within.diff(dim=1).clamp(min=0)  # what is within r rises with r, but for rounding
    return torch.cat([first_rank, other_ranks], dim=1)


def number_like(number: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a tensor () like another, made on its device."""
    if isinstance(number, Tensor):
        return number.to(like)
    return like.new_full((), number)


def wide_dtype(scores: Tensor) -> torch.dtype:
    """Return float64 where the device of the scores has it, for logarithms whose differences count."""
    if scores.device.type == "mps":
        return scores.dtype
    return torch.float64


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """Compute log(exp a + exp b), whose second derivatives are right however far apart a and b lie.

    Those of torch.logaddexp are NaN where exp(a - b) is too large a number.
    """
    is_higher = a >= b
    high = torch.where(is_higher, a, b)
    low = torch.where(is_higher, b, a)
    return high + torch.log1p(torch.exp(low - high))


def one_minus_exp(x: Tensor) -> Tensor:
    """Return 1 - exp(x), x <= 0, with all digits of its derivative, however far below 0.

    That of torch.expm1, its value + 1, is 0 in float32 from x = -17 on.
    """
    return torch.where(x > -1, -torch.expm1(x), 1 - x.exp())


def log_mixture(logs: Tensor, weights: Tensor, dim: int = 1, all_positive: bool = False) -> Tensor:
    """Return log sum_j weights_j exp(logs_j) over a dimension, which is dropped; 0 where no weight is above 0.

    A weight of 0 has a finite gradient: exp(logs_j) over the sum. all_positive: there is none. Where each weight is on
    -inf, so is the result, with a gradient of 0.
    """
    if all_positive:
        return (logs + weights.log()).logsumexp(dim)
    if logs.shape[dim] == 0:
        return torch.zeros_like(logs.sum(dim))
    weights = weights.expand_as(logs)
    has_weight = weights > 0
    highest = logs.detach().masked_fill(~has_weight, -torch.inf).amax(dim, keepdim=True)
    is_nothing = highest == -torch.inf
    highest = highest.masked_fill(is_nothing, 0)
    is_nothing = is_nothing.squeeze(dim)
    relative = (logs - highest).clamp(max=50).exp()  # what is above the highest has no weight
    total = (relative * weights).sum(dim).masked_fill(is_nothing, 1)
    log_total = total.log() + highest.squeeze(dim)
    return log_total.masked_fill(is_nothing & has_weight.any(dim), -torch.inf)


def guarded_log(p: Tensor) -> Tensor:
    """Return log(p (1 - 2e-7) + 1e-7), which is finite for p in [0, 1]: the epsilon of the official code."""
    return torch.log(p * (1 - 2e-7) + 1e-7)


class SavedTensors(Protocol):
    """What an autograd function keeps from its forward pass for its backward pass."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class LogCumSumExp(torch.autograd.Function):
    """torch.logcumsumexp of (rows, n) over n, with second derivatives also where a gradient is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.logcumsumexp(1)

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: SavedTensors, grad: Tensor) -> Tensor:
        x, sums = ctx.saved_tensors
        return weighted_cumsum(grad.flip(1), -sums.flip(1), x.flip(1)).flip(1)


def log_cumsum_exp(x: Tensor) -> Tensor:
    """Compute log of the cumulative sums of exp(x) over the columns of (rows, n)."""
    result: Tensor = LogCumSumExp.apply(x)
    return result


def weighted_cumsum(values: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """Compute sum_{j<=i} values_j exp(inner_j + outer_i), (rows, n), however large the exponents."""
    return positive_cumsum(values, inner, outer) - positive_cumsum(-values, inner, outer)


def positive_cumsum(values: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """Compute `weighted_cumsum` of the values that are above 0."""
    is_positive = values > 0
    logs = torch.where(is_positive, torch.where(is_positive, values, 1).log(), -1e30)
    return (log_cumsum_exp(logs + inner) + outer).exp()


def log_sum_of_others(z: Tensor) -> Tensor:
    """Return log sum_{i != j} exp(z_i) for every class j of z (rows, n).

    The sums run from both ends, so that nothing is subtracted.
    """
    before = log_cumsum_exp(z[:, :-1])
    behind = log_cumsum_exp(z[:, 1:].flip(1)).flip(1)
    return log_add_exp(pad(before, (1, 0), value=MASKED), pad(behind, (0, 1), value=MASKED))
