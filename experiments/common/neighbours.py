"""The k nearest neighbours: a loss that is differentiable through a relaxed top-k, and the exact search at test time.

Scores are minus squared Euclidean distances, so that the nearest candidate has rank 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from topk_losses import RELAXATIONS, AutoTemperature, TopKOperator
from topk_losses.operator import guarded_log

CROSS_ENTROPY = "softmax_cross_entropy"
UNTRAINED = ("inputs", "pca")  # kNN on the inputs as they are, on their principal components
METHODS = (*RELAXATIONS, CROSS_ENTROPY, *UNTRAINED)
LOSSES = ("mass", "log_mass")
QUERY_ROWS = 1000  # queries of a tile: with as many training points it takes some 10 MB


def squared_distances(queries: Tensor, candidates: Tensor) -> Tensor:
    """Squared Euclidean distances (Q, N) of queries (Q, d) and candidates (N, d), at least 0, by one product.

    Rounding is relative to the squared norms: the caller moves both to where these are small.
    """
    norms = candidates.square().sum(1)  # (N,)
    distances = torch.addmm(norms, queries, candidates.T, alpha=-2) + queries.square().sum(1, keepdim=True)
    return distances.clamp(min=0)


class NeighbourLoss(nn.Module):
    """The mean over queries of minus the soft top-k mass on right candidates, or of minus its logarithm.

    Args:
        operator: the relaxed top-k of the candidates.
        loss: "mass", -sum_j right_j sum_{r <= k} P[r, j], between -k and 0; or "log_mass", -log of that mass / k.
        auto: what the inverse temperature follows the scores by; None: it is the operator's.
    """

    generator: torch.Generator | None = None  # of operators that draw noise

    def __init__(self, operator: TopKOperator, loss: str, auto: AutoTemperature | None = None) -> None:
        super().__init__()
        self.operator, self.loss, self.auto = operator, loss, auto
        self.inverse_temperature = operator.inverse_temperature

    def forward(self, queries: Tensor, candidates: Tensor, right: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Compute the loss, (). A query without a right candidate counts as 0.

        queries (Q, d) and candidates (C, d) float32. right (Q, C) bool: candidates of the query's label. left_out
        (Q, C) bool: candidates that are masked out, the query itself say.
        """
        center = candidates.detach().mean(0)
        scores = -squared_distances(queries - center, candidates - center)  # (Q, C)
        if left_out is not None:
            scores, right = scores.masked_fill(left_out, -torch.inf), right & ~left_out
        beta: Any = self.inverse_temperature
        if self.auto is not None:
            self.auto.observe(scores)
            beta = self.auto.value()
        counts = right.any(1)  # (Q,)
        # Where nothing is right all is: the sum is then k, whatever the scores, and is left out.
        mass = (right | ~counts.unsqueeze(1)).to(scores.dtype)  # (Q, C)
        share = self.operator.rank_probabilities(scores, mass, beta, self.generator).sum(1)  # (Q,)
        losses = -share if self.loss == "mass" else -guarded_log((share / self.operator.k).clamp(max=1))
        return torch.where(counts, losses, 0).mean()


def nearest(queries: Tensor, tiles: Iterable[Tensor], k: int) -> Tensor:
    """The rows of the k nearest of any number of points to each query, nearest first: (Q, k) int64.

    queries (Q, d) float32. tiles: the points, (T, d) each, in order. Exact, to the rounding of float32; of equal
    distances the smaller row comes first. Raises ValueError for fewer points than k.
    """
    centre = queries.mean(0)
    queries = queries - centre
    # A distance's bits, then its row, as one integer: bits of floats from 0 on have the order of the floats.
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    begin = 0
    for tile in tiles:
        rows = torch.arange(begin, begin + len(tile), device=queries.device)  # (T,)
        tile, merged = tile - centre, []
        for part, so_far in zip(queries.split(QUERY_ROWS), best.split(QUERY_ROWS)):
            bits = squared_distances(part, tile).view(torch.int32)
            keys = torch.cat([so_far, torch.add(rows, bits, alpha=2**32)], dim=1)  # (q, at most k + T)
            merged.append(keys.topk(min(k, keys.shape[1]), dim=1, largest=False).values)
        best = torch.cat(merged)
        begin += len(tile)
    if begin < k:
        raise ValueError(f"there are {begin} points, fewer than the k={k} nearest that were asked for")
    return best & 0xFFFFFFFF


def majority(labels: Tensor) -> Tensor:
    """The label (Q,) that most of the neighbours' labels (Q, k), nearest first, are; of equally many the nearest's."""
    k = labels.shape[1]
    votes = (labels.unsqueeze(2) == labels.unsqueeze(1)).sum(2)  # (Q, k) how many have the label of each
    first = (votes * k - torch.arange(k, device=labels.device)).argmax(1, keepdim=True)  # (Q, 1)
    return labels.gather(1, first).squeeze(1)
