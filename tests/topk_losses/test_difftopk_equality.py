"""Equality with difftopk 0.2.0 in value and gradient, for every method, sigmoid, P_K, m and top1 mode it has.

Its sparse networks need torch-sparse; without it official_loss.py runs the same layer matrices in its dense executor.
The smooth top-k losses are compared in test_smooth_svm.py.
"""

import pytest
import torch

from experiments.common.official_loss import make_official_loss
from tests.methods import random_batch, value_and_gradient
from topk_losses import DISTRIBUTIONS, TOP1_MODES, make_loss

P_KS = ([0, 0, 0, 0, 1], [0.5, 0, 0, 0, 0.5], [0.25, 0, 0, 0, 0.75], [0.1, 0, 0, 0, 0.9], [0.2] * 5)
# float32 against float32: rounding differs, most where ART divides by the root of a small difference
TOLERANCE = {"rtol": 2e-3, "atol": 2e-5}


def assert_equal(method, p_k, n, m, scale=2.0, tolerance=TOLERANCE, **options):
    logits, labels = random_batch(8, n, scale, torch.float32, seed=n)
    # a column of NeuralSort may sum to more than 1, which counts as 1 here and not there
    kept = make_loss(method, p_k, n, m, reduction="none", **options)(logits, labels) > 1e-6
    logits = logits[kept]
    labels = labels[kept]
    ours = value_and_gradient(make_loss(method, p_k, n, m, **options), logits, labels)
    theirs = value_and_gradient(make_official_loss(method, p_k, n, m, **options), logits, labels)
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("p_k", P_KS, ids=str)
@pytest.mark.parametrize("top1_mode", TOP1_MODES)
@pytest.mark.parametrize("method", ["neuralsort", "softsort", "odd_even", "bitonic", "splitter_selection"])
def test_every_p_k_top1_mode_and_m(method, top1_mode, p_k):
    for n, m in ((16, None), (16, 9), (30, 16)):
        assert_equal(method, p_k, n, m, top1_mode=top1_mode)


@pytest.mark.parametrize("top1_mode", TOP1_MODES)
def test_neuralsort_at_equal_scores(top1_mode):
    logits, labels = random_batch(8, 16, 1.0, torch.float32)
    logits = logits.round()
    logits[0] = 0
    build = {"method": "neuralsort", "p_k": [0.2] * 5, "num_classes": 16, "top1_mode": top1_mode}
    ours = value_and_gradient(make_loss(**build), logits, labels)
    theirs = value_and_gradient(make_official_loss(**build), logits, labels)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("beta", [0.5, 10.0])
@pytest.mark.parametrize("method", ["odd_even", "bitonic", "splitter_selection"])
def test_every_distribution(method, distribution, beta):
    for art_lambda in (0.1, 0.25, 0.5, 0.75) if distribution == "logistic_phi" else (None,):
        options = {"inverse_temperature": beta, "distribution": distribution, "art_lambda": art_lambda}
        assert_equal(method, [0.2] * 5, 16, None, **options)


@pytest.mark.parametrize("method", ["neuralsort", "softsort", "bitonic", "splitter_selection"])
def test_the_published_settings_and_logits_of_any_size(method):
    beta = 0.0625 if method in ("neuralsort", "softsort") else 0.5
    for p_k in ([0.2] * 5, [0, 0, 0, 0, 1]):  # CIFAR-100
        assert_equal(method, p_k, 100, None, top1_mode="smce", inverse_temperature=beta)
    for m in (16, 50):  # ImageNet
        assert_equal(method, [0.5, 0, 0, 0, 0.5], 1000, m, top1_mode="sm")
    for scale in (1e-4, 1e-2, 100.0):
        # at 100 both codes are about 0.005 from float64: ART takes the root of differences that are rounding errors
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if scale == 100 else TOLERANCE
        assert_equal(method, [0.2] * 5, 16, None, scale, tolerance)
