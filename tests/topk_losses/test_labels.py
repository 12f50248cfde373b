"""Labels as torch.nn.CrossEntropyLoss takes them: weights, smoothing, distributions, dense shapes; and sets."""

import functools

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from tests import reference
from tests.methods import DETERMINISTIC, FOLLOW, GUARDED, MODES, RELAXED, WITH_MODES, gradcheck, p_k_of, random_batch
from topk_losses import METHODS, ClassificationLoss, TopKCrossEntropyLoss, make_loss

WEIGHT = torch.linspace(0.2, 2, 12, dtype=torch.float64)


def losses_of_all(loss, logits):
    """The loss for every class as the label, one by one: (batch, n)."""
    return torch.stack([loss(logits, torch.full((len(logits),), j)) for j in range(logits.shape[1])], dim=1)


def mixup(labels, share=0.3):
    """Two classes with mass in each row."""
    first = one_hot(labels, 12).double()
    second = one_hot(labels.roll(1), 12).double()
    return (1 - share) * first + share * second


CORRECTED = [(*case, {"noise_rate": 0.4}) for case in MODES if case[1] != "smce"]


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize(("method", "top1_mode", "settings"), [*((*case, {}) for case in WITH_MODES), *CORRECTED])
def test_distributions_smoothing_and_weights_give_the_expected_loss(method, top1_mode, settings, m):
    logits, labels = random_batch()
    build = functools.partial(make_loss, method, None, 12, m, top1_mode=top1_mode, **settings)
    plain = build(reduction="none")
    every = losses_of_all(plain, logits)
    losses = plain(logits, labels)
    for mass in (mixup(labels), random_batch(seed=1)[0].softmax(1)):
        # pair by pair, and from the whole matrix where there is no m
        torch.testing.assert_close(plain(logits, mass), (mass * every).sum(1))
        summed = build(weight=WEIGHT, reduction="sum")(logits, mass)
        torch.testing.assert_close(summed, (WEIGHT * mass * every).sum())
    for hot in (one_hot(labels, 12).double(), one_hot(labels, 12).bfloat16()):
        torch.testing.assert_close(plain(logits, hot), losses)
        torch.testing.assert_close(plain(logits.float(), hot), plain(logits.float(), labels))
    smooth = build(label_smoothing=0.1, reduction="none")(logits, labels)
    torch.testing.assert_close(smooth, 0.9 * losses + 0.1 * every.mean(1))
    share = WEIGHT[labels]
    torch.testing.assert_close(build(weight=WEIGHT)(logits, labels), (share * losses).sum() / share.sum())
    assert build(weight=WEIGHT).state_dict() == {}


