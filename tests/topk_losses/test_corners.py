"""Corners of all methods: mask values, second derivatives, checks in compiled code, default types, few scores."""

import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import one_hot, pad

from tests.methods import (
    DETERMINISTIC,
    MODES,
    RELAXED,
    WITH_MODES,
    p_k_of,
    random_batch,
    value_and_gradient,
    with_backends,
)
from topk_losses import (
    METHODS,
    RELAXATIONS,
    ForwardCorrectionLoss,
    TopKCrossEntropyLoss,
    make_loss,
    make_operator,
    soft_topk_values,
    topk_mask,
)
from topk_losses.kernels import VARIABLE

INF = float("inf")

# Mask values: large finite numbers instead of -inf.

DEPTHS = [
    (dtype, value) for dtype in (torch.float32, torch.float64) for value in (-1e12, -1e17, -1e18, -1e20, -1e25, -1e30)
]
DEPTHS += [(dtype, torch.finfo(dtype).min) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize("num_masked", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "value"), DEPTHS)
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_large_finite_mask_is_as_good_as_minus_a_billion_or_infinity(method, dtype, value, num_masked):
    """In value and gradient. The two differ where the number of classes counts, from -1e18 on those of -inf."""
    logits, labels = random_batch(6, 12, dtype=dtype)
    labels = labels % (12 - num_masked)
    loss = make_loss(method, p_k_of(method, 3), reduction="none")
    results = {}
    for mask in (-1e9, -INF, value):
        masked = logits.clone()
        masked[:, 12 - num_masked :] = mask
        results[mask] = torch.cat([part.flatten() for part in value_and_gradient(loss, masked, labels)])
    assert bool(results[value].isfinite().all())
    slack = 1e-4 if dtype == torch.float32 else 1e-6
    errors = [float((results[value] - results[mask]).abs().max()) for mask in (-1e9, -INF)]
    if method == "nce_rce" and value > -1e18:  # whose sum over the classes is of the mask's size
        return
    assert min(errors) < slack * max(1.0, float(results[-INF].abs().max()))


@pytest.mark.parametrize("value", [-1e9, -1e18, -1e20, torch.finfo(torch.float32).min])
def test_whitening_leaves_mask_values_out_however_many_there_are(value):
    logits, labels = random_batch(6, 12, dtype=torch.float32)
    loss = make_loss("soft_topk", {1: 0.5, 2: 0.5}, reduction="none")
    for num_masked in (1, 3, 6, 9):
        label = labels % (12 - num_masked)
        masked = logits.clone()
        masked[:, 12 - num_masked :] = value
        want = loss(logits[:, : 12 - num_masked], label)
        torch.testing.assert_close(loss(masked, label), want, rtol=5e-2, atol=5e-2)  # each takes a little of k


# Second derivatives.

KINDS = [(*case, kind) for case in WITH_MODES for kind in ("labels", "mixed", "dense", "smoothed")]
KINDS += [(*case, "any") for case in MODES]
KINDS += [(*case, "corrected") for case in MODES if case[1] != "smce"]


@pytest.mark.parametrize("m", [None, 8])
@pytest.mark.parametrize(("method", "top1_mode", "kind"), KINDS)
def test_second_derivatives_are_differences_of_the_first(method, top1_mode, kind, m):
    p_k = [0.5, 0, 0.2, 0.3] if method in RELAXED else p_k_of(method, 3)
    settings = {"smoothed": {"label_smoothing": 0.2}, "any": {"soft_labels": "any"}, "corrected": {"noise_rate": 0.3}}
    loss = make_loss(method, p_k, None, m, top1_mode=top1_mode, **settings.get(kind, {}))
    logits, labels = random_batch(3, 12, seed=7)  # no two scores so close that a network's slope is that of a root
    one = one_hot(labels, 12).double()
    targets = {"mixed": 0.7 * one + 0.3 * one.roll(1, 1), "dense": random_batch(3, 12, seed=1)[0].softmax(1)}
    targets["any"] = one + one.roll(1, 1)
    call = partial(loss, labels=targets.get(kind, labels))
    direction = random_batch(3, 12, 1.0, seed=2)[0]

    def slope(step):
        return value_and_gradient(call, logits + step * direction)[1]

    leaf = logits.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad((first * direction).sum(), leaf)
    h = 1e-5
    if METHODS[method].family == "networks":
        h = 1e-7  # where two values nearly meet the slope of ART changes fast: the error falls with the square of h
    want = (slope(h) - slope(-h)) / (2 * h)
    torch.testing.assert_close(product, want, rtol=1e-5, atol=1e-7 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 50.0, 88.0, 100.0, 700.0, 720.0, 1e4])
