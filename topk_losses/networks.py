"""Sorting and selection networks, relaxed (Petersen et al. 2021, 2022) and evaluated for the true class alone.

A relaxed comparator puts its values in order and then mixes them, the more the closer they are (sigmoids.py). Two
channels run through the same comparators: the scores, from which the shares are taken, and the mass of the true class
(its one-hot), which ends as P[1..k, y] on the top wires. The networks themselves are in comparators.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from topk_losses.checks import check_choice
from topk_losses.comparators import CONSTRUCTIONS, find_comparators, find_layer_sizes, find_table
from topk_losses.kernels import find_kernel
from topk_losses.numerics import centered, has_masked, number_like, one_hot, select_ranks
from topk_losses.operator import TopKOperator
from topk_losses.sigmoids import check_sigmoid, distance_of_rounding, mixing


def compare(
    x: Tensor, wires: Tensor, distribution: str, beta: float | Tensor, art_lambda: float | None
) -> tuple[Tensor, Tensor]:
    """Tell which comparators of a layer are out of order, and the share that they mix: (c, rows) each.

    x (n, rows): the scores less their maximum. wires (2c,): the wires hi, then lo.
    """
    hi, lo = x.index_select(0, wires).chunk(2)  # (c, rows) each
    d = lo - hi
    rounding = distance_of_rounding(x.dtype) * torch.maximum(lo.abs(), hi.abs())
    d = torch.where(d.abs() <= rounding, d - d.detach(), d)  # equal, with the derivative of d
    is_swapped = d > 0
    # the distance |d|, but at 0 with a derivative, for which sigmoid(-|d|) has that of sigmoid(d)
    distance = torch.where(is_swapped, d, -d)
    return is_swapped, mixing(distance, distribution, beta, art_lambda)


def exchange(x: Tensor, wires: Tensor, is_swapped: Tensor, share: Tensor) -> Tensor:
    """Apply a layer to x (n, channels, rows): a symmetric map of the two wires of each comparator."""
    on_hi, on_lo = x.index_select(0, wires).chunk(2)  # (c, channels, rows) each
    is_swapped = is_swapped.unsqueeze(1)
    higher = torch.where(is_swapped, on_lo, on_hi)
    lower = torch.where(is_swapped, on_hi, on_lo)
    moved = share.unsqueeze(1) * (higher - lower)
    return x.index_copy(0, wires, torch.cat([higher - moved, lower + moved]))


def carry_mass(
    scores: Tensor,
    target: Tensor,
    beta: Tensor,
    comparators: Tensor,
    layer_sizes: list[int],
    k: int,
    distribution: str,
    art_lambda: float | None,
) -> list[Tensor]:
    """Compute what the kernel computes, in any precision: P of the target, (rows, k), by carrying its mass along.

    scores (rows, n); target: labels (rows,) or a mass (rows, n); comparators (2, C): the wires hi and the wires lo.
    """
    mass = mass_of(target, scores)
    x = torch.stack([centered(scores).T, mass.T], dim=1)  # (n, 2, rows)
    for layer in comparators.split(layer_sizes, dim=1):
        wires = layer.flatten()
        is_swapped, share = compare(x[:, 0], wires, distribution, beta, art_lambda)
        x = exchange(x, wires, is_swapped, share)
    return [x[x.shape[0] - k :, 1].flip(0).T]


def mass_of(target: Tensor, scores: Tensor) -> Tensor:
    """Return the mass of each class (rows, n): that of a set, or the one-hot of labels (rows,)."""
    if target.is_floating_point():
        return target.to(scores.dtype)
    return one_hot(target, scores)


@dataclass(frozen=True)
class RelaxedNetwork(TopKOperator):
    """Comparator network, relaxed by one of six sigmoid functions (Petersen et al. 2022, section 3.3).

    It is built for the numbers of scores and ranks of each call, and kept. The default inverse temperature is 1, as
    published for ImageNet; 0.5 was published for CIFAR-100.

    A class at -inf is masked out where numbers can be read, on a CPU. Elsewhere (CUDA, torch.compile, torch.func) it is
    sorted with the others. A loss with m is right there if each row has at least m unmasked classes; otherwise leave
    masked columns out.

    Args:
        construction: "odd_even", "bitonic" or "splitter_selection" (default).
        distribution: one of DISTRIBUTIONS (default: "logistic_phi").
        art_lambda: lambda of logistic_phi, in [0, 1) (default: 0.5, as published).

    Raises:
        ValueError: an unknown name, or an art_lambda without logistic_phi.
    """

    construction: str = "splitter_selection"
    distribution: str = "logistic_phi"
    art_lambda: float | None = None

    default_inverse_temperature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_choice("construction", self.construction, CONSTRUCTIONS)
        check_sigmoid(self.distribution, self.art_lambda)

    @property
    def art_exponent(self) -> float | None:
        """The exponent of ART, which logistic_phi alone has."""
        if self.distribution == "logistic_phi" and self.art_lambda is None:
            return 0.5
        return self.art_lambda

    @property
    def logit_std(self) -> float | None:  # type: ignore[override]
        return {"bitonic": 13.0, "splitter_selection": 6.0}.get(self.construction)

    def topk_probabilities_of_labels(
        self,
        scores: Tensor,
        labels: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        if not has_masked(scores):
            return self._carry(scores, labels, ks, inverse_temperature)

        label_is_masked = scores.gather(1, labels.unsqueeze(1)) == -torch.inf  # (rows, 1)
        order, num_sorted = unmasked_first(scores, ks, label_is_masked)
        place = order.argsort(dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)  # (rows,)
        result = scores.new_zeros(len(scores), len(ks))
        for rows, number in groups_of_equal(num_sorted):
            scores_of_group = scores[rows].gather(1, order[rows, :number])
            group = self._carry(scores_of_group, place[rows], ks, inverse_temperature)
            result = result.index_copy(0, rows, group)
        return result

    def topk_probabilities_of_sets(
        self,
        scores: Tensor,
        sets: Tensor,
        ks: Sequence[int],
        inverse_temperature: float | Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        if not has_masked(scores):
            return self._carry(scores, sets, ks, inverse_temperature)

        order, num_sorted = unmasked_first(scores, ks)
        result = scores.new_zeros(len(scores), len(ks))
        for rows, number in groups_of_equal(num_sorted):
            classes = order[rows, :number]
            scores_of_group = scores[rows].gather(1, classes)
            sets_of_group = sets[rows].gather(1, classes)
            group = self._carry(scores_of_group, sets_of_group, ks, inverse_temperature)
            result = result.index_copy(0, rows, group)
        return result

    def topk_probabilities(
        self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor, generator: Generator | None = None
    ) -> Tensor:
        if not has_masked(scores):
            return self._of_every_class(scores, ks, inverse_temperature)

        n = scores.shape[1]
        order, num_sorted = unmasked_first(scores, ks)
        result = scores.new_zeros(len(scores), len(ks), n)
        for rows, number in groups_of_equal(num_sorted):
            scores_of_group = scores[rows].gather(1, order[rows, :number])
            group = self._of_every_class(scores_of_group, ks, inverse_temperature)  # (rows of the group, J, number)
            result = result.index_copy(0, rows, pad(group, (0, n - number)))
        place = order.argsort(dim=1).unsqueeze(1)  # (rows, 1, n)
        return result.gather(2, place.expand_as(result))

    def _carry(self, scores: Tensor, target: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor) -> Tensor:
        """Carry the target through the network with the scores: labels (rows,), or sets (rows, n)."""
        k = max(ks, default=1)
        comparators, layer_sizes = self._comparators(scores, k)
        beta = number_like(inverse_temperature, scores)
        carry = find_kernel("carry_mass", scores, beta, target)
        if carry is None or not layer_sizes:
            carry = carry_mass
        outputs = carry(scores, target, beta, comparators, layer_sizes, k, self.distribution, self.art_exponent)
        rank_probabilities = outputs[0]  # (rows, k)
        if not layer_sizes:  # a gradient of 0, and NaN for a row with NaN or +inf
            rank_probabilities = rank_probabilities + 0 * centered(scores).sum(1, keepdim=True)
        return select_ranks(rank_probabilities.cumsum(1), ks)

    def _of_every_class(self, scores: Tensor, ks: Sequence[int], inverse_temperature: float | Tensor) -> Tensor:
        """Evaluate in both directions (Petersen et al. 2022, section 3.2): scores forward, rows of P backward.

        A relaxed comparator is a symmetric 2 x 2 matrix, so that row r of P, at first the unit vector of its output
        wire, runs through the same comparators in reverse order.
        """
        n = scores.shape[1]
        k = max(ks, default=1)
        comparators, layer_sizes = self._comparators(scores, k)
        layers = [layer.flatten() for layer in comparators.split(layer_sizes, dim=1)]

        x = centered(scores).T.unsqueeze(1)  # (n, 1, rows)
        decisions = []
        for wires in layers:
            is_swapped, mixing = compare(x[:, 0], wires, self.distribution, inverse_temperature, self.art_exponent)
            x = exchange(x, wires, is_swapped, mixing)
            decisions.append((wires, is_swapped, mixing))

        unit_vectors = torch.eye(n, dtype=scores.dtype, device=scores.device)[:, n - k :].flip(1)  # (n, k)
        P = unit_vectors.unsqueeze(2).expand(-1, -1, scores.shape[0])  # (n, k, rows)
        for wires, is_swapped, mixing in reversed(decisions):
            P = exchange(P, wires, is_swapped, mixing)
        if not layers:  # a gradient of 0, and NaN for a row with NaN or +inf
            P = P + 0 * x
        return select_ranks(P.permute(2, 1, 0).cumsum(1), ks)

    def _comparators(self, scores: Tensor, k: int) -> tuple[Tensor, list[int]]:
        """Return the wires of the comparators, (2, C), on the device of the scores, and the sizes of the layers."""
        n = scores.shape[1]
        device = str(scores.device)
        if not torch.compiler.is_compiling():
            return find_table(self.construction, n, k, device)
        n = range(n).stop  # a constant, instead of the compiler's symbol
        layer_sizes = find_layer_sizes(self.construction, n, k)
        return find_comparators(self.construction, n, k, device), [int(size) for size in layer_sizes.split()]


def unmasked_first(scores: Tensor, ks: Sequence[int], sorts_all: Tensor | bool = False) -> tuple[Tensor, Tensor]:
    """Order the classes of each row with the unmasked ones first, (rows, n), and count those that are sorted, (rows,).

    A row with fewer unmasked classes than ranks, or that `sorts_all` (rows, 1) names, sorts the masked ones as well.
    """
    is_masked = scores == -torch.inf  # (rows, n)
    num_unmasked = (~is_masked).sum(1, keepdim=True)  # (rows, 1)
    sorts_all = sorts_all | (num_unmasked < max(ks, default=1))
    is_left_out = is_masked & ~sorts_all
    order = is_left_out.int().argsort(dim=1, stable=True)
    return order, scores.shape[1] - is_left_out.sum(1)


def groups_of_equal(numbers: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the rows of equal numbers (rows,), and the number."""
    for number in numbers.unique().tolist():
        rows = (numbers == number).nonzero().squeeze(1)
        yield rows, number
