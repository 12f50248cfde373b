"""Beam search against enumeration, the soft beam against the hard one, gradients against finite differences."""

import copy
import itertools
from functools import cache, partial

import pytest
import torch
from torch import nn

from models.beam_search import beam_search, marginals, soft_beam
from models.encoder_decoder import END, EncoderDecoder
from topk_losses import RELAXATIONS, SortedSoftTopK, make_operator

NUM_LETTERS = 5
V = 6
STEPS = 5
WORDS = torch.tensor([[1, 2, 3, 4], [2, 4, END, END], [3, END, END, END]])


@pytest.fixture(scope="module")
def model() -> EncoderDecoder:
    torch.manual_seed(24)
    model = EncoderDecoder(NUM_LETTERS, V, hidden_dim=6).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)  # decided enough that hypotheses end at different steps
    return model.requires_grad_(False)


def operator(method: str, K: int, inverse_temperature: float):
    @cache
    def of(n: int) -> nn.Module:
        relaxed = SortedSoftTopK() if method == "soft_topk" else make_operator(method)
        return partial(relaxed.permutation_matrix, k=K, inverse_temperature=inverse_temperature)

    return of


def log_likelihood(model: EncoderDecoder, word: torch.Tensor, phonemes: list[int]) -> float:
    """Of phonemes up to their first END, or of all."""
    log_probs = model.forced(model.encode(word.unsqueeze(0)), torch.tensor([phonemes]))[0]
    counted = phonemes.index(END) + 1 if END in phonemes else len(phonemes)
    return float(sum(log_probs[place, phonemes[place]] for place in range(counted)))


# The network.


def test_steps_one_by_one_are_the_forced_ones(model):
    phonemes = torch.tensor([[1, 2, 3, END], [4, END, END, END], [5, 5, 1, 2]])
    encoded = model.encode(WORDS)
    states = encoded.state.unsqueeze(1)
    last = torch.full((3, 1), END)
    found = []
    for step in range(4):
        states = model.advance(model.phonemes(last), states)
        found.append(model.log_probs(states, encoded))
        last = phonemes[:, step : step + 1]
    torch.testing.assert_close(torch.cat(found, dim=1), model.forced(encoded, phonemes))


def test_padding_of_a_word_changes_nothing(model):
    alone = model.encode(WORDS[1:2, :2])
    longer = model.encode(nn.functional.pad(WORDS[1:2], (0, 3)))
    together = model.encode(WORDS)
    states = alone.state.unsqueeze(1)
    for encoded, row in ((longer, 0), (together, 1)):
        torch.testing.assert_close(encoded.state[row], alone.state[0])
        torch.testing.assert_close(
            model.log_probs(states.expand(len(encoded.state), 1, -1), encoded)[row], model.log_probs(states, alone)[0]
        )


# Hard search.


def test_a_beam_that_drops_nothing_finds_the_best_of_all_sequences(model):
    """With K = V two steps keep every first phoneme: the oracle enumerates."""
    beam = beam_search(model, model.encode(WORDS), V, max_steps=2)
    for row, word in enumerate(WORDS):
        sequences = {
            pair: log_likelihood(model, word, list(pair))
            for pair in itertools.product(range(V), repeat=2)
            if pair[0] != END or pair[1] == END
        }
        best = sorted(sequences, key=sequences.get, reverse=True)[:V]
        assert [tuple(pair) for pair in beam.phonemes[row].tolist()] == best
        assert beam.scores[row].tolist() == pytest.approx([sequences[pair] for pair in best])


@pytest.mark.parametrize("K", [1, 3])
def test_scores_are_log_likelihoods_and_ended_hypotheses_stay(model, K):
    beam = beam_search(model, model.encode(WORDS), K, max_steps=STEPS)
    ended_at = set()
    for row, word in enumerate(WORDS):
        for phonemes, score in zip(beam.phonemes[row].tolist(), beam.scores[row].tolist()):
            assert score == pytest.approx(log_likelihood(model, word, phonemes))
            if END in phonemes:
                ended_at.add(phonemes.index(END))
                assert set(phonemes[phonemes.index(END) :]) == {END}
        assert beam.scores[row].tolist() == sorted(beam.scores[row].tolist(), reverse=True)
    assert len(ended_at) > 1  # the weights were chosen so that this test sees hypotheses that end early


