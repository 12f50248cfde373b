"""The top-k cross-entropy against its definition, and everything a drop-in for CrossEntropyLoss must stand."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from tests import reference
from tests.methods import DETERMINISTIC, GUARDED, RELAXED
from topk_losses import (
    METHODS,
    RELAXATIONS,
    TOP1_MODES,
    SmoothHardTopKLoss,
    SparseTopK,
    TopKCrossEntropyLoss,
    make_loss,
)
from topk_losses.loss import top_m

# A method whose masks have zeros wants a part of the softmax.
MODES = [
    (method, mode)
    for method in RELAXED
    for mode in TOP1_MODES
    if not (mode == "sort" and METHODS[method].operator is SparseTopK)
]
P_KS = ([1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0.5, 0, 0, 0, 0.5], [0.25, 0, 0, 0, 0.75], [0.1, 0, 0, 0, 0.9], [0.2] * 5)


def random_batch(batch=6, n=12, scale=2.0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, n, dtype=dtype, generator=generator) * scale
    return logits, torch.randint(n, (batch,), generator=generator)


def p_ks_for(method, top1_mode):
    """Those of P_KS that a loss of the method takes."""
    first = 0.0 if METHODS[method].operator is SparseTopK else -1.0
    return [p_k for p_k in P_KS if p_k[0] > first and (p_k[0] < 1 or top1_mode == "sort")]


def by_definition(loss, logits, labels, p_k):
    """The loss per sample, from the full P of the loss's own operator, by the paper's double sum."""
    operator = loss.operator
    losses = []
    for b, y in enumerate(labels.tolist()):
        kept = reference.top_m(logits[b], y, loss.m) if loss.m else list(range(logits.shape[1]))
        scores = logits[b : b + 1, kept]
        P = operator.permutation_matrix(scores)
        label = torch.tensor([kept.index(y)])
        losses.append(
            reference.topk_cross_entropy(
                P, scores, label, p_k[b : b + 1, : P.shape[1]].double(), loss.top1_mode, loss.method in GUARDED
            )
        )
    return torch.cat(losses)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
@pytest.mark.parametrize("m", [None, 8])
def test_equals_its_definition(method, top1_mode, m):
    logits, labels = random_batch()
    for p_k in p_ks_for(method, top1_mode):
        loss = TopKCrossEntropyLoss(method, p_k, 12, m, top1_mode=top1_mode, reduction="none")
        want = by_definition(loss, logits, labels, torch.tensor([p_k] * 6))
        torch.testing.assert_close(loss(logits, labels), want)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_is_one_function_of_p_k_however_it_is_given(method, top1_mode):
    logits, labels = random_batch()
    for p_k in p_ks_for(method, "sm"):
        loss = TopKCrossEntropyLoss(method, p_k, 12, top1_mode=top1_mode, reduction="none")
        want = loss(logits, labels)
        torch.testing.assert_close(loss(logits, labels, p_k=torch.tensor([p_k] * 6).double()), want)
        per_class = TopKCrossEntropyLoss(method, [p_k] * 12, 12, top1_mode=top1_mode, reduction="none")
        torch.testing.assert_close(per_class(logits, labels), want)
        padded = TopKCrossEntropyLoss(method, [*p_k, 0, 0, 0], 12, top1_mode=top1_mode, reduction="none")
        assert torch.equal(padded(logits, labels), want)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_is_continuous_in_p_k(method, top1_mode):
    logits, labels = random_batch()
    smooth = [0.4, 0, 0.3, 0, 0.3]
    for p_k in ([0.5, 0, 0, 0, 0.5], smooth):
        moved = [(1 - 1e-7) * share + 1e-7 * (k == 1) for k, share in enumerate(p_k)]
        values = [TopKCrossEntropyLoss(method, p, 12, top1_mode=top1_mode)(logits, labels) for p in (p_k, moved)]
        torch.testing.assert_close(*values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
@pytest.mark.parametrize("m", [None, 6])
def test_gradcheck(method, top1_mode, m):
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.2, 0.3], 9, m, top1_mode=top1_mode)
    logits, labels = random_batch(3, 9)
    assert gradcheck(lambda s: loss(s, labels), (logits.requires_grad_(),))
    mass = random_batch(3, 9, seed=1)[0].softmax(1)
    assert gradcheck(lambda s: loss(s, mass), (logits,))


@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_p_k_per_class_and_per_sample(method, top1_mode):
    logits, labels = random_batch()
    rows = torch.rand(12, 4, generator=torch.Generator().manual_seed(0))
    rows = rows / rows.sum(1, keepdim=True)
    rows[3] = torch.tensor([1.0, 0, 0, 0])  # a class for which only top-1 counts
    rows = rows.double()
    loss = TopKCrossEntropyLoss(method, rows, 12, top1_mode=top1_mode, reduction="none")
    want = by_definition(loss, logits, labels, rows[labels])
    torch.testing.assert_close(loss(logits, labels), want)
    one_hot = torch.nn.functional.one_hot(labels, 12).double()
    torch.testing.assert_close(loss(logits, one_hot), want)
    torch.testing.assert_close(loss(logits, labels, p_k=rows[labels]), want)


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("m", [None, 8])
def test_one_hot_labels_give_the_loss_of_class_labels(method, m):
    loss = make_loss(method, None, 12, m)
    logits, labels = random_batch()
    one_hot = torch.nn.functional.one_hot(labels, 12)
    torch.testing.assert_close(loss(logits, one_hot.double()), loss(logits, labels))
    torch.testing.assert_close(loss(logits, one_hot.bfloat16()), loss(logits, labels))
    torch.testing.assert_close(loss(logits.float(), one_hot.double()), loss(logits.float(), labels))


@given(st.integers(2, 30), st.data())
@settings(max_examples=60, deadline=None)
def test_top_m_keeps_the_true_class_and_the_largest_others(n, data):
    m = data.draw(st.integers(2, n))
    logits, labels = random_batch(8, n, seed=data.draw(st.integers(0, 999)))
    scores = top_m(logits, labels, m)[0]
    want = torch.stack([logits[b, reference.top_m(logits[b], y, m)] for b, y in enumerate(labels.tolist())])
    torch.testing.assert_close(scores, want)
    tied = logits.round()
    scores = top_m(tied, labels, m)[0]
    assert torch.equal(scores[:, 0], tied.gather(1, labels.unsqueeze(1)).squeeze(1))
    want = torch.stack([tied[b, reference.top_m(tied[b], y, m)] for b, y in enumerate(labels.tolist())])
    assert torch.equal(scores, want)


@pytest.mark.parametrize("method", RELAXED)
def test_m_equal_to_n_changes_only_the_lanes(method):
    logits, labels = random_batch()
    if METHODS[method].network:
        return  # relaxed networks depend on the lanes that the classes start on
    losses = [TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, m)(logits, labels) for m in (None, 12)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_reductions_and_ignore_index(method):
    logits, labels = random_batch()
    labels[[1, 4]] = -100
    kept = labels != -100
    each = make_loss(method, None, 12, reduction="none")(logits, labels)
    assert each.shape == (6,)
    assert each[~kept].tolist() == [0, 0]
    torch.testing.assert_close(each[kept], make_loss(method, None, 12, reduction="none")(logits[kept], labels[kept]))
    torch.testing.assert_close(make_loss(method, None, 12, reduction="sum")(logits, labels), each.sum())
    torch.testing.assert_close(make_loss(method, None, 12)(logits, labels), each.sum() / 4)
    other = make_loss(method, None, 12, ignore_index=7)
    labels[:] = torch.tensor([0, 7, 3, 11, 7, 5])
    torch.testing.assert_close(other(logits, labels), other(logits[kept], labels[kept]))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_an_empty_batch_is_that_of_cross_entropy(method):
    logits, labels = torch.zeros(0, 12, requires_grad=True), torch.zeros(0, dtype=torch.long)
    value = make_loss(method, None, 12)(logits, labels)
    value.backward()
    assert bool(value.isnan())
    assert logits.grad.shape == (0, 12)
    assert float(make_loss(method, None, 12, reduction="sum")(logits, labels).detach()) == 0


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_compute_in_float32(method, dtype):
    loss = make_loss(method, None, 12)
    logits, labels = random_batch(dtype=torch.float32)
    half = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(half, labels)
    value.backward()
    assert value.dtype == torch.float32
    assert half.grad.dtype == dtype
    torch.testing.assert_close(value, loss(half.detach().float(), labels))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_pickle_deepcopy_and_device_keep_the_loss(method):
    loss = make_loss(method, None, 12, **({} if method not in RELAXATIONS else {"m": 8}))
    logits, labels = random_batch()
    want = loss(logits, labels)
    for other in (
        pickle.loads(pickle.dumps(loss)),
        copy.deepcopy(loss),
        loss.to("cpu"),
        loss.double(),
        loss.bfloat16(),
        loss.to_empty(device="cpu"),
    ):
        assert torch.equal(other(logits, labels), want)
    assert not loss.state_dict(), "constants are rebuilt, not stored with a model"
    on_meta = copy.deepcopy(loss).to("meta")
    assert all(getattr(on_meta, name).is_meta for name in on_meta.constants if getattr(on_meta, name) is not None)


@pytest.mark.parametrize("method", RELAXED)
@pytest.mark.parametrize("m", [None, 8])
def test_compiles_without_a_graph_break(method, m):
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, m)
    logits, labels = random_batch(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, want = compiled(ours, labels), loss(theirs, labels)
    torch.testing.assert_close(value, want)
    value.backward()
    want.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_nothing_is_read_back_from_the_device(method):
    """Meta tensors have no values: an .item() or a branch on one raises, where on CUDA it would wait."""
    logits = torch.empty(6, 12, device="meta", requires_grad=True)
    labels = torch.empty(6, dtype=torch.long, device="meta")
    mass = torch.empty(6, 12, device="meta")
    for options in ({}, {"m": 8}):
        with torch.device("meta"):
            loss = make_loss(method, None, 12, **options)  # constants are made on the CPU, whatever the default is
        loss = loss.to("meta")
        loss(logits, labels).backward()
        loss(logits, mass).backward()
        assert logits.grad.shape == (6, 12)
        if method in RELAXATIONS:
            loss(logits, labels, p_k=torch.empty(6, 5, device="meta")).backward()


@pytest.mark.parametrize("method", RELAXED)
def test_a_nan_or_infinite_logit_spoils_its_sample_only(method):
    mode = "smce" if METHODS[method].operator is SparseTopK else "sort"
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, top1_mode=mode, reduction="none")
    logits, labels = random_batch(dtype=torch.float32)
    clean = loss(logits, labels)
    for bad in (float("nan"), float("inf")):
        spoilt = logits.clone()
        spoilt[2, 11] = bad
        labels[2] = 0
        values = loss(spoilt.requires_grad_(), labels)
        keep = torch.tensor([0, 1, 3, 4, 5])
        torch.testing.assert_close(values[keep], clean[keep])
        values[keep].sum().backward()
        assert bool(torch.isfinite(spoilt.grad[keep]).all())
        assert bool(values[2].isnan())


def test_m_leaves_out_masked_classes():
    logits, labels = random_batch(dtype=torch.float32)
    logits[:, 10:] = float("-inf")
    labels = labels % 10
    for method in RELAXED:
        values = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, 8)(logits, labels)
        torch.testing.assert_close(values, TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 10, 8)(logits[:, :10], labels))


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_extreme_logits_give_finite_losses_and_gradients(method, scale):
    loss = make_loss(method, None, 50)
    logits, labels = random_batch(16, 50, scale, torch.float32)
    logits.requires_grad_()
    value = loss(logits, labels)
    value.backward()
    assert bool(torch.isfinite(value))
    assert bool(torch.isfinite(logits.grad).all())


@pytest.mark.parametrize("method", RELAXED)
def test_learns(method):
    """Gradient descent on the logits brings the true class among the top k."""
    loss = TopKCrossEntropyLoss(method, [0.2] * 5, 20, top1_mode="sm")
    logits, labels = random_batch(16, 20, 1.0, torch.float32)
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss(logits, labels).backward()
        optimizer.step()
    within = (logits.topk(5, dim=1).indices == labels.unsqueeze(1)).any(1)
    assert float(within.float().mean()) > 0.9


BAD_CONSTRUCTIONS = [
    ({"method": "splitter_selektion"}, "did you mean 'splitter_selection'"),
    ({"method": "softmax_cross_entropy"}, "make_loss"),
    ({"distribution": "logistik"}, "did you mean 'logistic"),
    ({"method": "neuralsort", "distribution": "logistic"}, "distribution applies to relaxed networks"),
    ({"method": "softsort", "art_lambda": 0.5}, "art_lambda applies to"),
    ({"distribution": "cauchy", "art_lambda": 0.5}, "art_lambda applies to the distribution logistic_phi"),
    ({"p_k": [0.2, 0, 0, 0, 0.75]}, r"sum to 1, got \[0.2, 0, 0, 0, 0.75\] \(sum 0.95\)"),
    ({"p_k": [1.5, -0.5]}, "non-negative"),
    ({"p_k": [float("nan"), 1]}, "non-negative and sum to 1"),
    ({"p_k": []}, "shape"),
    ({"p_k": [0.1] * 9 + [0, 0.1], "num_classes": 10}, "mass on rank 11, but only 10 scores"),
    ({"p_k": [0.2] * 5, "m": 4}, "mass on rank 5, but only 4 scores"),
    ({"p_k": 0}, "p_k as a single k must be an integer of at least 1"),
    ({"p_k": {0: 1.0}}, "k must be an integer"),
    ({"p_k": {1: 0.5, 5: 0.6}}, r"sum 1.1"),
    ({"p_k": torch.full((4, 2), 0.5)}, "num_classes=10 rows, got 4"),
    ({"m": 1}, "m must be an integer of at least 2, got 1"),
    ({"m": 2.5}, "m must be"),
    ({"num_classes": 1}, "num_classes"),
    ({"inverse_temperature": 0}, "above 0"),
    ({"inverse_temperature": -1}, "above 0"),
    ({"inverse_temperature": float("inf")}, "finite"),
    ({"top1_mode": "smec"}, "did you mean 'smce'"),
    ({"p_k": [1, 0, 0], "top1_mode": "sm"}, "nothing to sort"),
    ({"p_k": [1.0], "top1_mode": "smce"}, "nothing to sort"),
    ({"reduction": "avg"}, "unknown reduction"),
    ({"soft_labels": "all"}, "unknown soft_labels"),
    ({"label_smoothing": 1.0}, "label_smoothing must lie"),
    ({"weight": torch.ones(9)}, "weight must hold"),
    ({"weight": -torch.ones(10)}, "weight must hold"),
    ({"ignore_index": 1.5}, "ignore_index must be an integer"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CONSTRUCTIONS)
def test_construction_refuses_with_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        TopKCrossEntropyLoss(**{"num_classes": 10, "p_k": [0.5, 0.5], **options})


def test_p_k_may_put_everything_on_rank_one_if_it_is_sorted():
    logits, labels = random_batch()
    loss = TopKCrossEntropyLoss("neuralsort", [1.0], 12, top1_mode="sort", reduction="none")
    P = reference.neuralsort(logits, 0.5)
    torch.testing.assert_close(loss(logits, labels), -torch.log(P[torch.arange(6), 0, labels] * (1 - 2e-7) + 1e-7))


def test_forward_refuses_with_a_sentence():
    loss = TopKCrossEntropyLoss("softsort", [0.5, 0.5], 10)
    logits, labels = torch.randn(4, 10), torch.zeros(4, dtype=torch.long)
    for bad_logits, bad_labels, error, message in [
        (torch.zeros(4, 10, dtype=torch.long), labels, TypeError, "floating-point"),
        (torch.randn(4, 11), labels, ValueError, "num_classes=10 columns"),
        (torch.randn(10), labels, ValueError, r"shape \(\)"),
        (logits, labels[:3], ValueError, r"shape \(4,\)"),
        (logits, labels.int(), TypeError, "int64"),
        (logits, torch.full((4,), 10), ValueError, r"\[0, 9\].*got 10 at position 0"),
        (logits, torch.full((4,), -1), ValueError, "got -1"),
        (logits, torch.rand(4, 9), ValueError, "shape of the logits"),
        (logits, [0, 0, 0, 0], TypeError, "labels must be a tensor"),
    ]:
        with pytest.raises(error, match=message):
            loss(bad_logits, bad_labels)
    with pytest.raises(ValueError, match=r"shape \(4, 'K'\)"):
        loss(logits, labels, p_k=torch.full((3, 3), 1 / 3))
    with pytest.raises(ValueError, match="the length of p_k"):
        loss(logits, labels, p_k=torch.full((4, 11), 1 / 11))
    with pytest.raises(ValueError, match=r"sum to 1.*in row 2"):
        loss(logits, labels, p_k=torch.tensor([[0.5, 0.5], [1, 0], [1, 1], [0, 1]]))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("softmax_cross_entropy", {"p_k": [0.5, 0.5]}, "all its mass on one entry"),
        ("softmax_cross_entropy", {"p_k": [0, 1]}, r"P_K = \[1, 0, ..\]"),
        ("softmax_cross_entropy", {"inverse_temperature": 1.0}, "inverse_temperature applies to"),
        ("softmax_cross_entropy", {"top1_mode": "sm"}, "top1_mode applies to"),
        ("smooth_topk", {"p_k": [0.2] * 5}, "single k"),
        ("smooth_hard_topk", {"top1_mode": "smce"}, "top1_mode applies to"),
        ("smooth", {}, "did you mean 'smooth"),
    ],
)
def test_make_loss_refuses_with_a_sentence(method, options, message):
    with pytest.raises(ValueError, match=message):
        make_loss(method, num_classes=10, **options)


def test_make_loss_knows_the_published_names_and_rows():
    logits, labels = random_batch()
    bitonic, other = make_loss("bitonic", [0.2] * 5, 12), make_loss("bitonic__non_sparse", [0.2] * 5, 12)
    assert other.method == "bitonic"
    assert torch.equal(bitonic(logits, labels), other(logits, labels))
    softmax = make_loss("softmax_cross_entropy", [1, 0, 0, 0, 0], 12, 8)
    assert torch.equal(softmax(logits, labels), torch.nn.functional.cross_entropy(logits, labels))
    smooth = make_loss("smooth_hard_topk", [0, 0, 0, 0, 1], 12, 8, inverse_temperature=1.0)
    assert isinstance(smooth, SmoothHardTopKLoss)
    assert smooth.k == 5
