"""Training through beam search has the figures of a plain loop, whose beam is a list of one word's hypotheses.

Then what error rates are made of: edit distances, and the nearest of several readings.
"""

import copy
import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import nll_loss

from data.cmudict import END, WordSplit, load_words
from data.splits import epoch_order
from experiments import train_beam_search as script
from models.beam_search import beam_search
from models.encoder_decoder import EncoderDecoder
from tests.experiments.oracle import check_history, history_of, run
from topk_losses import make_loss, make_operator

K = 3
BATCH = 16
SEED = 1
PRETRAIN = 40
UPDATES = 5
EVERY = 5
FLAGS = (
    f"--dataset reversal --max_letters 4 --hidden_dim 12 --batch_size {BATCH} --beam_size {K} --seed {SEED} "
    f"--pretrain_updates {PRETRAIN} --pretrain_lr .02 --n_updates {UPDATES} --lr .005 --eval_freq {EVERY} "
)


def beam_of(model, letters, size, right=None):
    """Yield the candidates (Q V,) of each step of one word's beam, the place of the right one, and what is kept.

    right: the phonemes of a reading, which then stays in the beam; else it goes on until every hypothesis has ended.
    """
    V = model.num_phonemes
    encoded = model.encode(letters.unsqueeze(0))
    beam = [((), torch.zeros(()), encoded.state)]  # phonemes, score, state
    gold = 0
    for step in range(len(right) if right else 30):
        candidates = []
        for phonemes, score, state in beam:
            if phonemes and phonemes[-1] == END:
                scores = torch.where(torch.arange(V) == END, score, -torch.inf)
                candidates += [((*phonemes, p), scores[p], state) for p in range(V)]
                continue
            last = torch.tensor([[phonemes[-1] if phonemes else END]])
            after = model.advance(model.phonemes(last), state.view(1, 1, -1))
            log_probs = model.log_probs(after, encoded)[0, 0]
            candidates += [((*phonemes, p), score + log_probs[p], after) for p in range(V)]
        kept = sorted(range(len(candidates)), key=lambda place: -candidates[place][1].item())[:size]
        place = None
        if right:
            place = gold * V + right[step]
            kept = kept if place in kept else [*kept[:-1], place]
            gold = kept.index(place)
        beam = [candidates[place] for place in kept]
        yield torch.stack([score for _, score, _ in candidates]), place, [phonemes for phonemes, _, _ in beam]
        if right is None and all(phonemes[-1] == END for phonemes, _, _ in beam):
            return


@cache
def edits(a, b):
    """The fewest insertions, deletions and replacements from one sequence to another."""
    if not a or not b:
        return len(a) + len(b)
    return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))


@torch.no_grad()
def rates(model, split, size):
    """Errors of beam search on a split whose words have one reading each."""
    distance = wrong = held = 0
    for letters, (reading,) in zip(split.letters, split.readings):
        *_, (_, _, found) = beam_of(model, letters, size)
        found = [tuple(p for p in phonemes if p != END) for phonemes in found]
        distance = distance + edits(found[0], reading)
        wrong = wrong + (found[0] != reading)
        held += reading in found
    phonemes = sum(len(reading) for (reading,) in split.readings)
    return {"per": distance / phonemes, "wer": wrong / len(split), "gold": held / len(split)}


def soft_probabilities(model, letters, reading):
    """The probability of each phoneme of a reading in the best hypothesis of one word's soft beam at its end."""
    V = model.num_phonemes
    encoded = model.encode(letters.unsqueeze(0))
    states = encoded.state.unsqueeze(1)
    inputs = model.phonemes(torch.tensor([[END]]))
    scores = torch.zeros(1)
    ended = torch.zeros(1)
    choices = []
    only_end = (torch.arange(V) == END).float()
    for _ in reading:
        after = model.advance(inputs, states)
        probabilities = model.log_probs(after, encoded)[0].exp()  # (Q, V)
        mixed = [end * only_end + (1 - end) * row for end, row in zip(ended, probabilities)]
        candidates = torch.cat([score + (row + 1e-30).log() for score, row in zip(scores, mixed)])
        weights = make_operator("softsort").permutation_matrix(candidates.unsqueeze(0), K, 1.0)[0].view(K, -1, V)
        choices.append(weights)
        scores = torch.stack([(row.flatten() * candidates).sum() for row in weights])
        inputs = torch.stack([(row.sum(0).unsqueeze(1) * model.phonemes.weight).sum(0) for row in weights]).unsqueeze(0)
        states = torch.stack([(row.sum(1).unsqueeze(1) * after[0]).sum(0) for row in weights]).unsqueeze(0)
        ended = weights[:, :, END].sum(1).clamp(0, 1)
    found = []
    share = torch.eye(K)[0]  # of each hypothesis in the best one
    for weights, phoneme in zip(reversed(choices), reversed(reading)):
        traced = sum(part * row for part, row in zip(share, weights))  # (Q, V)
        found.append(traced[:, phoneme].sum())
        share = traced.sum(1)
    return torch.stack(found[::-1])


