"""Probabilities too small for float32, or 0 where a class is masked out: all digits, and finite gradients."""

import math

import pytest
import torch
from torch import Tensor

from tests.methods import DETERMINISTIC, MODES, RELAXED, STOCHASTIC, WITH_MODES, p_k_of, value_and_gradient
from topk_losses import RELAXATIONS, classification, make_loss
from topk_losses.numerics import MASKED

# exp(-50) is a number of every precision, exp(-95) a denormal one of float32, exp(-150) and exp(-600) of float64 alone.
GAPS = [0.0, 50.0, 95.0, 150.0, 600.0]
# exp of less is no number of float64, either
FAR = [800.0, 1e4, math.inf]
N = 6


def rows_with_a_gap(gaps: list[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits whose last class, or whose first one, lies so far from the others; every class as the label."""
    near = torch.tensor([0.0, -1.0, 0.5, -0.25, 0.75, -0.5], dtype=dtype)
    rows = []
    for gap in gaps:
        below = near.clone()
        above = near.clone()
        below[-1] -= gap
        above[1:] -= gap
        rows += [below, above]
    logits = torch.stack(rows).repeat_interleave(N, dim=0)
    return logits, torch.arange(N).repeat(len(rows))


def label_matrices() -> dict[str, Tensor]:
    """T of every kind: dense, with zeros, all mass off the diagonal, and entries too small for float32."""
    generator = torch.Generator().manual_seed(0)
    eye = torch.eye(N, dtype=torch.float64)
    return {
        "dense": torch.randn(N, N, dtype=torch.float64, generator=generator).softmax(1),
        "eye": eye,
        "neighbours": 0.9 * eye + 0.1 * eye.roll(1, 1),
        "moved": eye.roll(1, 1),
        "tiny": torch.full_like(eye, 1e-60).fill_diagonal_(1),
    }


def forward_corrected(logits: Tensor, labels: Tensor, T: Tensor) -> Tensor:
    """-log sum_j T[j, y] p_j in float64, in logarithms throughout."""
    log_p = logits.double().log_softmax(1)
    return -(log_p + T[:, labels].T.log()).logsumexp(1)


@pytest.fixture
def every_class_at_once(monkeypatch):
    """However few labels a row has, the losses of all classes are computed together."""
    monkeypatch.setattr(classification, "FEW_LABELS", 0)


@pytest.mark.usefixtures("every_class_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", label_matrices())
def test_forward_correction_by_a_matrix_has_the_digits_of_logarithms(kind, dtype):
    T = label_matrices()[kind]
    logits, labels = rows_with_a_gap(GAPS, dtype)
    loss = make_loss("forward_correction", T=T, reduction="none")
    got, gradient = value_and_gradient(loss, logits, labels)
    want, want_gradient = value_and_gradient(lambda s: forward_corrected(s, labels, T), logits)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-6)
    mass = torch.linspace(1, 2, N).softmax(0).to(dtype).expand(len(logits), N)
    got, gradient = value_and_gradient(loss, logits, mass)
    every = lambda s: sum(mass[0, j] * forward_corrected(s, labels * 0 + j, T) for j in range(N))  # noqa: E731
    want, want_gradient = value_and_gradient(every, logits)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("every_class_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", label_matrices())
def test_where_no_precision_knows_the_probability_its_logarithm_is_known(kind, dtype):
    logits, labels = rows_with_a_gap(FAR, dtype)
    T = label_matrices()[kind]
    loss = make_loss("forward_correction", T=T, reduction="none")
    got, gradient = value_and_gradient(loss, logits, labels)
    want, want_gradient = value_and_gradient(lambda s: forward_corrected(s, labels, T), logits)
    most = -MASKED  # a masked class lies that deep
    torch.testing.assert_close(got.double().clamp(max=most), want.clamp(max=most), rtol=1e-6, atol=1e-6)
    assert bool(gradient.isfinite().all())
    is_known = want.isfinite()
    torch.testing.assert_close(gradient[is_known], want_gradient[is_known], rtol=1e-5, atol=1e-6)
    _, gradient = value_and_gradient(loss, logits, torch.full_like(logits, 1 / N))
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("q", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generalized_cross_entropy_has_a_gradient_however_small_p_is(q, dtype):
    logits, labels = rows_with_a_gap([0.0, 5.0, 20.0, 30.0, 80.0], dtype)
    _, gradient = value_and_gradient(make_loss("generalized_cross_entropy", q=q, reduction="sum"), logits, labels)
    p = logits.double().softmax(1)
    wrong = torch.nn.functional.one_hot(labels, N) - p
    want = -(p.gather(1, labels.unsqueeze(1)) ** q) * wrong
    # what is right lies as close to 0 as 1 - p
    is_right = (p.gather(1, labels.unsqueeze(1)) > 0.9).expand_as(p)
    torch.testing.assert_close(gradient.double()[~is_right], want[~is_right], rtol=1e-4, atol=1e-37)
    torch.testing.assert_close(gradient.double()[is_right], want[is_right], rtol=1e-4, atol=1e-6)


CASES = [(*case, {}) for case in WITH_MODES] + [(*case, {"noise_rate": 0.3}) for case in MODES if case[1] != "smce"]
CASES += [(method, mode, {"soft_labels": "any"}) for method, mode in MODES]
CASES += [(method, None, {"label_smoothing": 0.1}) for method in DETERMINISTIC]


@pytest.mark.parametrize(("method", "top1_mode", "settings"), CASES)
def test_float32_has_the_digits_of_float64_however_far_a_class_lies(method, top1_mode, settings):
    p_k = [0.5, 0, 0.5] if method in RELAXED else p_k_of(method, 3)
    logits, labels = rows_with_a_gap(GAPS, torch.float32)
    loss = make_loss(method, p_k, top1_mode=top1_mode, reduction="none", **settings)
    got, gradient = value_and_gradient(loss, logits, labels)
    want, want_gradient = value_and_gradient(loss, logits.double(), labels)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("method", "top1_mode", "settings"), [*CASES, *((method, None, {}) for method in STOCHASTIC)])
def test_gradients_are_finite_where_probabilities_are_no_numbers(method, top1_mode, settings, dtype):
    p_k = [0.5, 0, 0.5] if method in RELAXATIONS else p_k_of(method, 3)
    logits, labels = rows_with_a_gap(FAR, dtype)
    loss = make_loss(method, p_k, top1_mode=top1_mode, reduction="none", **settings)
    value, gradient = value_and_gradient(loss, logits, labels)
    assert not bool(value.isnan().any())
    assert bool(gradient.isfinite().all())
