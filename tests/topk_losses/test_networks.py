"""Comparator networks: the published sizes, the hard selection, and the comparators of difftopk."""

import contextlib
import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topk_losses.comparators import bitonic, odd_even, splitter_selection

with contextlib.redirect_stdout(io.StringIO()):
    import difftopk.networks

CONSTRUCTIONS = (odd_even, bitonic, splitter_selection)


# n, k: depth and number of comparators of splitter selection; n: depth of bitonic
PUBLISHED = {(1000, 5): (22, 5085), (1024, 5): (22, 5273), (10450, 5): (27, 68085)}
PUBLISHED |= {(100, 5): (17, 385), (100, 10): (27, 528), (50, 5): (15, 181), (16, 5): (10, 50)}
DEPTHS = {16: 10, 50: 21, 100: 28, 1024: 55, 10450: 105}


def test_networks_have_the_published_size():
    for (n, k), size in PUBLISHED.items():
        network = splitter_selection(n, k)
        assert (network.depth, network.num_comparators) == size
        assert network.pruned().depth == network.depth
    for n, depth in DEPTHS.items():
        assert bitonic(n, 5).depth == bitonic(n, 5).pruned().depth == depth
    assert repr(splitter_selection(1000, 5)) == "Network(n=1000, k=5)"


def run_hard(network, x):
    """Wires (n, samples) through min and max."""
    x = x.clone()
    for lo, hi in (torch.tensor(layer).T for layer in network.layers):
        smaller = torch.minimum(x[lo], x[hi])
        x[hi] = torch.maximum(x[lo], x[hi])
        x[lo] = smaller
    return x


@pytest.mark.parametrize("construct", CONSTRUCTIONS)
@pytest.mark.parametrize("n", range(2, 15))
def test_selects_every_input_of_zeros_and_ones(construct, n):
    """The 0-1 principle: a network that is right on all 2^n such inputs is right on all inputs."""
    x = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))).T
    for k in {1, min(2, n - 1), min(5, n - 1), n - 1, n}:
        network = construct(n, k)
        want = (torch.arange(k).unsqueeze(1) < x.sum(0)).float()  # (k, 2^n)
        assert torch.equal(run_hard(network, x)[list(network.output_wires)], want)
        assert torch.equal(run_hard(network.pruned(), x)[list(network.output_wires)], want)


@given(st.sampled_from(CONSTRUCTIONS), st.integers(2, 200), st.data())
@settings(max_examples=60, deadline=None)
def test_selects_the_top_k_in_order(construct, n, data):
    k = data.draw(st.integers(1, min(n, 20)))
    network = construct(n, k)
    x = torch.randn(n, 32, generator=torch.Generator().manual_seed(n * 31 + k))
    assert torch.equal(run_hard(network.pruned(), x)[list(network.output_wires)], x.topk(k, dim=0).values)
    assert all(len({wire for pair in layer for wire in pair}) == 2 * len(layer) for layer in network.layers)


@pytest.mark.parametrize("n", [2, 3, 7, 16, 50, 100])
def test_comparators_are_those_of_difftopk(n):
    k = min(5, n - 1)
    with contextlib.redirect_stdout(io.StringIO()):
        official = {
            odd_even: difftopk.networks.get_sorting_network("odd_even", n, "cpu"),
            bitonic: difftopk.networks.get_sorting_network("bitonic", n, "cpu"),
        }
        sparse = difftopk.networks.get_sorting_network("sparse_splitter_selection", n, "cpu", k)
    official[splitter_selection] = [[matrix.to_dense().T for matrix in layer[:4]] for layer in sparse]
    for construct, layers in official.items():
        theirs = []
        for _, _, combine_min, combine_max in layers:
            # A wire that passes a layer untouched is stored as a comparator with itself, at one half.
            both = (combine_min == 1).any(0) & (combine_max == 1).any(0)
            pairs = zip(combine_min[:, both].argmax(0).tolist(), combine_max[:, both].argmax(0).tolist())
            theirs.append({pair for pair in pairs if pair[0] != pair[1]})
        ours = [set(layer) for layer in construct(n, k).layers]
        assert ours == [layer for layer in theirs if layer], construct.__name__