def soft_beam_loss(model, word, reading):
    """The sum of -log q over the phonemes and the end of a reading."""
    q = soft_probabilities(model, word, reading).clamp(0, 1)
    return -(q * (1 - 2e-7) + 1e-7).log().sum()


def batch_loss(model, letters, readings, loss_fn):
    """The mean of -log p over the phonemes and ends; with a loss_fn 0.3 times that, and the loss in the beam."""
    total = torch.zeros(())
    count = sum(map(len, readings))
    cross_entropy = torch.zeros(())
    for word, reading in zip(letters, readings):
        encoded = model.encode(word.unsqueeze(0))
        log_probs = model.forced(encoded, torch.tensor([reading]))[0]
        cross_entropy = cross_entropy + nll_loss(log_probs, torch.tensor(reading), reduction="sum") / count
        if loss_fn is soft_beam_loss:
            total = total + soft_beam_loss(model, word, reading) / count
            continue
        for candidates, place, _ in beam_of(model, word, K, reading) if loss_fn else ():
            total = total + loss_fn(candidates.unsqueeze(0), torch.tensor([place])) / count
    return total + 0.3 * cross_entropy if loss_fn else cross_entropy


def fit(model, words, loss_fn, before, updates, lr):
    """Take the updates, and return what a validation after every EVERY of them finds."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    letters, phonemes = words.train.pairs()
    readings = [[*(p for p in row if p != END), END] for row in phonemes.tolist()]
    found = []
    losses = []
    for update in range(updates):
        epoch, place = divmod(before + update, len(letters) // BATCH)
        chosen = epoch_order(len(letters), SEED, epoch)[place * BATCH : (place + 1) * BATCH].tolist()
        loss = batch_loss(model, letters[chosen], [readings[word] for word in chosen], loss_fn)
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * update / updates)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (update + 1) % EVERY == 0:
            found.append({"update": update + 1, "train_loss": sum(losses[-EVERY:]) / EVERY})
            found[-1] |= {f"valid_{name}": value for name, value in rates(model, words.valid, K).items()}
    return found


@pytest.fixture(scope="module")
def pretrained():
    """The words, a model that cross-entropy has trained, and what its validations found."""
    words = load_words("reversal", 4)
    torch.manual_seed(SEED)
    model = EncoderDecoder(words.num_letters, len(words.symbols), 12)
    return words, model, fit(model, words, None, 0, PRETRAIN, 0.02)


ARMS = ["cross_entropy --method softmax_cross_entropy", "retain --method softsort", "soft_beam --method softsort"]


@pytest.mark.parametrize("arm", ARMS)
def test_the_figures_are_those_of_a_plain_training_loop(arm, pretrained, results, monkeypatch):
    monkeypatch.setenv("TOPK_LOSSES_BACKEND", "torch")  # kernels would take longer to compile
    (row,) = run(script, FLAGS + f"--arm {arm}", results)
    words, model, found = copy.deepcopy(pretrained)
    check_history(history_of(results, {"run_id": row["pretrained"]}, "update"), found)
    loss_fn = None
    if row["arm"] == "soft_beam":
        loss_fn = soft_beam_loss
    if row["arm"] == "retain":  # half of P_K on the best candidate, half on those that stay
        assert int(row["m"]) > model.num_phonemes  # the first step has fewer candidates than m, the others more
        settings = {"m": int(row["m"]), "inverse_temperature": 0.5, "top1_mode": "sm"}
        loss_fn = make_loss("softsort", [0.5, 0, 0.5], **settings, reduction="sum")
    expected = fit(model, words, loss_fn, PRETRAIN, UPDATES, 0.005)
    check_history(history_of(results, row, "update"), expected)
    found = {size: rates(model, words.test, size) for size in (1, 4)}
    for size in found:
        for name, value in found[size].items():
            assert float(row[f"test_{name}_beam{size}"]) == pytest.approx(value, rel=1e-6)
    assert found[4]["gold"] > found[1]["gold"]  # a beam that is wider holds more


SEQUENCE = st.lists(st.integers(1, 3), max_size=6).map(tuple)


@given(SEQUENCE, SEQUENCE)
def test_edit_distance(first, second):
    assert script.edit_distance(first, second) == edits(first, second)


def test_the_nearest_reading_is_the_one_with_the_smallest_rate():
    assert script.nearest((1, 9, 9, 9), [(1, 2), (1, 2, 2, 2, 2)]) == (4, 5)
    assert script.nearest((), [(1,), (1, 2)]) == (1, 1)


def test_any_reading_counts():
    torch.manual_seed(0)
    model = EncoderDecoder(5, 4, hidden_dim=3)
    letters = torch.tensor([[1, 2], [3, 4]])
    model.scores.bias.data[END] = -99.0  # no hypothesis ends
    found = beam_search(model, model.encode(letters), 1, script.MAX_STEPS).phonemes[:, 0].tolist()
    readings = [[(1, 1, 1), tuple(phonemes)] for phonemes in found]
    both, first = (WordSplit(letters, several) for several in (readings, [several[:1] for several in readings]))
    assert script.error_rates(model, both, 1, torch.device("cpu")) == {"per": 0, "wer": 0, "gold": 1}
    assert script.error_rates(model, first, 1, torch.device("cpu"))["wer"] == 1