def test_the_search_ends_when_all_hypotheses_have(model):
    hasty = copy.deepcopy(model)
    hasty.scores.bias[END] = 50.0
    assert beam_search(hasty, hasty.encode(WORDS), 1, max_steps=100).phonemes.shape[2] == 1
    assert beam_search(hasty, hasty.encode(WORDS), 3, max_steps=100).phonemes.shape[2] == 2


# The soft beam.

HARD = {
    **{"softsort": 1e4, "neuralsort": 1e4, "soft_topk": 1e8, "sinkhorn_sort": 1e8},
    **{"odd_even": 1e5, "bitonic": 1e5, "splitter_selection": 1e5},
}


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("method", HARD)
def test_at_a_large_inverse_temperature_it_is_the_hard_beam(model, method, K):
    encoded = model.encode(WORDS)
    hard = beam_search(model, encoded, K, max_steps=STEPS)
    steps = hard.phonemes.shape[2]
    choices, scores = soft_beam(model, encoded, steps, operator(method, K, HARD[method]))
    torch.testing.assert_close(scores, hard.scores, rtol=1e-4, atol=1e-4)
    best = marginals(choices, torch.full((3,), steps))
    torch.testing.assert_close(best, nn.functional.one_hot(hard.phonemes[:, 0], V).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["softsort", "neuralsort", "soft_topk", "splitter_selection"])
def test_marginals_are_distributions_up_to_the_length(model, method):
    choices, _ = soft_beam(model, model.encode(WORDS), 4, operator(method, 3, 2.0))
    found = marginals(choices, torch.tensor([4, 1, 2]))
    expected = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).double()
    torch.testing.assert_close(found.sum(2), expected)
    assert found.min() > -1e-9
    # What lies behind a word's length is of no account.
    shorter, _ = soft_beam(model, model.encode(WORDS), 1, operator(method, 3, 2.0))
    torch.testing.assert_close(found[1, :1], marginals(shorter, torch.tensor([1, 1, 1]))[1])


PHONEMES = torch.tensor([[1, 2, END], [3, END, END], [2, 1, END]])


@pytest.fixture
def differentiated():
    """A smaller network, and its words."""
    torch.manual_seed(1)
    model = EncoderDecoder(NUM_LETTERS, 4, hidden_dim=3).double()
    return model, model.encode(WORDS)


@pytest.mark.parametrize("method", ["softsort", "soft_topk", "splitter_selection"])
def test_gradients_reach_all_steps(differentiated, method):
    """Against finite differences, of an input that only the first step has, and of weights that every step has."""
    model, encoded = differentiated
    lengths = torch.tensor([3, 2, 3])

    def of_right_phonemes(start: torch.Tensor) -> torch.Tensor:
        """-log of their marginals: the last step's depends on every step before, the first's on all after."""
        choices, _ = soft_beam(model, encoded._replace(state=start), 3, operator(method, 2, 3.0))
        right = marginals(choices, lengths).gather(2, PHONEMES.unsqueeze(2)).squeeze(2)
        return -right[torch.arange(3) < lengths.unsqueeze(1)].log().sum()

    def loss(start: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"scores.weight": weight}, (start,))

    model.forward = of_right_phonemes
    start, weight = (tensor.detach().clone().requires_grad_() for tensor in (encoded.state, model.scores.weight))
    assert torch.autograd.gradcheck(loss, (start, weight), atol=1e-6)


def test_every_operator_with_a_matrix_can_choose(model):
    for method in RELAXATIONS:
        choices, scores = soft_beam(model, model.encode(WORDS), 2, operator(method, 2, 1.0))
        assert [tuple(A.shape) for A in choices] == [(3, 2, 1, V), (3, 2, 2, V)]
        assert scores.isfinite().all()
