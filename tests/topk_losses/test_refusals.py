"""Each misuse gets a sentence: what was wrong, what was received, how to mend it."""

from functools import partial

import pytest
import torch
from torch.nn.functional import one_hot

from tests.methods import RELAXED
from tests.reference import NETWORKS
from topk_losses import (
    LDRKLLoss,
    NoisedTopKLoss,
    RelaxedNetwork,
    SinkhornSort,
    SmoothHardTopKLoss,
    SmoothTopKLoss,
    SparseTopK,
    TopKCrossEntropyLoss,
    bitonic,
    make_loss,
    make_operator,
    topk_mask,
)
from topk_losses.kernels import VARIABLE

NAN = float("nan")
build = partial(TopKCrossEntropyLoss, p_k=[0.5, 0.5], num_classes=10)
SINGLE_K = [partial(make_loss, name) for name in ("smooth_topk", "truncated_entropy", "noised_topk")]
network, sinkhorn = partial(RelaxedNetwork, bitonic(4, 2), 1.0), partial(SinkhornSort, 3)
mask = partial(topk_mask, torch.randn(2, 6))
ZEROS = r"sparse_topk gives exactly 0 .* P_K\(1\) > 0 with top1_mode 'sm' or 'smce'"
CONSTRUCTIONS = [
    # the method and its settings
    (build, {"method": "splitter_selektion"}, "did you mean 'splitter_selection'"),
    (build, {"method": "softmax_cross_entropy"}, "no relaxed permutation matrix; build its loss with make_loss"),
    (build, {"distribution": "logistik"}, "did you mean 'logistic"),
    (build, {"method": "neuralsort", "distribution": "logistic"}, "distribution applies to relaxed networks"),
    (build, {"method": "softsort", "art_lambda": 0.5}, "art_lambda applies to"),
    (build, {"distribution": "cauchy", "art_lambda": 0.5}, "art_lambda applies to the distribution logistic_phi"),
    (build, {"art_lambda": 1.0}, "art_lambda must lie"),
    (build, {"inverse_temperature": 0}, "above 0"),
    (build, {"inverse_temperature": -1}, "above 0"),
    (build, {"inverse_temperature": float("inf")}, "finite"),
    (build, {"inverse_temperature": torch.ones(2)}, r"one floating-point number, of shape \(\)"),
    (build, {"inverse_temperature": torch.tensor(1)}, "one floating-point number"),
    (build, {"inverse_temperature": torch.tensor(-1.0)}, "inverse_temperature must be a finite number above 0"),
    (build, {"inverse_temperature": "automatic"}, "must be a number above 0"),
    (build, {"top1_mode": "smec"}, "did you mean 'smce'"),
    # P_K and m
    (build, {"p_k": [0.2, 0, 0, 0, 0.75]}, r"sum to 1, got \[0.2, 0, 0, 0, 0.75\] \(sum 0.95\)"),
    (build, {"p_k": [1.5, -0.5]}, "non-negative"),
    (build, {"p_k": [NAN, 1]}, "non-negative and sum to 1"),
    (build, {"p_k": []}, "shape"),
    (build, {"p_k": [0.1] * 9 + [0, 0.1]}, "mass on rank 11, but only 10 scores"),
    (build, {"p_k": [0.2] * 5, "m": 4}, "mass on rank 5, but only 4 scores"),
    (build, {"p_k": 0}, "p_k as a single k must be an integer of at least 1"),
    (build, {"p_k": 5.0}, r"must have shape \(K,\)"),
    (build, {"p_k": "0.5 0.5"}, "p_k must be .* as numbers, .* got '0.5 0.5'"),
    (build, {"p_k": {1, 5}}, "p_k must be .* as numbers"),
    (build, {"p_k": [[0.5, 0.5], [1.0]]}, "p_k must be .* as numbers"),
    (build, {"p_k": None}, "p_k must be .* as numbers, .* got None"),
    (build, {"p_k": {1: None}}, r"P_K\(1\) must be a number, got None"),
    (build, {"p_k": {0: 1.0}}, "k must be an integer"),
    (build, {"p_k": {1: 0.5, 5: 0.6}}, r"sum 1.1"),
    (build, {"p_k": torch.full((4, 2), 0.5)}, "num_classes=10 rows, got 4"),
    (build, {"p_k": [[0.5, 0.5]] * 12, "num_classes": None}, "needs num_classes=12"),
    (build, {"p_k": [1, 0, 0], "top1_mode": "sm"}, "nothing to sort"),
    (build, {"p_k": [1.0], "top1_mode": "smce"}, "nothing to sort"),
    (build, {"method": "sparse_topk", "p_k": 5}, ZEROS),
    (build, {"method": "sparse_topk", "top1_mode": "sort"}, ZEROS),
    (build, {"method": "sparse_topk", "p_k": [[0.5, 0.5], [0, 1]], "num_classes": 2}, ZEROS),
    (build, {"method": "perturbed_topk", "p_k": 5}, "perturbed_topk gives exactly 0"),
    (build, {"m": 1}, "m must be an integer of at least 2, got 1"),
    (build, {"m": 2.5}, "m must be"),
    (build, {"num_classes": 1}, "num_classes"),
    # what all losses have
    (build, {"reduction": "avg"}, "unknown reduction"),
    (build, {"soft_labels": "all"}, "unknown soft_labels"),
    (build, {"label_smoothing": 1.0}, "label_smoothing must lie"),
    (build, {"label_smoothing": None}, "label_smoothing must be a number, got None"),
    (build, {"inverse_temperature": [1.0]}, r"inverse_temperature must be a number, got \[1.0\]"),
    (build, {"weight": [None] * 10}, "weight must hold a number per class"),
    (build, {"weight": torch.ones(9)}, "weight must hold"),
    (build, {"weight": -torch.ones(10)}, "weight must hold"),
    (build, {"ignore_index": 1.5}, "ignore_index must be an integer"),
    (make_loss, {"method": "softmax_cross_entropy", "p_k": [0.5, 0.5]}, "all its mass on one entry"),
    (make_loss, {"method": "softmax_cross_entropy", "p_k": [0, 1]}, r"P_K = \[1, 0, ..\]"),
    (make_loss, {"method": "ldr_kl", "p_k": [0.5, 0.5]}, r"P_K = \[1, 0, ..\]"),
    (make_loss, {"method": "softmax_cross_entropy", "inverse_temperature": "auto"}, "methods with a temperature"),
    (make_loss, {"method": "truncated_entropy", "inverse_temperature": 1.0}, "inverse_temperature applies to"),
    (make_loss, {"method": "softmax_cross_entropy", "top1_mode": "sm"}, "top1_mode applies to"),
    (make_loss, {"method": "smooth_hard_topk", "top1_mode": "smce"}, "top1_mode applies to"),
    (make_loss, {"method": "smooth"}, "did you mean 'smooth"),
    (LDRKLLoss, {"soft_labels": "any"}, "LDRKLLoss has one true class"),
    (LDRKLLoss, {"margin": -1}, "margin must be a finite number >= 0, got -1"),
    *((loss, {"k": 0}, "k must be an integer of at least 1") for loss in (SmoothTopKLoss, SmoothHardTopKLoss)),
    (SmoothTopKLoss, {"k": 2.0}, "k must be an integer"),
    (SmoothTopKLoss, {"k": 2, "tau": 0}, "tau must be a finite number above 0"),
    (SmoothTopKLoss, {"k": 2, "tau": NAN}, "tau must be"),
    (SmoothTopKLoss, {"k": 2, "alpha": -1}, "alpha must be"),
    # operators
    (make_operator, {"method": "smooth_topk", "num_scores": 9, "k": 3}, "no relaxed permutation matrix"),
    (make_operator, {"method": "softsort", "num_scores": 9, "k": 10}, "n=9, got 10"),
    (make_operator, {"method": "softsort", "num_scores": "9", "k": 3}, "num_scores must be an integer .* got '9'"),
    (make_operator, {"method": "lml", "num_scores": 9, "k": 3, "inverse_temperature": "auto"}, 'for a loss "auto"'),
    (SparseTopK, {"k": 2, "inverse_temperature": 1.0, "p": 3}, "p must be 2 or 4/3, got 3"),
    (sinkhorn, {"inverse_temperature": 100.0, "tolerance": 0.0}, "tolerance must be"),
    (sinkhorn, {"inverse_temperature": 100.0, "max_iterations": 0}, "max_iterations must be"),
    (sinkhorn, {"inverse_temperature": NAN}, "inverse_temperature must be"),
    (network, {"distribution": "couchy"}, "did you mean 'cauchy'"),
    (network, {"distribution": "logistic", "art_lambda": 0.3}, "the distribution logistic_phi, not to logistic"),
    (mask, {"k": 7}, "the number of scores n=6, got 7"),
    (mask, {"k": 2.5, "method": "softsort"}, "needs lml, lapsum, .*, capped_softmax or soft_topk, not softsort"),
    (mask, {"k": 2, "method": "smooth_topk"}, "no relaxed permutation matrix"),
]
CONSTRUCTIONS += [(mask, {"k": k}, r"k must lie in \(0, n=6\]") for k in (0.0, 6.5, torch.tensor([1.0, 7.0]))]
CONSTRUCTIONS += [(each, {"n": 5, "k": k}, "k must be") for each in NETWORKS.values() for k in (0, 6, 2.0, True)]
CONSTRUCTIONS += [
    (each, {"n": n, "k": 1}, "the number of scores n must be") for each in NETWORKS.values() for n in (0, 5.0)
]
for each in SINGLE_K:
    CONSTRUCTIONS += [
        (each, {"p_k": [0.5, 0.5]}, "single k"),
        (each, {"num_classes": 5}, "k must be an integer between 1 and the number of scores n=4, got 5"),
        (each, {"soft_labels": "any"}, "has one true class; it knows no soft_labels='any'"),
    ]
