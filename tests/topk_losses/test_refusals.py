"""Each misuse gets a message: what was wrong, what was received, how to put it right."""

import re
from functools import partial

import pytest
import torch
from torch.nn.functional import one_hot, pad

from tests.methods import RELAXED, random_batch, with_backends
from tests.reference import NETWORKS
from topk_losses import (
    METHODS,
    ClassificationLoss,
    RelaxedNetwork,
    SinkhornSort,
    SoftmaxCrossEntropyLoss,
    SparseTopK,
    TopKCrossEntropyLoss,
    TopKOperator,
    make_loss,
    make_operator,
    topk_mask,
)
from topk_losses.classification import CommonSettings, own_settings
from topk_losses.kernels import VARIABLE
from topk_losses.methods import ABBREVIATIONS

NAN = float("nan")
INF = float("inf")
build = partial(TopKCrossEntropyLoss, p_k=[0.5, 0.5], num_classes=10)
single = partial(make_loss, "smooth_topk", 2)
TOP1 = [partial(make_loss, name) for name in ("ldr_kl", "nce_rce")]
SINGLE_K = [partial(make_loss, name) for name in ("smooth_topk", "truncated_entropy", "noised_topk")]
make = partial(make_loss, p_k=[0.5, 0.5], num_classes=10)
mask = partial(topk_mask, torch.randn(2, 6))
forward = partial(make_loss, "forward_correction", num_classes=3)
noised = partial(make_loss, "noised_topk", 2, num_classes=6)
sparse = partial(build, "sparse_topk")
ZEROS = r"SparseTopK\(p=2\) gives exactly 0 .* P_K\(1\) > 0 with top1_mode 'sm' or 'smce'"
# what is built, with which settings, one of them out of range, and the message that refuses it
CONSTRUCTIONS = [
    # the method and its settings
    (build, "method", ["splitter_selektion"], "did you mean 'splitter_selection'"),
    (build, "method", ["softmax_cross_entropy"], "no relaxed permutation matrix; build its loss with make_loss"),
    (partial(make, "bitonic"), "distribution", ["logistik"], "did you mean 'logistic"),
    (partial(RelaxedNetwork, "bitonic"), "distribution", ["logistik"], "did you mean 'logistic"),
    (RelaxedNetwork, "construction", ["bitonik"], "did you mean 'bitonic'"),
    (partial(make, "neuralsort"), "distribution", ["logistic"], "distribution applies to relaxed networks"),
    (partial(make, "softsort"), "art_lambda", [0.5], "art_lambda applies to"),
    (partial(make, "bitonic", distribution="cauchy"), "art_lambda", [0.5], "applies to the distribution logistic_phi"),
    (partial(make, "bitonic"), "art_lambda", [1.0], "art_lambda must lie"),
    (build, "top1_mode", ["smec"], "did you mean 'smce'"),
    (build, "p_k", [10, {10: 1.0}, [[0.5, 0.5] + [0.0] * 8, [0.0] * 9 + [1.0]] * 5], "all its mass on rank 10"),
    (partial(build, m=5), "p_k", [5, [0.0] * 4 + [1.0]], "all its mass on rank 5, but only 5 scores are sorted"),
    (build, "inverse_temperature", [0, -1, INF, NAN, torch.tensor(-1.0)], "must be a finite number above 0"),
    (
        build,
        "inverse_temperature",
        [torch.ones(2), torch.tensor(1)],
        r"one floating-point number, of shape \(\) or \(1,\)",
    ),
    (build, "inverse_temperature", ["automatic", [1.0]], r"inverse_temperature must be a number"),
    # P_K and m
    (build, "p_k", [[0.2, 0, 0, 0, 0.75]], r"sum to 1, got \[0.2, 0, 0, 0, 0.75\] \(sum 0.95\)"),
    (build, "p_k", [[1.5, -0.5], [NAN, 1], {1: 0.5, 5: 0.6}], "non-negative and sum to 1"),
    (build, "p_k", [[], 5.0], r"must have shape \(K,\)"),
    (build, "p_k", [[0.1] * 9 + [0, 0.1]], "mass on rank 11, but only 10 scores"),
    (partial(build, m=4), "p_k", [[0.2] * 5], "mass on rank 5, but only 4 scores"),
    (build, "p_k", [0, {0: 1.0}], "k must be an integer"),
    (build, "p_k", ["0.5 0.5", {1, 5}, [[0.5, 0.5], [1.0]], None], "as numbers, .* got"),
    (build, "p_k", [torch.full((4, 2), 0.5)], "num_classes=10 rows, got 4"),
    (partial(build, num_classes=None), "p_k", [[[0.5, 0.5]] * 12], "needs num_classes=12"),
    (partial(build, p_k=[1, 0]), "top1_mode", ["sm", "smce"], "nothing to sort"),
    (sparse, "p_k", [5, [[0.5, 0.5]] * 9 + [[0, 1]]], ZEROS),
    (build, "noise_rate", [1.0, -0.1], r"noise_rate must lie in \[0, 1\), got"),
    (partial(build, noise_rate=0.2), "top1_mode", ["smce"], "corrects one logarithm .* got top1_mode='smce'"),
    (partial(build, noise_rate=0.2), "soft_labels", ["any"], "corrects one logarithm .* soft_labels='any'"),
    (build, "m", [1, 2.5], "m must be an integer of at least 2, got"),
    # what all losses have
    (build, "reduction", ["avg"], "unknown reduction"),
    (build, "soft_labels", ["all"], "unknown soft_labels"),
    (build, "label_smoothing", [1.0, None], "label_smoothing must"),
    (partial(build, soft_labels="any"), "label_smoothing", [0.1], "neither weight nor label_"),
    (partial(build, soft_labels="any"), "weight", [torch.ones(10)], "neither weight nor label_"),
    (build, "weight", [[None] * 10, torch.ones(9), -torch.ones(10)], "weight must hold"),
    (build, "ignore_index", [1.5], "ignore_index must be an integer"),
    # losses without a matrix
    (make_loss, "method", ["smooth"], "did you mean 'smooth"),
    (partial(make_loss, "softmax_cross_entropy"), "p_k", [[0.5, 0.5], 2], r"all its mass .* P_K = \[1, 0, ..\]"),
    (partial(make_loss, "softmax_cross_entropy"), "inverse_temperature", ["auto", 1.0], "methods with a temperature"),
    (single, "top1_mode", ["smce"], "top1_mode applies to"),
    (partial(METHODS["smooth_topk"].loss, 2), "tau", [0, NAN], "tau must be a finite number above 0"),
    (single, "alpha", [-1], "alpha must be a finite number above 0"),
    (partial(make_loss, "ldr_kl"), "margin", [-1], "margin must be a finite number >= 0, got -1"),
    (noised, "class_counts", [[1, 2], [1, 2, 3, 4, 5, 0], [[1] * 6]], "must hold a finite number above 0 for each"),
    (partial(forward, T=torch.eye(3)), "noise_rate", [0.2], "noise_rate and T .* give one of them"),
    (forward, "noise_rate", [1.0, -0.1], r"noise_rate must lie in \[0, 1\), got"),
    (forward, "T", [torch.eye(4), torch.ones(3)], r"T must be a matrix \(3, 3\) .* got shape \((4, 4|3,)\)"),
    (forward, "T", [torch.ones(3, 3)], "row 0 sums to 3, and its least is 1"),
    (forward, "T", [[[1, 0, 0], [0, 1, 0], [1.5, -0.5, 0]]], "row 2 sums to 1, and its least is -0.5"),
    *((loss, "k", [3], "takes its k as p_k=3") for loss in SINGLE_K),
    (partial(make_loss, "generalized_cross_entropy"), "q", [0, 1.1, -0.5, NAN], "q must"),
    (partial(make_loss, "phuber_cross_entropy"), "tau", [1.0, 0, INF], "tau must be"),
    (partial(make_loss, "symmetric_cross_entropy"), "A", [0.0, -INF, NAN], "below 0"),
    (partial(make_loss, "nce_rce"), "alpha", [-1], "alpha must be a finite number >= 0"),
    *((loss, "p_k", [[0.5, 0.5], 0], "single k") for loss in SINGLE_K),
    *((loss, "num_classes", [5], "k must be below .* n=5, got 5|only 5 scores") for loss in SINGLE_K),
    *((loss, "soft_labels", ["any"], "has one true class; it knows no soft") for loss in (*SINGLE_K, *TOP1)),
    # operators
    (partial(make_operator("softsort").permutation_matrix, torch.zeros(2, 9)), "k", [10], "n=9, got 10"),
    (partial(mask, 3), "inverse_temperature", ["auto"], '"auto", which follows'),
    (SparseTopK, "p", [3], "p must be 2 or 4/3, got 3"),
    (SinkhornSort, "tolerance", [0.0], "tolerance must be"),
    (SinkhornSort, "max_iterations", [0], "max_iterations must be"),
    (mask, "k", [0.0, 6.5, torch.tensor([1.0, 7.0])], r"k must lie in \(0, n=6\]"),
    (partial(mask, 2.5), "method", ["softsort"], "needs lml, lapsum, .*, capped_softmax or soft_topk, not softsort"),
    *((partial(network, 5), "k", [0, 6, 2.0, True], "k must be") for network in NETWORKS.values()),
    *((partial(network, k=1), "n", [0, 5.0], "the number of scores n must be") for network in NETWORKS.values()),
]


