"""The encoder by its definition, a cell and a word at a time."""

import pytest
import torch
from torch import nn

from models.encoder_decoder import END, EncoderDecoder

WORDS = torch.tensor([[1, 2, 3, 4], [2, 4, END, END], [3, END, END, END]])


@pytest.fixture
def model() -> EncoderDecoder:
    torch.manual_seed(0)
    return EncoderDecoder(5, 6, hidden_dim=4).double().requires_grad_(False)


def cell(gru: nn.GRU, ending: str) -> nn.GRUCell:
    """The cell of a layer whose weights have this ending."""
    made = nn.GRUCell(gru.input_size, gru.hidden_size).double()
    made.load_state_dict({name: getattr(gru, f"{name}_l0{ending}") for name in made.state_dict()})
    return made


@torch.no_grad()
def test_words_are_read_from_both_ends(model):
    encoded = model.encode(WORDS)
    assert torch.equal(encoded.absent, WORDS == END)
    for row, word in enumerate(WORDS):
        letters = model.letters(word[word != END])
        ends = []
        states = []
        for ending, order in (("", 1), ("_reverse", -1)):
            state = torch.zeros(4).double()
            read = []
            for letter in letters if order == 1 else letters.flip(0):
                state = cell(model.encoder, ending)(letter, state)
                read.append(state)
            ends.append(state)
            states.append(torch.stack(read[::order]))
        torch.testing.assert_close(encoded.state[row], torch.tanh(model.start(torch.cat(ends))))
        expected = model.memory(torch.cat(states, dim=1))
        torch.testing.assert_close(encoded.memory[row, : len(letters)], expected)


@torch.no_grad()
def test_a_step_of_the_decoder_attends_to_the_letters_of_its_word(model):
    encoded = model.encode(WORDS)
    inputs, states = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    after = model.advance(inputs, states)
    log_probs = model.log_probs(after, encoded)
    for row, word in enumerate(WORDS):
        memory = encoded.memory[row, : int((word != END).sum())]
        for number in range(2):
            state = cell(model.decoder, "")(inputs[row, number], states[row, number])
            torch.testing.assert_close(after[row, number], state)
            context = (memory @ state).softmax(0) @ memory
            scores = model.scores(torch.tanh(model.combined(torch.cat([state, context]))))
            torch.testing.assert_close(log_probs[row, number], scores.log_softmax(0))
