"""A method that is another one without an argument warns where it lacks it, and nowhere else."""

import inspect
import warnings

import pytest
import torch

from experiments.common.objective import build_loss
from topk_losses import METHODS, make_loss

TAKE_COUNTS = [
    name
    for name, method in METHODS.items()
    if method.loss is not None and "class_counts" in inspect.signature(method.loss).parameters
]
CONFIG = {"inverse_temperature": None}


def warnings_of(build):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return [str(item.message) for item in caught]


def test_some_methods_take_counts():
    assert {"noised_topk", "imbalanced_noised_topk"} <= {*TAKE_COUNTS}


@pytest.mark.parametrize("method", TAKE_COUNTS)
def test_a_method_that_is_named_for_its_counts_warns_without_them(method):
    messages = warnings_of(lambda: make_loss(method, p_k=3))
    assert len(messages) == ("imbalanced" in method)
    assert all("without class_counts treats all classes alike" in message for message in messages)
    assert len(warnings_of(lambda: make_loss(method, p_k=3, class_counts=None))) == len(messages)
    assert warnings_of(lambda: make_loss(method, p_k=3, class_counts=[5, 1, 1, 1])) == []


@pytest.mark.parametrize("method", TAKE_COUNTS)
def test_scripts_count_the_classes_themselves(method):
    """Until they have, all are alike."""
    assert warnings_of(lambda: build_loss({"method": method} | CONFIG, 7, torch.device("cpu"))) == []