@pytest.mark.parametrize(("construct", "setting", "values", "message"), CONSTRUCTIONS)
def test_settings_are_refused_with_a_sentence(construct, setting, values, message):
    for value in values:
        with pytest.raises(ValueError, match=message):
            construct(**{setting: value})


CLASSES = list(dict.fromkeys(method.loss or TopKCrossEntropyLoss for method in METHODS.values()))


@pytest.mark.parametrize("loss", CLASSES, ids=lambda loss: loss.__name__)
def test_a_setting_of_another_loss_is_refused_by_every_class_which_names_its_own(loss):
    own = own_settings(loss)
    for name in {name for other in CLASSES for name in own_settings(other)} - {*own}:
        with pytest.raises(TypeError, match=rf"{loss.__name__} does not take {name}; .*make_loss\(NAME") as error:
            loss(**dict.fromkeys({"k"} & {*own}, 5), **{name: 0.5})
        assert f"its own settings: {', '.join(own) or 'none'}." in str(error.value)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].operator is None])
def test_the_top_k_loss_sends_another_loss_to_make_loss_whatever_its_settings(method):
    for name in ("reduction", *own_settings(METHODS[method].loss)):
        with pytest.raises(ValueError, match=rf"{method} has no .* build its loss with make_loss\('{method}'"):
            TopKCrossEntropyLoss(method, **{name: 0.5})


