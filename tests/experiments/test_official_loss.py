"""The official losses are built silently, agree with this repository's, and are refused where there are none."""

import subprocess
import sys

import pytest
import torch

from experiments.common.objective import published_p_k
from experiments.common.official_loss import IN_DIFFTOPK, executor_of, make_official_loss
from topk_losses import METHODS, make_loss

P_K = {"softmax_cross_entropy": [1.0], "smooth_topk": [0.0, 0.0, 1.0], "smooth_hard_topk": [0.0, 0.0, 1.0]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:difftopk")
@pytest.mark.parametrize("method", [*IN_DIFFTOPK, "bitonic__non_sparse"])
def test_value_and_gradient_agree(method):
    logits = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8)
    results = []
    for build in (make_loss, make_official_loss):
        scores = logits.clone().requires_grad_()
        loss = build(method, P_K.get(method, [0.5, 0.0, 0.5]), 12)(scores, labels)
        loss.backward()
        results.append((loss.detach(), scores.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_nothing_is_printed():
    program = (
        "from experiments.common.official_loss import make_official_loss as make\n"
        "for method in ('splitter_selection', 'bitonic', 'softsort'): make(method, [.5, .5], 12)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("message", "method", "p_k", "m"),
    [
        *((f"difftopk has no {method}", method, None, None) for method in METHODS if method not in IN_DIFFTOPK),
        ("sum to 1", "softsort", [0.5, 0.4], None),  # what the library refuses comes first
        ("leave m out", "softsort", [0.5, 0.5], 12),
    ],
)
def test_what_cannot_be_is_refused(message, method, p_k, m):
    with pytest.raises(ValueError, match=message):
        make_official_loss(method, p_k or published_p_k(method), 12, m=m)


def test_the_executor_is_named():
    assert executor_of("odd_even") == "dense"
    assert executor_of("bitonic") in ("sparse", "dense")
    assert executor_of("softsort") == ""