@pytest.mark.parametrize("method", RELAXED)
def test_the_cost_follows_the_classes_and_the_ranks_with_mass(method, monkeypatch):
    """Mixup takes two columns per sample, however many classes there are, and P_K on 1 and 3 no mask of 2."""
    loss = TopKCrossEntropyLoss(method, [0.5, 0, 0.5])
    seen = []
    logits, labels = random_batch()
    compute = type(loss.operator).topk_probabilities_of_labels

    def spy(operator, scores, labels, ks, *others):
        seen.append((len(scores), list(ks)))
        return compute(operator, scores, labels, ks, *others)

    monkeypatch.setattr(type(loss.operator), "topk_probabilities_of_labels", spy)
    loss(logits, mixup(labels))
    assert seen == [(2 * len(labels), [3])]


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_smoothing_copies_no_logits_for_each_class(method, monkeypatch):
    loss = make_loss(method, p_k_of(method, 3), label_smoothing=0.1)
    if method in RELAXED and loss.operator.compares_pairs:  # each class has scores of its own
        pytest.skip("compares pairs of classes")
    monkeypatch.setattr(ClassificationLoss, "_loss_of_copies", None)
    loss(*random_batch())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_and_smoothing_are_those_of_cross_entropy(reduction):
    logits, labels = random_batch()
    labels[2] = -100
    for smoothing in (0.0, 0.2):
        settings = {"weight": WEIGHT, "label_smoothing": smoothing, "reduction": reduction}
        for target in (labels, mixup(labels.clamp(min=0))):
            want = cross_entropy(logits, target, **settings)
            torch.testing.assert_close(make_loss("softmax_cross_entropy", **settings)(logits, target), want)


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_any_of_several_right_answers(method, m, top1_mode):
    """The loss of one class instead of the set, whose probability is summed; nothing with mass is left out by m."""
    logits, labels = random_batch()
    right = torch.zeros(6, 12, dtype=torch.bool)
    right[:, 1] = True
    right[1:, 5] = True
    p_k = [0.3, 0, 0.2, 0.5]
    build = functools.partial(TopKCrossEntropyLoss, method, p_k, m=m, top1_mode=top1_mode, reduction="none")
    loss = build(soft_labels="any")
    share = torch.tensor([p_k])
    want = []
    for row in range(6):
        answers = [j for j in range(12) if right[row, j]]
        best_answer = max(answers, key=logits[row].tolist().__getitem__)
        order = reference.top_m(logits[row] + 100.0 * right[row], best_answer, m) if m else list(range(12))
        scores = logits[row, order]
        places = [order.index(j) for j in answers]
        P = loss.operator.permutation_matrix(scores, len(p_k), loss.inverse_temperature)[:, places].sum(1)  # (K,)
        P = P.cumsum(0).clamp(max=1).diff(prepend=P.new_zeros(1)).view(1, -1, 1)
        others = [place for place in range(len(order)) if place not in places]
        scores = torch.cat([scores[places].logsumexp(0, keepdim=True), scores[others]]).unsqueeze(0)
        label = torch.tensor([0])
        guarded = method in GUARDED
        want.append(float(reference.topk_cross_entropy(P, scores, label, share, top1_mode, guarded)))
    for target in (right, right.long(), right.float()):
        assert loss(logits, target).tolist() == pytest.approx(want, rel=1e-6, abs=1e-8)
    mass = right[:2].double().mul(0.7)  # one answer, and two
    assert gradcheck(lambda s: loss(s, mass), (logits[:2].clone().requires_grad_(),))
    for one in (labels, one_hot(labels, 12)):  # the loss of that label
        torch.testing.assert_close(loss(logits, one), build()(logits, labels))


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_dense_and_unbatched_predictions(method):
    logits, labels = random_batch(batch=12)
    for reduction in ("mean", "sum", "none"):
        loss = make_loss(method, None, reduction=reduction)
        want = loss(logits, labels)
        want = want.view(2, 3, 2) if want.dim() else want
        dense = logits.view(2, 3, 2, 12).movedim(-1, 1)  # (batch, n, d1, d2)
        torch.testing.assert_close(loss(dense, labels.view(2, 3, 2)), want)
        soft = one_hot(labels, 12).double().view(2, 3, 2, 12).movedim(-1, 1)
        torch.testing.assert_close(loss(dense, soft), want)
    torch.testing.assert_close(make_loss(method)(logits[0], labels[0]), make_loss(method)(logits[:1], labels[:1]))
    if method in RELAXED:  # P_K of each position
        loss = make_loss(method)
        rows = random_batch(12, 4)[0].softmax(1)
        want = loss(logits, labels, p_k=rows)
        torch.testing.assert_close(loss(dense, labels.view(2, 3, 2), p_k=rows.view(2, 3, 2, 4)), want)
        torch.testing.assert_close(loss(logits[0], labels[0], p_k=rows[0]), loss(logits[:1], labels[:1], p_k=rows[:1]))


@pytest.mark.parametrize(
    ("method", "beta"), [*((method, None) for method in METHODS), *((method, "auto") for method in FOLLOW)]
)
def test_a_head_of_zeros_trains_as_well_as_a_random_one(method, beta):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 16, generator=generator)
    labels = torch.arange(160) % 8
    features = centres[labels] + 1.2 * torch.randn(160, 16, generator=generator)
    accuracies = []
    for std in (0.0, 0.1):
        head = torch.nn.Linear(16, 8, bias=False)
        torch.manual_seed(0)
        torch.nn.init.normal_(head.weight, std=std)
        loss = make_loss(method, p_k_of(method, 3), 8, inverse_temperature=beta)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
        for _ in range(50):
            optimizer.zero_grad()
            loss(head(features), labels).backward()
            optimizer.step()
        top3 = head(features).topk(3, dim=1).indices
        accuracies.append(float((top3 == labels.unsqueeze(1)).any(1).float().mean()))
    assert accuracies[0] > max(accuracies[1] - 0.02, 0.9)