@pytest.mark.parametrize("method", ["smooth_topk", "smooth_hard_topk"])
def test_a_temperature_by_two_names_is_refused(method):
    with pytest.raises(ValueError, match=f"{method} takes its tau as inverse_temperature: give one of them"):
        make_loss(method, inverse_temperature=2.0, tau=3.0)


def built_by_its_class(loss):
    """Build a loss of its defaults."""
    return loss(**dict.fromkeys({"k"} & {*own_settings(loss)}, 2))


# what no loss takes, of a setting that is not among a few words or that is a tensor
OUT_OF_RANGE = {
    "tau": -1.0,
    "inverse_temperature": -1.0,
    "weight": -torch.ones(10),
    "class_counts": -torch.ones(10),
    "T": -torch.eye(10),
    "k": 0,
    "m": 1,
    "A": 1.0,
    "ignore_index": 0.5,
    "reduction": "max",
    "p_k": [2.0],
}
# settings that take any object of a class
ANY_OBJECT = {"method"}


def assign_and_call(loss_fn, name, value):
    """Assign a setting, and call the loss with it."""
    setattr(loss_fn, name, value)
    loss_fn(torch.randn(4, 10), torch.zeros(4, dtype=torch.long))


@pytest.mark.filterwarnings("ignore:LDR-KL with margin 0")
@pytest.mark.parametrize("loss", CLASSES, ids=lambda loss: loss.__name__)
def test_no_setting_that_is_assigned_later_goes_unchecked(loss):
    """It is refused where it is assigned, or by the next call."""
    for name in {*own_settings(loss), *CommonSettings.__annotations__} - ANY_OBJECT:
        loss_fn = built_by_its_class(loss)
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            assign_and_call(loss_fn, name, OUT_OF_RANGE.get(name, -1))


