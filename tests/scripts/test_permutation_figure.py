"""What the figures of P and of the gradient show is what the losses compute."""

import pytest
import torch

from reporting import permutation_figure
from topk_losses import METHODS, RELAXATIONS, make_loss
from topk_losses.methods import TOP1

# their masks have zeros, so that their losses refuse top1_mode "sort"
WANT_A_SOFTMAX = ("sparse_topk", "perturbed_topk")
SCORES = [1.0, 8.0, -1.0, 9.0, 5.0]


@pytest.mark.parametrize("method", [name for name in RELAXATIONS if name not in WANT_A_SOFTMAX])
def test_the_class_probabilities_of_the_permutation_figure_are_those_of_the_loss(method):
    p_k = [0.5, 0.2, 0.2, 0.1]  # a weight of its own for each rank
    matrix, weights, p = permutation_figure.relaxed_sort(method, SCORES, p_k)
    assert weights.tolist() == pytest.approx([1, 0.5, 0.3, 0.1])
    assert matrix.shape == (4, 5)
    loss = make_loss(method, p_k=p_k, num_classes=5, top1_mode="sort", reduction="none")
    logits = torch.tensor([SCORES] * 5, dtype=torch.float64)
    assert p.tolist() == pytest.approx(loss(logits, torch.arange(5)).neg().exp().tolist(), abs=1e-6)


# perturbed_topk estimates the slope of an expectation, which its draws, jumping from 0 to 1, do not have: test_ranks.py
@pytest.mark.parametrize("method", [name for name in METHODS if name != "perturbed_topk"])
def test_the_pull_of_the_method_figures_is_the_slope_of_the_loss(method):
    own = torch.linspace(-2.7, 12.6, 7, dtype=torch.float64)
    step = 1e-5
    settings = {"top1_mode": "sort"} if method in RELAXATIONS else {}
    p_k = None if method in TOP1 else 2
    if method in WANT_A_SOFTMAX:
        settings = {}
        p_k = {1: 0.5, 2: 0.5}
    if method == "imbalanced_noised_topk":
        settings = {"class_counts": [100, 1600, 100, 100, 100]}
    if method == "ldr_kl":
        settings = {"margin": 1.0}
    loss = make_loss(method, p_k=p_k, num_classes=5, reduction="none", **settings)

    def at(score):
        if METHODS[method].stochastic:  # the slope of the loss by the same draws
            loss.num_samples = permutation_figure.DRAWS
            loss.generator = torch.Generator().manual_seed(0)
        logits = torch.tensor([SCORES] * len(score), dtype=torch.float64)
        logits[:, 1] = score  # the panda's
        return loss(logits, torch.ones(len(score), dtype=torch.int64))

    slope = (at(own - step) - at(own + step)) / (2 * step)
    pull = permutation_figure.pull(permutation_figure.loss_of(method), own)
    torch.testing.assert_close(pull, slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", [name for name, spec in METHODS.items() if spec.stochastic])
def test_the_noise_of_a_figure_is_the_same_each_time_and_nobody_elses(method):
    own = torch.tensor([4.0, 5.5], dtype=torch.float64)
    state = torch.get_rng_state()
    pulls = [permutation_figure.pull(permutation_figure.loss_of(method), own) for _ in range(2)]
    assert torch.equal(*pulls)
    if method in RELAXATIONS:
        matrices = [permutation_figure.relaxed_sort(method, [1.0, 8.0, -1.0], [0.5, 0.5])[0] for _ in range(2)]
        assert torch.equal(*matrices)
    assert torch.equal(torch.get_rng_state(), state)