for counts in ([1, 2], [1, 2, 3, 4, 5, 0], [[1] * 6]):
    noised = partial(NoisedTopKLoss, 2, num_classes=6)
    CONSTRUCTIONS += [(noised, {"class_counts": counts}, "class_counts must hold a finite number above 0 for each")]


@pytest.mark.parametrize(("construct", "options", "message"), CONSTRUCTIONS)
def test_settings_are_refused_with_a_sentence(construct, options, message):
    with pytest.raises(ValueError, match=message):
        construct(**options)


def test_an_unknown_argument_is_named_with_the_class():
    message = r"TopKCrossEntropyLoss.__init__\(\) got an unexpected keyword argument 'rduce'"
    with pytest.raises(TypeError, match=message):
        TopKCrossEntropyLoss(rduce="sum")


LOGITS, LABELS = torch.randn(4, 10), torch.zeros(4, dtype=torch.long)
plain, ANY = TopKCrossEntropyLoss, partial(build, "softsort", soft_labels="any")
CALLS = [
    (build, torch.zeros(4, 10, dtype=torch.long), LABELS, TypeError, "floating-point"),
    (build, torch.randn(4, 11), LABELS, ValueError, "num_classes=10 columns"),
    (build, torch.tensor(0.0), LABELS, ValueError, "a dimension for the classes"),
    (build, torch.randn(10), LABELS, ValueError, r"shape \(\)"),
    (build, LOGITS, LABELS[:3], ValueError, r"shape \(4,\)"),
    (build, LOGITS, [0, 0, 0, 0], TypeError, "labels must be a tensor, got list; .*torch.as_tensor"),
    (build, LOGITS.numpy(), LABELS, TypeError, "floating-point tensor, got ndarray; convert with torch.as_tensor"),
    (build, LOGITS, LABELS.int(), TypeError, r"int64 .* convert with labels.long\(\)"),
    (build, LOGITS, LABELS + 10, ValueError, r"\[0, 9\].*got 10 at position 0"),
    (build, LOGITS, LABELS - 1, ValueError, "got -1"),
    (build, LOGITS, torch.rand(4, 9), ValueError, "shape of the logits"),
    (build, LOGITS, LABELS.float(), ValueError, r"for class indices convert with labels.long\(\)"),
    (build, LOGITS, LABELS.unsqueeze(1), ValueError, r"labels.squeeze\(-1\)"),
    (build, LOGITS, torch.eye(10)[:4].bool(), TypeError, r"a column per class is .* soft_labels='any'"),
    (build, LOGITS, one_hot(LABELS, 10), ValueError, r"distribution \(labels.float\(\)\)"),
    (build, LOGITS, one_hot(LABELS, 10) * 3.0, ValueError, r"sum to 1.*soft_labels='any'.*a sum of 3 in row 0"),
    (build, LOGITS, torch.tensor([[1.5, -0.5] + [0.0] * 8] * 4), ValueError, "non-negative"),
    (ANY, LOGITS, torch.zeros(4, 10), ValueError, "at least one of them above 0; got a sum of 0 in row 0"),
    (ANY, LOGITS, one_hot(LABELS, 10) * 2.0, ValueError, r"entries in \[0, 1\]"),
    (partial(ANY, m=4), LOGITS, torch.ones(4, 10), ValueError, "m=4 scores cannot hold 10 right answers"),
    (partial(ANY, label_smoothing=0.1), LOGITS, torch.ones(4, 10), ValueError, "neither weight nor label_"),
    (partial(plain, weight=torch.ones(11)), LOGITS, LABELS, ValueError, "weight holds 11 numbers, but .* 10"),
    (partial(NoisedTopKLoss, 2, class_counts=[1] * 9), LOGITS, LABELS, ValueError, "class_counts holds 9 .* 10"),
    (partial(plain, p_k=12), LOGITS, LABELS, ValueError, "p_k reaches rank 12, but only 10 scores are sorted"),
    *((each, LOGITS[:, :5], LABELS, ValueError, "between 1 and the number of scores n=4, got 5") for each in SINGLE_K),
]