@pytest.mark.parametrize(
    ("build_loss", "name", "value"),
    [
        (partial(make_loss, "softmax_cross_entropy", label_smoothing=0.1), "soft_labels", "any"),
        (partial(build, "softsort", noise_rate=0.3), "soft_labels", "any"),
        (partial(build, "softsort", noise_rate=0.3), "top1_mode", "smce"),
        (partial(build, "softsort", p_k=1, top1_mode="sort"), "top1_mode", "sm"),
        (partial(build, "sparse_topk"), "top1_mode", "sort"),
        (partial(make_loss, "forward_correction", T=torch.eye(10)), "noise_rate", 0.2),
        (partial(make_loss, "forward_correction"), "noise_rate", None),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_by_the_call(build_loss, name, value):
    with pytest.raises(ValueError, match=name):
        assign_and_call(build_loss(), name, value)


@pytest.mark.parametrize("short", ABBREVIATIONS)
@pytest.mark.parametrize("spelling", [str.lower, str.upper])
def test_the_name_of_papers_is_answered_with_the_name_here(short, spelling):
    with pytest.raises(ValueError, match=f"unknown method .*; did you mean '{ABBREVIATIONS[short]}'"):
        make_loss(spelling(short))


LOGITS = torch.randn(4, 10)
LABELS = torch.zeros(4, dtype=torch.long)
DENSE = torch.randn(4, 10, 3, 5)
plain = TopKCrossEntropyLoss
ANY = partial(build, "softsort", soft_labels="any")
COUNTS_OF_9 = partial(make_loss, "noised_topk", 2, class_counts=[1] * 9)
MATRIX_OF_3 = partial(make_loss, "forward_correction", T=torch.eye(3))


def rows_of_12():
    """A loss with a P_K for each of 12 classes, whose number is no longer said."""
    loss = make_loss("softsort", [[0.5, 0.5]] * 12, num_classes=12)
    loss.num_classes = None
    return loss


FOUR_ANSWERS = torch.zeros(4, 10).index_fill(1, torch.arange(3, 7), 1.0)
CALLS = [
    (build, torch.zeros(4, 10, dtype=torch.long), LABELS, TypeError, "floating-point"),
    (build, LOGITS.numpy(), LABELS, TypeError, "floating-point tensor, got ndarray; convert with torch.as_tensor"),
    (build, torch.randn(4, 11), LABELS, ValueError, "num_classes=10 columns"),
    (build, torch.tensor(0.0), LABELS, ValueError, "a dimension for the classes"),
    (plain, torch.empty(4, 0), LABELS, ValueError, r"one class at least, got shape \(4, 0\)"),
    (build, LOGITS, LABELS[:3], ValueError, r"shape \(4,\)"),
    (build, LOGITS, [0, 0, 0, 0], TypeError, "labels must be a tensor, got list; .*torch.as_tensor"),
    (build, LOGITS, LABELS.int(), TypeError, r"int64 .* convert with labels.long\(\)"),
    (build, LOGITS, LABELS + 10, ValueError, r"\[0, 9\].*got 10 at position 0"),
    (build, LOGITS, torch.rand(4, 9), ValueError, "shape of the logits"),
    (build, LOGITS, LABELS.float(), ValueError, r"for class indices convert with labels.long\(\)"),
    (build, LOGITS, LABELS.unsqueeze(1), ValueError, r"labels.squeeze\(1\)"),
    (build, DENSE, torch.zeros(4, 1, 3, 5).long(), ValueError, r"\(4, 3, 5\), .* got .*labels.squeeze\(1\)"),
    (build, LOGITS, torch.eye(10)[:4].bool(), TypeError, r"a column per class is .* soft_labels='any'"),
    (build, LOGITS, one_hot(LABELS, 10), ValueError, r"distribution \(labels.float\(\)\)"),
    (build, LOGITS, one_hot(LABELS, 10) * 3.0, ValueError, r"sum to 1.*soft_labels='any'.*a sum of 3 in row 0"),
    (build, LOGITS, torch.tensor([[1.5, -0.5] + [0.0] * 8] * 4), ValueError, "non-negative"),
    (ANY, LOGITS, torch.zeros(4, 10), ValueError, "at least one of them above 0; got a sum of 0 in row 0"),
    (ANY, LOGITS, one_hot(LABELS, 10) * 2.0, ValueError, r"entries in \[0, 1\]"),
    (partial(ANY, m=4), LOGITS, torch.ones(4, 10), ValueError, "m=4 scores cannot hold 10 right answers"),
    (partial(ANY, m=4), LOGITS, FOUR_ANSWERS, ValueError, "m=4 scores cannot hold 4 right answers and k=1 others"),
    (partial(ANY, p_k=3, m=6), LOGITS, FOUR_ANSWERS, ValueError, "m=6 scores .* 4 right answers and k=3 others"),
    (partial(TopKCrossEntropyLoss, p_k=10), LOGITS, LABELS, ValueError, "all its mass on rank 10, but only 10 scores"),
    (partial(build, "softsort"), LOGITS, torch.eye(10)[:4] * 2, ValueError, "sum to 1"),
    (partial(plain, weight=torch.ones(11)), LOGITS, LABELS, ValueError, "weight holds 11 numbers, but .* 10"),
    (COUNTS_OF_9, LOGITS, LABELS, ValueError, "class_counts holds 9 .* 10"),
    (MATRIX_OF_3, LOGITS, LABELS, ValueError, "T is for 3 classes, but .* 10"),
    *(
        (rows_of_12, LOGITS, target, ValueError, "a row for each of 12 classes, but .* 10")
        for target in (LABELS, one_hot(LABELS, 10).float())
    ),
    (partial(plain, p_k=12), LOGITS, LABELS, ValueError, "p_k reaches rank 12, but only 10 scores are sorted"),
    *(
        (loss, LOGITS[:, :5], LABELS, ValueError, "k must be below the number of classes n=5, got 5")
        for loss in SINGLE_K
    ),
]


WHERE_NONE_CAN_BE_READ = [(topk_mask, "meta"), (torch.compile(topk_mask, backend="eager"), "cpu")]


@pytest.mark.parametrize(("call", "device"), WHERE_NONE_CAN_BE_READ, ids=["meta", "compiled"])
@pytest.mark.parametrize("method", ["lml", "lapsum", "sparse_topk", "capped_softmax", "soft_topk", "softsort"])
def test_a_k_that_is_a_number_is_checked_where_those_of_tensors_cannot_be_read(method, call, device):
    x = torch.zeros(2, 6, device=device)
    assert call(x, 2, method).shape == (2, 6)
    for k in (0, 7, -1):
        with pytest.raises(ValueError, match="k must"):
            call(x, k, method)


@pytest.mark.parametrize(("construct", "logits", "labels", "error", "message"), CALLS)
def test_inputs_of_a_loss_are_refused_with_a_sentence(construct, logits, labels, error, message):
    loss = construct()
    with pytest.raises(error, match=message):
        loss(logits, labels)


def test_a_p_k_per_sample_is_refused_with_a_sentence():
    for p_k, error, message in (
        ([[0.5, 0.5]] * 4, TypeError, "must be a tensor, got list; convert with torch.as_tensor"),
        (torch.full((3, 3), 1 / 3), ValueError, r"shape \(4, 'K'\)"),
        (torch.empty(4, 0), ValueError, r"K >= 1 ranks, got shape \(4, 0\)"),
        (torch.full((4, 11), 1 / 11), ValueError, "p_k reaches rank 11, but only 10 scores are sorted"),
        (torch.tensor([[0.5, 0.5], [1, 0], [1, 1], [0, 1]]), ValueError, r"sum to 1.*in row 2"),
        (torch.tensor([[0.5, 0.5]] * 3 + [[0, 1.0]]), ValueError, "SparseTopK.* gives exactly 0"),
    ):
        with pytest.raises(error, match=message):
            sparse()(LOGITS, LABELS, p_k=p_k)


def test_ranks_without_mass_that_no_score_can_have_count_for_nothing():
    p_k = torch.tensor([[0.5, 0.2, 0.3]] * 4)
    longer = pad(p_k, (0, 10))  # 13 ranks of 10 scores
    loss_fn = build("softsort")
    torch.testing.assert_close(loss_fn(LOGITS, LABELS, p_k=longer), loss_fn(LOGITS, LABELS, p_k=p_k))


@pytest.mark.parametrize("num_ranks", [5, 9])
def test_a_sample_whose_class_is_within_k_whatever_its_score_is_refused(num_ranks):
    p_k = torch.zeros(4, num_ranks)
    p_k[:, 4] = 1
    loss_fn = build("softsort", m=5)
    with pytest.raises(ValueError, match="all its mass on rank 5, but only 5 scores are sorted"):
        loss_fn(LOGITS, LABELS, p_k=p_k)
    p_k[:, 3:5] = 0.5
    assert bool(loss_fn(LOGITS, LABELS, p_k=p_k) > 0)


CLASS_2_ALONE = [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1], [0.5, 0, 0.5]]
ASSIGNED = {
    "m": ([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1], [0.5, 0, 0.5]], "m", 3, "all its mass on rank 3"),
    "an operator, P_K by class": (CLASS_2_ALONE, "operator", SparseTopK(), "gives exactly 0"),
    "an operator": ([0, 0.5, 0.5], "operator", SparseTopK(), "gives exactly 0"),
}


