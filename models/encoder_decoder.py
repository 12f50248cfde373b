"""A small sequence-to-sequence network: bidirectional GRU over the letters, attention, GRU over the phonemes.

    encoded = model.encode(letters)                            # once for each word
    states = model.advance(model.phonemes(last), states)       # one step of Q hypotheses of each word
    log_probs = model.log_probs(states, encoded)               # (batch, Q, V)
    log_probs = model.forced(encoded, phonemes)                # all steps at once, the true phonemes as inputs

The decoder's inputs are embeddings, not phonemes, so that a mixture of phonemes can go in. What it reads of the word
does not go back into its state: under teacher forcing all its steps are one call.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

END = 0  # no letter; the phoneme that ends a reading, and that is the first input


class Encoded(NamedTuple):
    """Encoded words: memory (batch, L, hidden); absent (batch, L) bool, no letter; state (batch, hidden), the first."""

    memory: Tensor
    absent: Tensor
    state: Tensor


class EncoderDecoder(nn.Module):
    """The network. num_letters and num_phonemes count END (0); hidden_dim is the width of all layers and embeddings."""

    def __init__(self, num_letters: int, num_phonemes: int, hidden_dim: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, hidden_dim)
        self.encoder = nn.GRU(hidden_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.memory = nn.Linear(2 * hidden_dim, hidden_dim)
        self.start = nn.Linear(2 * hidden_dim, hidden_dim)
        self.phonemes = nn.Embedding(num_phonemes, hidden_dim)
        self.decoder = nn.GRU(hidden_dim, hidden_dim, batch_first=True)
        self.combined = nn.Linear(2 * hidden_dim, hidden_dim)
        self.scores = nn.Linear(hidden_dim, num_phonemes)

    @property
    def num_phonemes(self) -> int:
        """V, which counts END."""
        return self.scores.out_features

    def encode(self, letters: Tensor) -> Encoded:
        """Encode letters (batch, L) int64, padded with any number of ENDs."""
        absent = letters == END
        lengths = (~absent).sum(1).cpu()
        packed = pack_padded_sequence(self.letters(letters), lengths, batch_first=True, enforce_sorted=False)
        read, last = self.encoder(packed)  # last (2, batch, hidden): forwards, backwards
        read, _ = pad_packed_sequence(read, batch_first=True, total_length=letters.shape[1])  # (batch, L, 2 hidden)
        start = torch.tanh(self.start(torch.cat([last[0], last[1]], dim=1)))
        return Encoded(self.memory(read), absent, start)

    def advance(self, inputs: Tensor, states: Tensor) -> Tensor:
        """The states (batch, Q, hidden) after one more input each, (batch, Q, hidden)."""
        _, after = self.decoder(inputs.flatten(0, 1).unsqueeze(1), states.flatten(0, 1).unsqueeze(0))
        return after.view_as(states)

    def log_probs(self, states: Tensor, encoded: Encoded) -> Tensor:
        """Log-probabilities of the next phoneme (batch, Q, V), for any Q states of each word (batch, Q, hidden)."""
        similarity = states @ encoded.memory.transpose(1, 2)  # (batch, Q, L)
        attention = similarity.masked_fill(encoded.absent.unsqueeze(1), -torch.inf).softmax(2)
        context = attention @ encoded.memory  # (batch, Q, hidden)
        combined = torch.tanh(self.combined(torch.cat([states, context], dim=2)))
        return self.scores(combined).log_softmax(2)

    def forced(self, encoded: Encoded, phonemes: Tensor) -> Tensor:
        """Log-probabilities (batch, T, V) of each of the phonemes (batch, T), given those before it."""
        before = nn.functional.pad(phonemes[:, :-1], (1, 0), value=END)  # (batch, T)
        states, _ = self.decoder(self.phonemes(before), encoded.state.unsqueeze(0))  # (batch, T, hidden)
        return self.log_probs(states, encoded)