@pytest.mark.parametrize(("construct", "logits", "labels", "error", "message"), CALLS)
def test_inputs_of_a_loss_are_refused_with_a_sentence(construct, logits, labels, error, message):
    loss = construct()
    with pytest.raises(error, match=message):
        loss(logits, labels)


@pytest.mark.parametrize(
    ("p_k", "error", "message"),
    [
        ([[0.5, 0.5]] * 4, TypeError, "must be a tensor, got list; convert with torch.as_tensor"),
        (torch.full((3, 3), 1 / 3), ValueError, r"shape \(4, 'K'\)"),
        (torch.full((4, 11), 1 / 11), ValueError, "the length of p_k"),
        (torch.tensor([[0.5, 0.5], [1, 0], [1, 1], [0, 1]]), ValueError, r"sum to 1.*in row 2"),
        (torch.tensor([[0.5, 0.5]] * 3 + [[0, 1.0]]), ValueError, "sparse_topk gives exactly 0"),
    ],
)
def test_a_p_k_per_sample_is_refused_with_a_sentence(p_k, error, message):
    with pytest.raises(error, match=message):
        build("sparse_topk")(LOGITS, LABELS, p_k=p_k)


@pytest.mark.parametrize("backend", ["torch", ""])
@pytest.mark.parametrize("method", RELAXED)
def test_inputs_of_an_operator_are_refused_with_a_sentence(method, backend, monkeypatch):
    """Before a kernel reads beyond its arrays."""
    monkeypatch.setenv(VARIABLE, backend)
    operator, logits, labels = make_operator(method, 9, 3), torch.randn(4, 9), torch.zeros(4, dtype=torch.long)
    fewer, refusal = (8, "built for n=9 scores, got 8") if method in NETWORKS else (2, "n=2, got 3")
    for bad_logits, bad_labels, error, sentence in (
        (logits.long(), labels, TypeError, "floating-point"),
        (logits[:, :fewer], labels, ValueError, refusal),
        (logits, labels[:3], ValueError, "shape"),
        (logits, -torch.ones(4, 9), ValueError, "entries in"),
        *((logits, labels + bad, ValueError, rf"\[0, 8\], got {bad} at position 0") for bad in (-100, -1, 9, 2**40)),
    ):
        with pytest.raises(error, match=sentence):
            operator.rank_probabilities(bad_logits, bad_labels)
    with pytest.raises(ValueError, match="shape"):
        operator.permutation_matrix(torch.tensor(0.0))
