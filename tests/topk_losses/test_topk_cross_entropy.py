"""The top-k cross-entropy against its definition, and everything a drop-in for CrossEntropyLoss must stand."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from tests import reference
from topk_losses import METHODS, RELAXATIONS, TOP1_MODES, SmoothHardTopKLoss, TopKCrossEntropyLoss, make_loss
from topk_losses.backend import VARIABLE
from topk_losses.top_m import BLOCK, largest_indices, select_top_m

P_KS = ([1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0.5, 0, 0, 0, 0.5], [0.25, 0, 0, 0, 0.75], [0.1, 0, 0, 0, 0.9], [0.2] * 5)


def random_batch(batch=6, n=12, scale=2.0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, n, dtype=dtype, generator=generator) * scale
    return logits, torch.randint(n, (batch,), generator=generator)


def by_definition(loss, logits, labels, p_k, operator=None):
    """The loss per sample, from the full P of the loss's own operator, by the paper's double sum."""
    operator = operator or loss.operator
    losses = []
    for b, y in enumerate(labels.tolist()):
        kept = reference.top_m(logits[b], y, loss.m) if loss.m else list(range(logits.shape[1]))
        scores = logits[b : b + 1, kept]
        P = operator.permutation_matrix(scores)
        label = torch.tensor([kept.index(y)])
        losses.append(reference.topk_cross_entropy(P, scores, label, p_k[b : b + 1].double(), loss.top1_mode))
    return torch.cat(losses)


@pytest.mark.parametrize("top1_mode", TOP1_MODES)
@pytest.mark.parametrize("method", [method for method in RELAXATIONS if method != "soft_topk"])
@pytest.mark.parametrize("m", [None, 8])
def test_equals_its_definition(method, top1_mode, m):
    logits, labels = random_batch()
    for p_k in P_KS:
        if p_k[0] == 1 and top1_mode != "sort":
            continue
        loss = TopKCrossEntropyLoss(method, p_k, 12, m, top1_mode=top1_mode, reduction="none")
        want = by_definition(loss, logits, labels, torch.tensor([p_k] * 6))
        torch.testing.assert_close(loss(logits, labels), want)


@pytest.mark.parametrize("top1_mode", TOP1_MODES)
@pytest.mark.parametrize("p_k", P_KS[1:])
def test_soft_topk_takes_as_few_anchors_as_p_k_allows(top1_mode, p_k):
    """Only ranks where the weights fall need an anchor: [.5, 0, 0, 0, .5] needs three, {1}, {2..5}, {6..n}."""
    loss = TopKCrossEntropyLoss("soft_topk", p_k, 12, top1_mode=top1_mode, reduction="none")
    wanted = [k for k, share in enumerate(p_k, start=1) if share > 0 and (k > 1 or top1_mode == "sort")]
    assert loss.operator.boundaries == wanted
    logits, labels = random_batch()
    P = loss.operator.permutation_matrix(logits)
    want = reference.topk_cross_entropy(P, logits, labels, torch.tensor([p_k] * 6), top1_mode)
    torch.testing.assert_close(loss(logits, labels), want)
    per_sample = loss(logits, labels, p_k=torch.tensor([p_k] * 6))
    want = by_definition(loss, logits, labels, torch.tensor([p_k] * 6), loss.per_sample_operator)
    torch.testing.assert_close(per_sample, want)


@pytest.mark.parametrize("top1_mode", TOP1_MODES)
@pytest.mark.parametrize("method", RELAXATIONS)
@pytest.mark.parametrize("m", [None, 6])
def test_gradcheck(method, top1_mode, m):
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.2, 0.3], 9, m, top1_mode=top1_mode)
    logits, labels = random_batch(3, 9)
    assert gradcheck(lambda s: loss(s, labels), (logits.requires_grad_(),))
    mass = random_batch(3, 9, seed=1)[0].softmax(1)
    assert gradcheck(lambda s: loss(s, mass), (logits,))


@pytest.mark.parametrize("top1_mode", TOP1_MODES)
@pytest.mark.parametrize("method", RELAXATIONS)
def test_p_k_per_class_and_per_sample(method, top1_mode):
    logits, labels = random_batch()
    rows = torch.rand(12, 4, generator=torch.Generator().manual_seed(0))
    rows = rows / rows.sum(1, keepdim=True)
    rows[3] = torch.tensor([1.0, 0, 0, 0])  # a class for which only top-1 counts
    loss = TopKCrossEntropyLoss(method, rows, 12, top1_mode=top1_mode, reduction="none")
    want = by_definition(loss, logits, labels, rows[labels])
    torch.testing.assert_close(loss(logits, labels), want)
    one_hot = torch.nn.functional.one_hot(labels, 12).double()
    torch.testing.assert_close(loss(logits, one_hot), want)
    want = by_definition(loss, logits, labels, rows[labels], loss.per_sample_operator)
    torch.testing.assert_close(loss(logits, labels, p_k=rows[labels]), want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("m", [None, 8])
def test_one_hot_labels_give_the_loss_of_class_labels(method, m):
    if method.startswith("smooth"):
        return  # a margin loss: it has one true class
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
    scores, kept_labels = select_top_m(logits, labels, m)
    want = torch.stack([logits[b, reference.top_m(logits[b], y, m)] for b, y in enumerate(labels.tolist())])
    torch.testing.assert_close(scores, want)
    assert kept_labels.tolist() == [0] * 8
    tied = logits.round()
    scores, _ = select_top_m(tied, labels, m)
    assert torch.equal(scores[:, 0], tied.gather(1, labels.unsqueeze(1)).squeeze(1))
    want = torch.stack([tied[b, reference.top_m(tied[b], y, m)] for b, y in enumerate(labels.tolist())])
    assert torch.equal(scores, want)


@given(m=st.integers(1, 6), extra=st.integers(0, 3 * BLOCK), kind=st.sampled_from(["normal", "ties", "nan", "inf"]))
def test_the_largest_scores_are_those_of_topk_also_by_blocks(m, extra, kind):
    n = 4 * m * BLOCK + extra - BLOCK  # on both sides of the size from which blocks are used
    scores = torch.randn(7, n, generator=torch.Generator().manual_seed(n))
    if kind == "ties":
        scores = scores.round()
    elif kind in ("nan", "inf"):
        scores[torch.rand(7, n, generator=torch.Generator().manual_seed(m)) < 0.02] = float(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "torch")  # blocks are what PyTorch's operations take, where there is no kernel
        index = largest_indices(scores, m)
    assert index.shape == (7, m)
    assert all(len(set(row)) == m for row in index.tolist())
    torch.testing.assert_close(scores.gather(1, index), scores.topk(m, dim=1).values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", RELAXATIONS)
def test_m_equal_to_n_changes_only_the_lanes(method):
    logits, labels = random_batch()
    if METHODS[method].is_network:
        return  # relaxed networks depend on the lanes that the classes start on
    losses = [TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, m)(logits, labels) for m in (None, 12)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_is_that_of_cross_entropy(method):
    logits, labels = torch.zeros(0, 12, requires_grad=True), torch.zeros(0, dtype=torch.long)
    value = make_loss(method, None, 12)(logits, labels)
    value.backward()
    assert bool(value.isnan())
    assert logits.grad.shape == (0, 12)
    assert float(make_loss(method, None, 12, reduction="sum")(logits, labels).detach()) == 0


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("method", METHODS)
def test_pickle_deepcopy_and_device_keep_the_loss(method):
    loss = make_loss(method, None, 12, **({} if method not in RELAXATIONS else {"m": 8}))
    logits, labels = random_batch()
    want = loss(logits, labels)
    for other in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), loss.to("cpu"), loss.double()):
        torch.testing.assert_close(other(logits, labels), want, rtol=1e-6, atol=1e-7)
    assert not loss.state_dict(), "constants are rebuilt, not stored with a model"
    on_meta = copy.deepcopy(loss).to("meta")
    assert all(buffer.is_meta for buffer in on_meta.buffers())


@pytest.mark.parametrize("method", ["neuralsort", "softsort", "bitonic", "splitter_selection", "odd_even"])
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
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_back_from_the_device(method):
    """Meta tensors have no values: an .item() or a branch on one raises, where on CUDA it would wait."""
    logits = torch.empty(6, 12, device="meta", requires_grad=True)
    labels = torch.empty(6, dtype=torch.long, device="meta")
    for options in ({}, {"m": 8}):
        loss = make_loss(method, None, 12, **options).to("meta")
        loss(logits, labels).backward()
        assert logits.grad.shape == (6, 12)
        if method in RELAXATIONS:
            loss(logits, labels, p_k=torch.empty(6, 5, device="meta")).backward()


@pytest.mark.parametrize("method", RELAXATIONS)
def test_a_nan_or_infinite_logit_spoils_its_sample_only(method):
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, top1_mode="sort", reduction="none")
    logits, labels = random_batch(dtype=torch.float32)
    clean = loss(logits, labels)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = logits.clone()
        spoilt[2, 11] = bad
        labels[2] = 0
        values = loss(spoilt.requires_grad_(), labels)
        keep = torch.tensor([0, 1, 3, 4, 5])
        torch.testing.assert_close(values[keep], clean[keep])
        values[keep].sum().backward()
        assert bool(torch.isfinite(spoilt.grad[keep]).all())
        if not (method == "softsort" and bad == float("-inf")):
            assert bool(values[2].isnan())


def test_m_leaves_out_masked_classes():
    logits, labels = random_batch(dtype=torch.float32)
    logits[:, 10:] = float("-inf")
    labels = labels % 10
    for method in RELAXATIONS:
        values = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12, 8)(logits, labels)
        torch.testing.assert_close(values, TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 10, 8)(logits[:, :10], labels))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_extreme_logits_give_finite_losses_and_gradients(method, scale):
    loss = make_loss(method, None, 50)
    logits, labels = random_batch(16, 50, scale, torch.float32)
    logits.requires_grad_()
    value = loss(logits, labels)
    value.backward()
    assert bool(torch.isfinite(value))
    assert bool(torch.isfinite(logits.grad).all())


@pytest.mark.parametrize("method", RELAXATIONS)
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
    ({"p_k": [0.1] * 10, "num_classes": 10}, "K=10 entries for 10 scores"),
    ({"p_k": [0.2] * 5, "m": 5}, "K=5 entries for 5 scores"),
    ({"p_k": torch.full((4, 2), 0.5)}, "num_classes=10 rows, got 4"),
    ({"m": 11}, "m must be an integer between 2 and num_classes=10"),
    ({"m": 2.5}, "m must be"),
    ({"num_classes": 1}, "num_classes"),
    ({"inverse_temperature": 0}, "above 0"),
    ({"inverse_temperature": -1}, "above 0"),
    ({"inverse_temperature": float("inf")}, "finite"),
    ({"top1_mode": "smec"}, "did you mean 'smce'"),
    ({"p_k": [1, 0, 0], "top1_mode": "sm"}, "nothing to sort"),
    ({"p_k": [1.0], "top1_mode": "smce"}, "nothing to sort"),
    ({"reduction": "avg"}, "unknown reduction"),
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
        (torch.randn(10), labels, ValueError, r"\(batch, n\)"),
        (logits, labels[:3], ValueError, r"\(batch,\)"),
        (logits, labels.int(), TypeError, "int64"),
        (logits, torch.full((4,), 10), ValueError, r"\[0, 9\].*got 10 at position 0"),
        (logits, torch.full((4,), -1), ValueError, "got -1"),
        (logits, torch.rand(4, 9), ValueError, "distributions over classes"),
        (logits, [0, 0, 0, 0], TypeError, "labels must be a tensor"),
    ]:
        with pytest.raises(error, match=message):
            loss(bad_logits, bad_labels)
    with pytest.raises(ValueError, match=r"\(batch, K\) = \(4, 2\)"):
        loss(logits, labels, p_k=torch.full((4, 3), 1 / 3))
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
