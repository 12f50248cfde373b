"""Error rates of readings, on beams that are given."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.cmudict import END, WordSplit, padded
from experiments.common import reading_metrics
from experiments.common.reading_metrics import edit_distance, error_rates, nearest, token_accuracies
from models.beam_search import Beam

CPU = torch.device("cpu")
READINGS = [[(1, 2, 3)], [(4,), (4, 5)], [(2, 2)]]
SPLIT = WordSplit(torch.ones(3, 1, dtype=torch.int64), READINGS)


@cache
def by_definition(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    if not first or not second:
        return len(first) + len(second)
    if first[0] == second[0]:
        return by_definition(first[1:], second[1:])
    pairs = ((first[1:], second), (first, second[1:]), (first[1:], second[1:]))
    return 1 + min(by_definition(*pair) for pair in pairs)


SEQUENCE = st.lists(st.integers(1, 3), max_size=6).map(tuple)


@given(SEQUENCE, SEQUENCE)
def test_edit_distance(first, second):
    assert edit_distance(first, second) == by_definition(first, second)


def test_the_nearest_reading_is_the_one_with_the_smallest_rate():
    assert nearest((1, 9, 9, 9), [(1, 2), (1, 2, 2, 2, 2)]) == (4, 5)
    assert nearest((), [(1,), (1, 2)]) == (1, 1)


class GivenBeams:
    """Stands for a network whose beam search is known."""

    def __init__(self, hypotheses: list[list[list[int]]], right: list[list[int]]) -> None:
        self.hypotheses, self.right = hypotheses, right

    def encode(self, letters):
        return letters

    def forced(self, encoded, phonemes):
        return torch.nn.functional.one_hot(torch.tensor(self.right), 6).float()


@pytest.fixture
def model(monkeypatch):
    # Right at once; the other reading; wrong by two of two, but right in second place.
    hypotheses = [[[1, 2, 3], [1, 2]], [[4, 5], [5]], [[1], [2, 2]]]
    given = GivenBeams(hypotheses, [[1, 2, 3, END], [4, END, 1, 1], [2, 3, END, END]])

    def beam_search(model, encoded, K, max_steps):
        rows = [padded([*each, [END] * 4])[:K] for each in model.hypotheses]
        return Beam(torch.stack(rows), torch.zeros(len(rows), K))

    monkeypatch.setattr(reading_metrics, "beam_search", beam_search)
    return given


def test_any_reading_counts_and_the_beam_may_hold_it_further_down(model):
    assert error_rates(model, SPLIT, 1, CPU) == pytest.approx({"per": 2 / 7, "wer": 1 / 3, "gold": 2 / 3})
    assert error_rates(model, SPLIT, 2, CPU) == pytest.approx({"per": 2 / 7, "wer": 1 / 3, "gold": 1.0})


def test_accuracy_by_position_counts_up_to_the_end_of_the_first_reading(model):
    """First readings 1 2 3 end, 4 end, 2 2 end; greedily 1 2 3 end, 4 5 .., 1 end .."""
    found = token_accuracies(model, SPLIT, CPU)
    assert found["forced"] == pytest.approx([1.0, 2 / 3, 1.0, 1.0])
    assert found["free"] == pytest.approx([2 / 3, 1 / 3, 1.0, 1.0])
