"""Labels as torch.nn.CrossEntropyLoss takes them: weights, smoothing, distributions, dense shapes; and sets."""

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from tests import reference
from tests.methods import DETERMINISTIC, GUARDED, RELAXED
from tests.topk_losses.test_loss import MODES, random_batch
from topk_losses import RELAXATIONS, SoftmaxCrossEntropyLoss, TopKCrossEntropyLoss, make_loss, make_operator
from topk_losses.methods import METHODS, SINGLE_K, TOP1

WEIGHT = torch.linspace(0.2, 2, 12, dtype=torch.float64)


def each_class(loss, logits):
    """The loss for every class as the label, one by one: (batch, n)."""
    none = make_copy(loss, reduction="none")
    return torch.stack([none(logits, torch.full((len(logits),), j)) for j in range(logits.shape[1])], dim=1)


def make_copy(loss, **options):
    settings = {"m": loss.m, "top1_mode": loss.top1_mode, "p_k": loss.p_k} if hasattr(loss, "method") else {}
    names = {
        SoftmaxCrossEntropyLoss: "softmax_cross_entropy",
        **{METHODS[name].loss: name for name in (*SINGLE_K, *TOP1)},
    }
    name = loss.method if hasattr(loss, "method") else names[type(loss)]
    return make_loss(name, num_classes=12, **{**settings, **options})


def mixup(labels, share=0.3):
    """Two classes with mass in each row."""
    first, second = one_hot(labels, 12).double(), one_hot(labels.roll(1), 12).double()
    return (1 - share) * first + share * second


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_distribution_of_labels_gives_the_expected_loss(method, m):
    logits, labels = random_batch()
    dense = random_batch(seed=1)[0].softmax(1)
    for top1_mode in [mode for name, mode in MODES if name == method] or [None]:
        loss = make_loss(method, None, 12, m, top1_mode=top1_mode, reduction="none")
        every = each_class(loss, logits)
        for mass in (mixup(labels), dense):  # pair by pair, and from the whole matrix where there is no m
            torch.testing.assert_close(loss(logits, mass), (mass * every).sum(1))
            summed = make_copy(loss, weight=WEIGHT, reduction="sum")(logits, mass)
            torch.testing.assert_close(summed, (WEIGHT * mass * every).sum())