def test_second_derivatives_are_finite_however_far_the_classes_lie(gap, dtype):
    logits = torch.zeros(3, 12, dtype=dtype)
    logits[:, 0] = gap
    labels = torch.tensor([0, 1, 5])
    losses = [ForwardCorrectionLoss(0.2), make_loss("ldr_kl", margin=1.0, label_smoothing=0.2)]
    losses += [make_loss("truncated_entropy", 3, label_smoothing=0.2)]
    losses += [make_loss(method, [0.5, 0.5], noise_rate=0.3) for method in RELAXED]
    for loss in losses:
        leaf = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        assert bool(second.isfinite().all())


# Checks that hold in compiled code and under torch.func.

LOGITS, LABELS = random_batch(4, 5, dtype=torch.float32)
FEW = torch.tensor([[0.0, 1, 1, 1, 1]] * 4)
WRONG_P_K = torch.tensor([[0.5, 0.6]] * 4)
CERTAIN = torch.tensor([[0.5, 0, 0, 0, 0.5]] * 3 + [[0.0, 0, 0, 0, 1]])
WRONG = {
    "more answers than m": ({"m": 3, "soft_labels": "any"}, (LOGITS, FEW), "cannot hold"),
    "as many answers as m": ({"m": 4, "soft_labels": "any"}, (LOGITS, FEW), "cannot hold"),
    "a P_K of rank n alone": ({}, (LOGITS, LABELS, CERTAIN), "mass below rank 5|all its mass on rank 5"),
    "no answer": ({"soft_labels": "any"}, (LOGITS, torch.zeros(4, 5)), "at least one of them above 0"),
    "no distribution": ({}, (LOGITS, FEW), "sum to 1"),
    "a label out of range": ({}, (LOGITS, LABELS + 5), r"labels must lie in \[0, 4\]"),
    "a label below": ({"m": 3}, (LOGITS, LABELS - 7), r"labels must lie in \[0, 4\]"),
    "no P_K": ({}, (LOGITS, LABELS, WRONG_P_K), "p_k must be non-negative and sum to 1"),
    "a temperature below 0": ({"inverse_temperature": torch.tensor(-1.0)}, (LOGITS, LABELS), "above 0"),
}


def with_parameter(settings):
    """A learned temperature that an optimizer has brought below 0."""
    if "inverse_temperature" not in settings:
        return make_loss("softsort", {1: 0.5, 2: 0.5}, **settings)
    loss = make_loss("softsort", {1: 0.5, 2: 0.5}, inverse_temperature=torch.nn.Parameter(torch.tensor(1.0)))
    with torch.no_grad():
        loss.inverse_temperature.copy_(settings["inverse_temperature"])
    return loss


