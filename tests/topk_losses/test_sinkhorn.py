"""What is particular to the transports: groups of ranks, convergence, and the warning."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from topk_losses import SinkhornSort, SoftTopK, TopKCrossEntropyLoss, sinkhorn
from topk_losses.sinkhorn import whiten_and_squash


def random_logits(batch, n, scale=1.0, dtype=torch.float64, seed=0):
    return torch.randn(batch, n, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * scale


@given(st.integers(3, 14), st.data())
@settings(max_examples=40, deadline=None)
def test_groups_of_ranks_share_the_mass_of_their_anchor(n, data):
    k = data.draw(st.integers(1, n - 1))
    boundaries = sorted(data.draw(st.sets(st.integers(1, k), min_size=1)))
    logits = random_logits(3, n, seed=n)
    ends = [0, *boundaries, n]
    sizes = torch.tensor([b - a for a, b in itertools.pairwise(ends)])
    plan = reference.sinkhorn(logits, torch.linspace(1, 0, len(sizes)), sizes, 10.0)  # (batch, A, n)
    want = (plan / sizes.view(1, -1, 1)).repeat_interleave(sizes, dim=1)[:, :k]  # (batch, k, n)
    operator = SoftTopK(k, 10.0, boundaries)
    torch.testing.assert_close(operator(logits), want, rtol=1e-6, atol=1e-8)
    labels = torch.tensor([0, 1, 2])
    torch.testing.assert_close(
        operator.rank_probabilities(logits, labels), want[torch.arange(3), :, labels], rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("boundaries", [[], [0, 3], [2, 1], [1, 1], [6]])
def test_refuses_boundaries_that_do_not_rise_to_k(boundaries):
    with pytest.raises(ValueError, match="boundaries must rise"):
        SoftTopK(5, boundaries=boundaries)


@pytest.mark.parametrize("operator", [SinkhornSort(5), SoftTopK(5), SoftTopK(5, boundaries=[5])], ids=["n", "6", "2"])
@pytest.mark.parametrize("factor", [0.01, 1, 100])
@pytest.mark.parametrize("kind", ["normal", "outlier", "ties", "tiny", "heavy"])
def test_converges_in_float32_for_all_kinds_of_scores(operator, factor, kind):
    logits = random_logits(32, 100, dtype=torch.float32)
    if kind == "outlier":
        logits[:, 0] += 50
    elif kind == "ties":
        logits = logits.bfloat16().float()
    elif kind == "tiny":
        logits = logits * 1e-3
    elif kind == "heavy":
        logits = logits.exp()
    options = {"boundaries": operator.boundaries} if isinstance(operator, SoftTopK) else {}
    fresh = type(operator)(5, operator.inverse_temperature * factor, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        P = fresh(logits)
    assert fresh.check_convergence() <= 1e-3
    torch.testing.assert_close(P.sum(2), torch.ones(32, 5), atol=1e-2, rtol=0)


def test_ranks_order_the_scores():
    """A higher score is the likelier for rank 1, and the expected rank falls with the score."""
    logits = torch.linspace(-2, 2, 10, dtype=torch.float64).unsqueeze(0)
    P = SinkhornSort(9)(logits)[0]  # (9, n)
    assert bool((P[0].diff() > 0).all())


def test_warns_once_where_the_tolerance_is_missed():
    operator = SinkhornSort(3, inverse_temperature=1e4, tolerance=1e-12, max_iterations=1)
    logits = random_logits(4, 30)
    with pytest.warns(RuntimeWarning, match="did not converge within 1 Newton steps"):
        operator(logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(logits)
    assert operator.check_convergence() > 1e-12
    loss = TopKCrossEntropyLoss("soft_topk", [0.5, 0.2, 0.3], 30)
    loss(logits, torch.arange(4))
    assert 0 < loss.check_convergence() < 1e-9
    assert TopKCrossEntropyLoss("softsort", [0.5, 0.5], 30).check_convergence() == 0


def test_whitening_forgets_shift_and_scale():
    logits = random_logits(4, 20)
    torch.testing.assert_close(whiten_and_squash(logits * 7 - 3), whiten_and_squash(logits))


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"max_iterations": 0}, {"inverse_temperature": float("nan")}])
def test_refuses_solver_options_out_of_range(options):
    with pytest.raises(ValueError, match="must be"):
        SinkhornSort(3, **options)


def test_float32_and_float64_calls_are_each_held_to_their_own_tolerance():
    operator, logits = SinkhornSort(3), random_logits(4, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(logits.float())
        operator(logits)


def newton_steps(monkeypatch, operator, logits) -> int:
    steps = []
    solve = sinkhorn._solve_laplacian
    monkeypatch.setattr(sinkhorn, "_solve_laplacian", lambda *args: steps.append(0) or solve(*args))
    operator(logits)
    monkeypatch.undo()
    return len(steps)


def test_starts_from_typical_scores_and_stops_early(monkeypatch):
    """From the hard transport alone it takes 10 steps here."""
    operator, logits = SoftTopK(5, 10.0), random_logits(8, 2000, dtype=torch.float32)
    operator(logits)  # solves for the typical scores, once
    assert newton_steps(monkeypatch, operator, logits) <= 3
    assert newton_steps(monkeypatch, operator, random_logits(8, 2000, 1e-3, dtype=torch.float32, seed=1)) <= 3


def test_scores_far_from_typical_start_from_the_hard_transport(monkeypatch):
    logits = random_logits(8, 40)
    logits[::2, 0] += 20  # one class far above all others in every second sample
    got = SoftTopK(5, 10.0)(logits)
    monkeypatch.setattr(sinkhorn, "SMOOTH_EPSILON", float("inf"))
    sinkhorn._targets.cache_clear()
    want = SoftTopK(5, 10.0)(logits)
    sinkhorn._targets.cache_clear()
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)
    for row in range(8):  # each sample is solved as if it were alone
        torch.testing.assert_close(SoftTopK(5, 10.0)(logits[row : row + 1]), got[row : row + 1], rtol=1e-7, atol=1e-9)


def test_constants_made_under_inference_mode_serve_training_too():
    sinkhorn._targets.cache_clear()
    logits = random_logits(4, 30)
    with torch.inference_mode():
        SoftTopK(3)(logits)
    logits.requires_grad_()
    SoftTopK(3)(logits)[:, 0, 0].sum().backward()
    assert bool(logits.grad.isfinite().all())