@pytest.mark.parametrize("method", RELAXED)
def test_the_cost_follows_the_classes_with_mass(method, monkeypatch):
    """Mixup takes two columns per sample, however many classes there are."""
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5], 12)
    logits, labels = random_batch()
    rows = []
    compute = loss.operator.within
    monkeypatch.setattr(loss.operator, "within", lambda s, *others: rows.append(len(s)) or compute(s, *others))
    loss(logits, mixup(labels))
    assert rows == [int(mixup(labels).count_nonzero())]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weights_and_smoothing_are_those_of_cross_entropy(reduction, smoothing):
    logits, labels = random_batch()
    labels[2] = -100
    ours = make_loss("softmax_cross_entropy", None, 12, weight=WEIGHT, label_smoothing=smoothing, reduction=reduction)
    for target in (labels, mixup(labels.clamp(min=0))):
        want = cross_entropy(logits, target, WEIGHT, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(ours(logits, target), want)


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_label_smoothing_spreads_the_label(method, m):
    logits, labels = random_batch()
    plain = make_loss(method, None, 12, m, reduction="none")
    smooth = make_copy(plain, label_smoothing=0.1, reduction="none")
    want = 0.9 * plain(logits, labels) + 0.1 * each_class(plain, logits).mean(1)
    torch.testing.assert_close(smooth(logits, labels), want)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(smooth(logits, labels).sum(), logits)
    (without,) = torch.autograd.grad(plain(logits, labels).sum(), logits)
    assert float((gradient - without).abs().max()) > 1e-3


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_weight_per_class(method):
    logits, labels = random_batch()
    each = make_loss(method, None, 12, reduction="none")(logits, labels)
    share = WEIGHT[labels]
    torch.testing.assert_close(
        make_loss(method, None, 12, weight=WEIGHT)(logits, labels), (share * each).sum() / share.sum()
    )
    assert make_loss(method, None, 12, weight=WEIGHT).state_dict() == {}


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_any_of_several_right_answers(method, m, top1_mode):
    """-log of the summed probability of the set, at most 1 for each k; nothing with mass is left out by m."""
    logits, _ = random_batch()
    right = torch.zeros(6, 12, dtype=torch.bool)
    right[:, [1, 5]] = True
    right[0, 5] = False
    p_k = torch.tensor([0.3, 0, 0.2, 0.5], dtype=torch.float64)
    loss = TopKCrossEntropyLoss(method, p_k, 12, m, top1_mode=top1_mode, soft_labels="any", reduction="none")
    got = loss(logits, right)
    assert bool((got >= -1e-6).all())
    for target in (right.long(), right.double(), right.float()):
        assert torch.equal(loss(logits, target), got)
    for row in range(6):
        answers = [j for j in range(12) if right[row, j]]
        others = [j for j in logits[row].argsort(descending=True).tolist() if j not in answers]
        # top-m puts the right answers first, the others falling; without m the order is that of the classes
        in_front = logits[row, answers + others[: 8 - len(answers)]] if m else logits[row]
        places = list(range(len(answers))) if m else answers
        P = make_operator(method, len(in_front), 4).permutation_matrix(in_front)
        softmax = in_front.softmax(0)[places].sum()
        total = sum(
            p_k[k] * min(float(P[: k + 1, places].sum()), 1.0) for k in range(0 if top1_mode == "sort" else 1, 4)
        )
        guard = lambda p: -torch.log(p * (1 - 2e-7) + 1e-7 if method in GUARDED else p)  # noqa: E731
        if top1_mode == "smce":
            want = -p_k[0] * softmax.log() + (1 - p_k[0]) * guard(torch.as_tensor(total))
        else:
            want = guard(total + (p_k[0] * softmax if top1_mode == "sm" else 0))
        torch.testing.assert_close(got[row], want, rtol=1e-6, atol=1e-8)
    scores = logits.clone().requires_grad_()
    mass = right.double().mul(0.7)
    assert torch.autograd.gradcheck(lambda s: loss(s, mass), (scores,))


def test_any_of_one_right_answer_is_the_loss_of_that_label():
    logits, labels = random_batch()
    for method in (*RELAXED, "softmax_cross_entropy"):
        want = make_loss(method, None, 12)(logits, labels)
        torch.testing.assert_close(make_loss(method, None, 12, soft_labels="any")(logits, one_hot(labels, 12)), want)
        torch.testing.assert_close(make_loss(method, None, 12, soft_labels="any")(logits, labels), want)


def test_what_labels_may_not_be():
    logits, labels = random_batch()
    expected, any_of = (TopKCrossEntropyLoss("softsort", 3, 12, m=4, soft_labels=each) for each in ("expected", "any"))
    with pytest.raises(ValueError, match=r"sum to 1.*soft_labels='any'.*a sum of 3 in row 0"):
        expected(logits, one_hot(labels, 12).double() * 3)
    with pytest.raises(ValueError, match="non-negative"):
        expected(logits, torch.full((6, 12), 1 / 12) - one_hot(labels, 12) + one_hot(labels.roll(1), 12))
    with pytest.raises(ValueError, match="at least one of them above 0; got a sum of 0 in row 0"):
        any_of(logits, torch.zeros(6, 12))
    with pytest.raises(ValueError, match=r"entries in \[0, 1\]"):
        any_of(logits, one_hot(labels, 12) * 2.0)
    with pytest.raises(ValueError, match="m=4 scores cannot hold 5 right answers"):
        any_of(logits, torch.tensor([[1.0] * 5 + [0] * 7] * 6))
    with pytest.raises(TypeError, match="int64"):
        expected(logits, one_hot(labels, 12).bool())
    with pytest.raises(ValueError, match="one true class"):
        make_loss("smooth_topk", 3, 12, soft_labels="any")
    any_of.label_smoothing = 0.1
    with pytest.raises(ValueError, match="neither weight nor label_smoothing"):
        any_of(logits, one_hot(labels, 12))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_dense_and_unbatched_predictions(method):
    logits, labels = random_batch(batch=12)
    for reduction in ("mean", "sum", "none"):
        loss = make_loss(method, None, reduction=reduction)
        want = loss(logits, labels)
        dense = logits.view(2, 3, 2, 12).movedim(-1, 1)  # (batch, n, d1, d2)
        torch.testing.assert_close(loss(dense, labels.view(2, 3, 2)), want.view(2, 3, 2) if want.dim() else want)
        soft = one_hot(labels, 12).double().view(2, 3, 2, 12).movedim(-1, 1)
        torch.testing.assert_close(loss(dense, soft), want.view(2, 3, 2) if want.dim() else want)
    one = make_loss(method)(logits[0], labels[0])
    assert one.shape == ()
    torch.testing.assert_close(one, make_loss(method)(logits[:1], labels[:1]))


def test_a_p_k_per_pixel():
    logits, labels = random_batch(batch=12)
    rows = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    loss = TopKCrossEntropyLoss("softsort", 2)
    want = loss(logits, labels, p_k=rows)
    got = loss(logits.view(4, 3, 12).movedim(-1, 1), labels.view(4, 3), p_k=rows.view(4, 3, 4))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(loss(logits[0], labels[0], p_k=rows[0]), loss(logits[:1], labels[:1], p_k=rows[:1]))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_under_autocast_soft_labels_and_p_k_per_class_stay_in_full_precision(method):
    logits, labels = random_batch(dtype=torch.float32)
    options = {"p_k": torch.tensor([[0.3, 0.1, 0.6]] * 12)} if method in RELAXATIONS else {}
    loss = make_loss(method, num_classes=12, **options)
    for target in (mixup(labels).float(), random_batch(seed=1, dtype=torch.float32)[0].softmax(1), labels):
        want = loss(logits, target)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(loss(logits, target), want)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_head_of_zeros_trains_as_well_as_a_random_one(method):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 16, generator=generator)
    labels = torch.arange(160) % 8
    features = centres[labels] + 1.2 * torch.randn(160, 16, generator=generator)
    accuracies = []
    for start in ("zeros", "random"):
        head = torch.nn.Linear(16, 8)
        torch.manual_seed(0)
        torch.nn.init.zeros_(head.bias)
        torch.nn.init.zeros_(head.weight) if start == "zeros" else torch.nn.init.normal_(head.weight, std=0.1)
        loss = make_loss(method, [0.5, 0, 0.5] if method in RELAXATIONS else None, 8)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
        for _ in range(50):
            optimizer.zero_grad()
            loss(head(features), labels).backward()
            optimizer.step()
        top3 = head(features).topk(3, dim=1).indices
        accuracies.append(float((top3 == labels.unsqueeze(1)).any(1).float().mean()))
    assert accuracies[0] > accuracies[1] - 0.02
    assert accuracies[0] > 0.9


@pytest.mark.parametrize("method", [name for name in DETERMINISTIC if name not in ("smooth_topk", "smooth_hard_topk")])
def test_classes_masked_with_minus_infinity_take_no_part(method):
    """As a class far below all others, with a finite loss and no gradient of its own."""
    logits, labels = random_batch(n=12)
    labels = labels % 8
    out = logits.clone()
    out[:, 8:] = -torch.inf
    out.requires_grad_()
    loss = make_loss(method, num_classes=12)
    value = loss(out, labels)
    (gradient,) = torch.autograd.grad(value, out)
    low = logits.clone()
    low[:, 8:] = -1e9
    assert bool(gradient.isfinite().all())
    assert not bool(gradient[:, 8:].any())
    if method not in ("sinkhorn_sort", "soft_topk"):  # a third of the classes far below is no limit for their whitening
        torch.testing.assert_close(value, loss(low, labels), rtol=1e-5, atol=1e-6)
    hard = reference.hard_permutation(out.detach())[:, :5].sum(1).bool()
    assert not bool(hard[:, 8:].any())