@pytest.mark.parametrize(("p_k", "name", "value", "message"), ASSIGNED.values(), ids=ASSIGNED)
def test_p_k_is_checked_again_after_an_assignment(p_k, name, value, message):
    loss_fn = TopKCrossEntropyLoss("softsort", p_k, num_classes=4, top1_mode="sm" if name == "operator" else "sort")
    logits, labels = random_batch(2, 4)
    loss_fn(logits, labels)
    setattr(loss_fn, name, value)
    with pytest.raises(ValueError, match=message):
        loss_fn(logits, labels)


class Flat(TopKOperator):
    """An operator whose methods forget a dimension."""

    def topk_probabilities(self, scores, ks, inverse_temperature, generator=None):
        return scores.softmax(1)


class FlatOfLabels(make_operator("softsort").__class__):
    """An operator whose optional methods forget the ranks."""

    def topk_probabilities_of_labels(self, scores, labels, ks, inverse_temperature, generator=None):
        return scores.softmax(1).gather(1, labels.unsqueeze(1))

    def topk_probabilities_of_sets(self, scores, sets, ks, inverse_temperature, generator=None):
        return (scores.softmax(1) * sets).sum(1, keepdim=True)

    def rank_probabilities_of_classes(self, scores, k, inverse_temperature, generator=None):
        return scores.softmax(1)


