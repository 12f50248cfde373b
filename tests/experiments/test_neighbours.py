"""The neighbour search against float64 and integers, the vote against a count, the loss against its definition."""

import operator as python_operator
from collections import Counter

import pytest
import torch

from experiments import train_knn
from experiments.common.operators import BoundOperator
from experiments.train_knn import LOSSES, NeighbourLoss, majority, nearest, squared_distances
from tests.methods import RELAXED
from topk_losses import make_operator

QUERIES = 7
CANDIDATES = 12
K = 3


def batch(dtype: torch.dtype = torch.float64):
    """Embeddings of queries and candidates, and which are right: 0 to 12 of them."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(QUERIES, 4, dtype=dtype, generator=generator)
    candidates = torch.randn(CANDIDATES, 4, dtype=dtype, generator=generator)
    right = torch.rand(QUERIES, CANDIDATES, generator=generator) < torch.linspace(0, 1, QUERIES).unsqueeze(1)
    assert (int(right.sum(1).min()), int(right.sum(1).max())) == (0, CANDIDATES)
    return queries, candidates, right


def brute_force(queries: torch.Tensor, points: torch.Tensor, k: int) -> torch.Tensor:
    """By differences in float64, and a stable sort."""
    distances = (queries.double().unsqueeze(1) - points.double()).square().sum(2)
    return distances.sort(dim=1, stable=True).indices[:, :k]


# The search.


@pytest.mark.parametrize("tile", [1, 3, 64, 500])
def test_the_search_is_exact_however_it_is_tiled(monkeypatch, tile):
    monkeypatch.setattr(train_knn, "QUERY_ROWS", 8)
    generator = torch.Generator().manual_seed(tile)
    queries = torch.randn(21, 6, generator=generator)
    points = torch.randn(301, 6, generator=generator)
    # Far from the origin, where a product of the vectors as they are has lost the distances.
    queries = queries + 300
    points = points + 300
    assert torch.equal(nearest(queries, points.split(tile), 9), brute_force(queries, points, 9))


@pytest.mark.parametrize("tile", [1, 5, 40])
def test_of_equal_distances_the_earlier_row_comes_first(tile):
    generator = torch.Generator().manual_seed(tile)
    # Whole numbers about a mean of 0: everything is exact, and almost everything is tied.
    queries = torch.randint(-1, 2, (10, 2), generator=generator).float()
    queries = torch.cat([queries, -queries])
    points = torch.randint(-1, 2, (40, 2), generator=generator).float()
    expected = brute_force(queries, points, 7)
    assert torch.equal(nearest(queries, iter(points.split(tile)), 7), expected)
    distances = (queries.unsqueeze(1) - points).square().sum(2).gather(1, expected)
    assert (distances[:, 1:] == distances[:, :-1]).float().mean() > 0.5


def test_no_distance_is_negative():
    points = torch.randn(50, 8) * 1e-3 + 1
    assert (squared_distances(points, points) >= 0).all()


# The vote.


def test_the_majority_is_that_of_a_count_and_ties_go_to_the_nearest():
    labels = torch.randint(4, (500, 6), generator=torch.Generator().manual_seed(0))
    expected = []
    for row in labels.tolist():
        counts = Counter(row)
        expected.append(next(label for label in row if counts[label] == max(counts.values())))
    assert majority(labels).tolist() == expected
    assert majority(torch.tensor([[3, 1, 1, 3], [2, 0, 0, 1], [5, 4, 3, 2]])).tolist() == [3, 0, 5]


# The loss.


def defined(P: torch.Tensor, right: torch.Tensor, loss: str) -> float:
    """The loss by its definition, entry by entry. P (Q, k, C)."""
    total = 0.0
    for rows, candidates in zip(P.tolist(), right.tolist()):
        mass = sum(sum(p for p, is_right in zip(row, candidates) if is_right) for row in rows)
        if any(candidates):
            share = min(mass / len(rows), 1.0)
            total += -mass if loss == "mass" else -torch.tensor(share * (1 - 2e-7) + 1e-7).log().item()
    return total / len(P)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", RELAXED)
def test_the_loss_is_minus_the_mass_on_right_candidates(method, loss):
    queries, candidates, right = batch()
    operator = BoundOperator(make_operator(method), K)
    scores = -(queries.unsqueeze(1) - candidates).square().sum(2)  # (Q, C)
    expected = defined(operator(scores), right, loss)
    assert NeighbourLoss(operator, loss)(queries, candidates, right, None).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", ["neuralsort", "softsort", "soft_topk"])
def test_who_is_left_out_is_as_if_absent(method, loss):
    queries, candidates, right = batch()
    left_out = torch.zeros_like(right)
    left_out[:, 4] = True
    others = torch.arange(CANDIDATES) != 4
    got = NeighbourLoss(BoundOperator(make_operator(method), K), loss)(queries, candidates, right, left_out)
    operator = BoundOperator(make_operator(method), K)
    absent = NeighbourLoss(operator, loss)(queries, candidates[others], right[:, others], None)
    assert got.item() == pytest.approx(absent.item(), rel=1e-6)


@pytest.mark.parametrize("method", RELAXED)
def test_a_query_that_is_left_out_has_no_part_in_any_operator(method):
    """Nor has its label, and nothing becomes infinite."""
    queries, candidates, right = batch(torch.float32)
    candidates = torch.cat([queries, candidates[QUERIES:]]).requires_grad_()
    left_out = torch.eye(QUERIES, CANDIDATES, dtype=torch.bool)
    operator = BoundOperator(make_operator(method), K)
    losses = [
        NeighbourLoss(operator, "log_mass")(queries, candidates, change(right, left_out), left_out)
        for change in (python_operator.or_, lambda right, left_out: right & ~left_out)
    ]
    assert losses[0] == losses[1]
    losses[0].backward()
    assert candidates.grad.isfinite().all()