@pytest.mark.parametrize("way", ["eager", "compiled", "grad", "vmap"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_refused_wherever_the_loss_runs(name, way):
    settings, inputs, message = WRONG[name]
    loss = with_parameter(settings)
    torch._dynamo.reset()
    calls = {
        "eager": loss,
        "compiled": torch.compile(loss, backend="aot_eager", fullgraph=True),
        "grad": grad(loss),
        "vmap": vmap(loss),
    }
    with pytest.raises(Exception, match=message):
        calls[way](*inputs)


@pytest.mark.parametrize("way", ["compiled", "grad", "vmap"])
@pytest.mark.parametrize("kind", ["labels", "any", "dense", "p_k"])
def test_checks_change_nothing_where_inputs_are_right(kind, way):
    targets = {"any": (LOGITS > 0) | one_hot(LABELS, 5).bool(), "dense": LOGITS.softmax(1)}
    loss = make_loss("lml", {1: 0.5, 2: 0.5}, soft_labels="any" if kind == "any" else "expected", reduction="sum")
    inputs = [LOGITS, targets.get(kind, LABELS)]
    if kind == "p_k":
        inputs.append(torch.tensor([[0.4, 0.6]] * 4))
    want, gradient = value_and_gradient(loss, *inputs)
    torch._dynamo.reset()
    if way == "compiled":
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(value_and_gradient(compiled, *inputs), (want, gradient))
    elif way == "grad":
        torch.testing.assert_close(grad(loss)(*inputs), gradient)
    else:
        torch.testing.assert_close(vmap(loss)(*inputs).sum(), want)


# PyTorch's default type decides nothing.


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["labels", "masked", "corrected"])
@pytest.mark.parametrize("method", DETERMINISTIC)
def test_the_default_type_of_pytorch_changes_no_number(method, kind, default):
    if kind == "corrected" and method not in RELAXATIONS:
        kind = "labels"
    for dtype in (torch.float32, torch.float64):
        logits, labels = random_batch(6, 12, dtype=dtype)
        if kind == "masked":
            logits[:, 7] = -INF
            labels = labels.clamp(max=6)
        build = partial(make_loss, method, p_k_of(method, 3), **({"noise_rate": 0.3} if kind == "corrected" else {}))
        want = value_and_gradient(build(), logits, labels)
        torch.set_default_dtype(default)
        try:
            for loss in (build(), build(label_smoothing=0.0)):
                torch.testing.assert_close(value_and_gradient(loss, logits, labels), want, rtol=1e-12, atol=1e-12)
        finally:
            torch.set_default_dtype(torch.float32)


def test_float64_is_exact_where_integers_are_divided():
    logits, labels = random_batch(6, 7)
    logits[:, 6] = -INF
    labels = labels.clamp(max=5)
    want = -(0.8 * logits.softmax(1).gather(1, labels.unsqueeze(1)) + 0.2 / 6).log().mean()
    torch.testing.assert_close(ForwardCorrectionLoss(0.2)(logits, labels), want, rtol=1e-14, atol=0)


NUMBERS = [1 + j / 7 for j in range(12)]  # no float32 numbers
PER_CLASS = {
    "weight": partial(make_loss, "softmax_cross_entropy"),
    "class_counts": partial(make_loss, "imbalanced_noised_topk", 3),
}


@pytest.mark.parametrize("kind", [list, tuple, np.array])
@pytest.mark.parametrize("name", PER_CLASS)
def test_numbers_per_class_that_are_no_tensor_keep_their_digits(name, kind):
    logits, labels = random_batch(6, 12)
    losses = []
    for value in (kind(NUMBERS), torch.tensor(NUMBERS, dtype=torch.float64)):
        loss = PER_CLASS[name](**{name: value})
        loss.generator = torch.Generator().manual_seed(0)
        losses.append(loss(logits, labels))
    assert torch.equal(*losses)


# Two ways to one number.


@pytest.mark.parametrize("n", [3, 13, 40])
@pytest.mark.parametrize(("method", "top1_mode"), MODES)
def test_the_loss_of_one_answer_is_that_of_the_label(method, top1_mode, n):
    """Columns of NeuralSort and SoftSort may sum to more than 1, which both ways treat alike."""
    logits = torch.linspace(3, -3, n, dtype=torch.float64).expand(n, n).clone()
    logits = logits + random_batch(n, n, 0.3)[0]
    labels = torch.arange(n)
    build = partial(TopKCrossEntropyLoss, method, {1: 0.3, 2: 0.2, 3: 0.5}, top1_mode=top1_mode, reduction="none")
    for beta in (0.2, 1.0, 3.0):
        want = value_and_gradient(build(inverse_temperature=beta), logits, labels)
        loss = build(inverse_temperature=beta, soft_labels="any")
        torch.testing.assert_close(value_and_gradient(loss, logits, one_hot(labels, n)), want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", RELAXED)
def test_masked_columns_take_no_part_in_any_function(method):
    """Indicators, values and the matrix are those of the other columns, as the loss is."""
    x = random_batch(5, 12)[0]
    is_masked = torch.zeros(5, 12, dtype=torch.bool)
    for row in range(5):
        is_masked[row, [row, row + 1, 11 - row]] = True
    functions = [
        (lambda x: topk_mask(x, 3, method), lambda got: got[~is_masked].view(5, 9)),
        (lambda x: make_operator(method).permutation_matrix(x, 3), lambda got: got.mT[~is_masked].view(5, 9, 3).mT),
    ]
    if make_operator(method).sums_to_k:
        functions.append((lambda x: soft_topk_values(x, 3, method), lambda got: got))
    masked = x.masked_fill(is_masked, -INF)
    for function, unmasked in functions:
        torch.testing.assert_close(unmasked(function(masked)), function(x[~is_masked].view(5, 9)))


# Few scores.


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(("method", "top1_mode", "backend"), with_backends(WITH_MODES))
def test_float32_has_the_digits_of_float64_for_few_scores(method, top1_mode, n, backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, backend)
    ks = {1: 0.5, 2: 0.5} if method in RELAXATIONS else p_k_of(method, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*whitens the scores")
        loss = make_loss(method, ks, top1_mode=top1_mode, reduction="none")
    for scale, num_masked in ((0.3, 0), (2.0, 0), (6.0, 0), (2.0, 60)):
        logits, labels = random_batch(200, n, scale, torch.float32, seed=n)
        logits = pad(logits, (0, num_masked), value=-torch.inf)
        got, gradient = value_and_gradient(loss, logits, labels)
        want, want_gradient = value_and_gradient(loss, logits.double(), labels)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        if METHODS[method].family != "networks":  # whose slope near a tie is that of a root
            torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-3, atol=1e-3)


# Numba that is installed and cannot be imported, and systems without fork.

PROGRAM = """
import os, sys, warnings
import torch
def compute():
    from topk_losses import make_loss
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = make_loss("splitter_selection")(torch.arange(12.0).view(2, 6), torch.tensor([5, 2]))
    return loss.item(), sum("its import fails" in str(warning.message) for warning in caught)
for name, prepare in CASES.items():
    child = os.fork()  # before the library is loaded: each case has a process of its own, and PyTorch is loaded once
    if not child:
        exec(prepare)
        print(name, *compute(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
WITHOUT_NUMBA = ("ImportError", "SystemError", "AttributeError")


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """The loss and the number of warnings, for a Numba that raises each of these errors, no fork, and PyTorch alone."""
    cases = {"torch": f"os.environ[{VARIABLE!r}] = 'torch'", "no fork": "del os.register_at_fork"}
    for error in WITHOUT_NUMBA:
        package = tmp_path_factory.mktemp(error) / "numba"
        package.mkdir()
        (package / "__init__.py").write_text(f"raise {error}('Numba needs NumPy 2.2 or less')\n")
        cases[error] = f"sys.path.insert(0, {str(package.parent)!r})"
    command = [sys.executable, "-c", f"CASES = {cases!r}\n{PROGRAM}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    return {name: (float(loss), int(num_warnings)) for name, loss, num_warnings in found}


@pytest.mark.parametrize("error", WITHOUT_NUMBA)
def test_a_numba_that_raises_leaves_the_work_to_pytorch(error, computed):
    loss, num_warnings = computed[error]
    assert num_warnings == 1
    assert loss == pytest.approx(computed["torch"][0], rel=1e-5)


def test_numba_computes_where_there_is_no_fork(computed):
    pytest.importorskip("numba")
    loss, num_warnings = computed["no fork"]
    assert num_warnings == 0
    assert loss == pytest.approx(computed["torch"][0], rel=1e-5)