class Tall(ClassificationLoss):
    """A loss whose methods keep a dimension, by which weights would make a matrix of it."""

    def loss_of_labels(self, logits, labels, call):
        return -logits.log_softmax(1).gather(1, labels.unsqueeze(1))

    def loss_of_sets(self, logits, sets, call):
        return -(logits.log_softmax(1) * sets).sum(1, keepdim=True)


class OneForAll(SoftmaxCrossEntropyLoss):
    """A loss that computes a number per row for every class."""

    def loss_of_every_class(self, logits, call):
        return -logits.log_softmax(1).sum(1, keepdim=True)


SETS = torch.eye(10)[:4]
SORTED = partial(TopKCrossEntropyLoss, p_k=3, top1_mode="sort")
SORTED_3 = partial(TopKCrossEntropyLoss, p_k={1: 0.3, 2: 0.3, 3: 0.4}, top1_mode="sort")
WRONG_SHAPES = [
    (Tall(), LABELS, "Tall.loss_of_labels", "(4,)", "(4, 1)"),
    (Tall(), SETS, "Tall.loss_of_labels", "(4,)", "(4, 1)"),
    (Tall(soft_labels="any"), SETS, "Tall.loss_of_sets", "(4,)", "(4, 1)"),
    (OneForAll(label_smoothing=0.1), LABELS, "OneForAll.loss_of_every_class", "(4, 10)", "(4, 1)"),
    (SORTED(Flat()), LABELS, "Flat.topk_probabilities", "(4, 1, 10)", "(4, 10)"),
    (SORTED(Flat(), label_smoothing=0.1), LABELS, "Flat.topk_probabilities", "(4, 1, 10)", "(4, 10)"),
    (SORTED(Flat(), soft_labels="any"), SETS, "Flat.topk_probabilities", "(4, 1, 10)", "(4, 10)"),
    (SORTED_3(FlatOfLabels()), LABELS, "FlatOfLabels.topk_probabilities_of_labels", "(4, 3)", "(4, 1)"),
    (partial(Flat().mask, k=3), None, "Flat.topk_probabilities", "(4, 1, 10)", "(4, 10)"),
    (partial(Flat().permutation_matrix, k=3), None, "Flat.topk_probabilities", "(4, 3, 10)", "(4, 10)"),
    (
        partial(FlatOfLabels().permutation_matrix, k=3),
        None,
        "FlatOfLabels.rank_probabilities_of_classes",
        "(4, 3, 10)",
        "(4, 10)",
    ),
    (
        partial(FlatOfLabels().rank_probabilities, k=3),
        LABELS,
        "FlatOfLabels.topk_probabilities_of_labels",
        "(4, 3)",
        "(4, 1)",
    ),
]


