"""What the figures of P and of the gradient show is what the losses compute."""

import pytest
import torch
from PIL import Image

from scripts.reporting import permutation_figure
from scripts.reporting.figure_style import STYLES
from topk_losses import METHODS, RELAXATIONS, make_loss


def test_every_method_has_a_look_of_its_own():
    assert set(STYLES) == set(METHODS)
    for kind in ("label", "color", "marker"):
        assert len({getattr(style, kind) for style in STYLES.values()}) == len(METHODS)


@pytest.mark.parametrize("method", [name for name in RELAXATIONS if name != "sparse_topk"])  # its loss wants a softmax
def test_the_class_probabilities_of_the_permutation_figure_are_those_of_the_loss(method):
    scores, p_k = [1.0, 8.0, -1.0, 9.0, 5.0], [0.5, 0.2, 0.2, 0.1]  # a weight of its own for each rank
    matrix, weights, p = permutation_figure.relaxed_sort(method, scores, p_k)
    assert weights.tolist() == pytest.approx([1, 0.5, 0.3, 0.1])
    assert matrix.shape == (4, 5)
    loss = make_loss(method, p_k=p_k, num_classes=5, top1_mode="sort", reduction="none")
    logits = torch.tensor([scores] * 5, dtype=torch.float64)
    assert p.tolist() == pytest.approx(loss(logits, torch.arange(5)).neg().exp().tolist(), abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_pull_of_the_method_figures_is_the_slope_of_the_loss(method):
    own, step = torch.linspace(-2.7, 12.6, 7, dtype=torch.float64), 1e-5
    relaxed = {"top1_mode": "sort"} if method in RELAXATIONS else {}
    p_k = None if method == "softmax_cross_entropy" else 2
    if method == "sparse_topk":  # wants a softmax
        relaxed, p_k = {}, {1: 0.5, 2: 0.5}
    loss = make_loss(method, p_k=p_k, num_classes=5, reduction="none", **relaxed)

    def at(score):
        logits = torch.tensor([[1.0, 8.0, -1.0, 9.0, 5.0]] * len(score), dtype=torch.float64)
        logits[:, 1] = score
        return loss(logits, torch.ones(len(score), dtype=torch.int64))

    slope = (at(own - step) - at(own + step)) / (2 * step)
    torch.testing.assert_close(permutation_figure.pull(method, own), slope, rtol=1e-3, atol=1e-4)


def test_a_figure_of_a_method_is_drawn_with_and_without_a_matrix(tmp_path):
    widths = {}
    for method in ("softsort", "smooth_topk"):
        paths = permutation_figure.draw_method(method, tmp_path)
        assert [path.name for path in paths] == [f"{method}.png", f"{method}.svg"]
        widths[method] = Image.open(paths[0]).width
    assert widths["softsort"] > 1.5 * widths["smooth_topk"]
