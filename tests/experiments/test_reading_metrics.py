"""Edit distances, and the nearest of several readings; test_oracle_train_beam_search.py has the error rates."""

from functools import cache

import torch
from hypothesis import given
from hypothesis import strategies as st

from data.cmudict import END, WordSplit
from experiments.train_beam_search import MAX_STEPS, edit_distance, error_rates, nearest
from models.beam_search import beam_search
from models.encoder_decoder import EncoderDecoder


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


def test_any_reading_counts():
    torch.manual_seed(0)
    model, letters = EncoderDecoder(5, 4, hidden_dim=3), torch.tensor([[1, 2], [3, 4]])
    model.scores.bias.data[END] = -99.0  # no hypothesis ends
    found = beam_search(model, model.encode(letters), 1, MAX_STEPS).phonemes[:, 0].tolist()
    readings = [[(1, 1, 1), tuple(phonemes)] for phonemes in found]
    both, first = (WordSplit(letters, several) for several in (readings, [several[:1] for several in readings]))
    assert error_rates(model, both, 1, torch.device("cpu")) == {"per": 0, "wer": 0, "gold": 1}
    assert error_rates(model, first, 1, torch.device("cpu"))["wer"] == 1