@pytest.mark.parametrize(("compute", "labels", "method", "wanted", "got"), WRONG_SHAPES)
def test_what_an_own_loss_or_operator_returns_must_have_its_shape(compute, labels, method, wanted, got):
    arguments = [LOGITS] if labels is None else [LOGITS, labels]
    with pytest.raises(ValueError, match=re.escape(f"{method} must return the shape {wanted}, got {got}")):
        compute(*arguments)


@pytest.mark.parametrize(("method", "backend"), with_backends((method,) for method in RELAXED))
def test_inputs_of_an_operator_are_refused_with_a_sentence(method, backend, monkeypatch):
    """Before a kernel reads beyond its arrays."""
    monkeypatch.setenv(VARIABLE, backend)
    operator = make_operator(method)
    logits = torch.randn(4, 9)
    labels = torch.zeros(4, dtype=torch.long)
    for bad_logits, bad_labels, error, message in (
        (logits.long(), labels, TypeError, "floating-point"),
        (logits[:, :2], labels, ValueError, "n=2, got 3"),
        (logits, labels[:3], ValueError, "shape"),
        *((logits, labels + bad, ValueError, rf"\[0, 8\], got {bad} at position 0") for bad in (-100, -1, 9, 2**40)),
    ):
        with pytest.raises(error, match=message):
            operator.rank_probabilities(bad_logits, bad_labels, 3)
    with pytest.raises(ValueError, match="shape"):
        operator.permutation_matrix(torch.tensor(0.0), 1)
    with pytest.raises(ValueError, match="one class at least"):
        operator.mask(torch.empty(2, 0), 1)
    with pytest.raises(ValueError, match="entries in"):
        operator.topk_mass(logits, -torch.ones(4, 9), 3)
