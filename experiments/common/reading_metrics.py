"""How well words are read: error rates of beam search, any reading counting, and token accuracy by position."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from data.cmudict import END, Reading, WordSplit
from models.beam_search import beam_search
from models.encoder_decoder import EncoderDecoder

BEAMS = (1, 4, 8)
MAX_STEPS = 30  # no reading of CMUdict is longer
# Words at once, on which no result depends.
EVAL_BATCH = 500


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """The fewest insertions, deletions and replacements that make one the other."""
    row = list(range(len(second) + 1))
    for number, left in enumerate(first, start=1):
        above, row = row, [number]
        for place, right in enumerate(second, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (left != right)))
    return row[-1]


def nearest(hypothesis: Reading, readings: Sequence[Reading]) -> tuple[int, int]:
    """Edit distance to the reading for which it is the smallest share of its phonemes, and their number."""
    distances = ((edit_distance(hypothesis, reading), len(reading)) for reading in readings)
    return min(distances, key=lambda pair: pair[0] / pair[1])


@torch.no_grad()
def error_rates(model: EncoderDecoder, split: WordSplit, beam_size: int, device: torch.device) -> dict[str, float]:
    """Shares in beam search's result: per (phonemes to be edited / phonemes), wer (words whose best hypothesis is no
    reading), gold (words of which some hypothesis is a reading)."""
    edits = phonemes = wrong = in_beam = 0
    for begin in range(0, len(split), EVAL_BATCH):
        letters = split.letters[begin : begin + EVAL_BATCH].to(device)
        beam = beam_search(model, model.encode(letters), beam_size, MAX_STEPS)
        for found, readings in zip(beam.phonemes.tolist(), split.readings[begin : begin + EVAL_BATCH]):
            hypotheses = [tuple(beam[: beam.index(END)] if END in beam else beam) for beam in found]
            distance, length = nearest(hypotheses[0], readings)
            edits, phonemes = edits + distance, phonemes + length
            wrong += hypotheses[0] not in readings
            in_beam += any(hypothesis in readings for hypothesis in hypotheses)
    return {"per": edits / phonemes, "wer": wrong / len(split), "gold": in_beam / len(split)}


@torch.no_grad()
def token_accuracies(model: EncoderDecoder, split: WordSplit, device: torch.device) -> dict[str, list[float]]:
    """Share of right phonemes (the end counted) at each position of the first readings: "forced", the right ones
    before it given, and "free", after the model's own, of beam 1. Where they part is exposure bias."""
    phonemes = split.first_readings()
    T = phonemes.shape[1]
    counted = torch.cat([torch.ones(len(phonemes), 1, dtype=torch.bool), phonemes[:, :-1] != END], dim=1)
    hits = {"forced": torch.zeros(T), "free": torch.zeros(T)}
    for begin in range(0, len(split), EVAL_BATCH):
        batch = slice(begin, begin + EVAL_BATCH)
        letters, right = split.letters[batch].to(device), phonemes[batch]
        encoded = model.encode(letters)
        free = pad(beam_search(model, encoded, 1, T).phonemes[:, 0], (0, T), value=END)
        forced = model.forced(encoded, right.to(device)).argmax(2)
        for name, found in (("forced", forced), ("free", free[:, :T])):
            hits[name] += ((found.cpu() == right) & counted[batch]).sum(0)
    return {name: (number / counted.sum(0)).tolist() for name, number in hits.items()}
