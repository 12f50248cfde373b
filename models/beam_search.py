"""Beam search: hard; hard with the right prefix kept, for a loss on its candidates; and soft, for gradients throughout.

All three keep K hypotheses of each word and score their Q V continuations, the candidates (Q = 1 in the first step,
then K), by accumulated log-likelihood. A hypothesis that has ended goes on with END at no cost. No score is divided by
a length.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from models.encoder_decoder import END, Encoded, EncoderDecoder

# Added to probabilities before the logarithm, which stays finite in float32, as do its sums over a reading.
LEAST = 1e-30
Relaxed = Callable[[Tensor], Tensor]  # a relaxed top-k: scores (batch, n) -> (batch, K, n)


class Beam(NamedTuple):
    """Hypotheses, best first: phonemes (batch, K, steps) int64, padded with END; scores (batch, K), log-likelihoods."""

    phonemes: Tensor
    scores: Tensor


class Step(NamedTuple):
    """A step of beam search.

    candidates (batch, Q V): scores, -inf where impossible; gold (batch,): place of the right candidate, or None.
    parents, phonemes, scores (batch, K): the hypotheses that are kept; their place is parent * V + phoneme.
    """

    candidates: Tensor
    gold: Tensor | None
    parents: Tensor
    phonemes: Tensor
    scores: Tensor


def search(model: EncoderDecoder, encoded: Encoded, K: int, phonemes: Tensor | None = None) -> Iterator[Step]:
    """Yield the steps of a beam search, without end.

    phonemes: the right ones (batch, T), for T steps in which the hypothesis that agrees with them so far is kept: where
    it falls off the beam, it takes the place of the last (as in learning as search optimisation, Daume, Marcu 2005).
    The first step has V candidates, so that K may not exceed V.
    """
    V = model.num_phonemes
    states = encoded.state.unsqueeze(1)  # (batch, Q, hidden)
    last = torch.full(states.shape[:2], END, device=states.device)  # (batch, Q)
    ended = torch.zeros_like(last, dtype=torch.bool)  # (batch, Q)
    scores = torch.zeros_like(states[:, :, 0])  # (batch, Q)
    gold_parent = torch.zeros_like(last[:, 0])  # (batch,)
    only_end = torch.where(torch.arange(V, device=states.device) == END, 0.0, -torch.inf).to(states)  # (V,)
    steps: Iterable[int] = itertools.count()
    if phonemes is not None:
        steps = range(phonemes.shape[1])
    for step in steps:
        states = model.advance(model.phonemes(last), states)
        log_probs = model.log_probs(states, encoded)  # (batch, Q, V)
        log_probs = torch.where(ended.unsqueeze(2), only_end, log_probs)
        candidates = (scores.unsqueeze(2) + log_probs).flatten(1)  # (batch, Q V)
        kept = candidates.detach().topk(K, dim=1).indices  # (batch, K)
        gold = None
        if phonemes is not None:
            gold = gold_parent * V + phonemes[:, step]
            lost = (kept != gold.unsqueeze(1)).all(1)  # (batch,)
            kept = torch.cat([kept[:, :-1], torch.where(lost, gold, kept[:, -1]).unsqueeze(1)], dim=1)
            gold_parent = (kept == gold.unsqueeze(1)).int().argmax(1)
        parents = kept // V
        last = kept % V
        scores = candidates.gather(1, kept)
        ended = last == END
        states = states.gather(1, parents.unsqueeze(2).expand(-1, -1, states.shape[2]))
        yield Step(candidates, gold, parents, last, scores)


@torch.no_grad()
def beam_search(model: EncoderDecoder, encoded: Encoded, K: int, max_steps: int) -> Beam:
    """The K hypotheses of each word, best first, when all have ended or after max_steps."""
    steps = search(model, encoded, K)
    first = next(steps)
    beam = Beam(first.phonemes.unsqueeze(2), first.scores)
    for number in range(1, max_steps):
        if bool((beam.phonemes[:, :, -1] == END).all()):
            break
        step = next(steps)
        before = beam.phonemes.gather(1, step.parents.unsqueeze(2).expand(-1, -1, number))  # (batch, K, number)
        beam = Beam(torch.cat([before, step.phonemes.unsqueeze(2)], dim=2), step.scores)
    return beam


def soft_beam(
    model: EncoderDecoder, encoded: Encoded, num_steps: int, operator: Callable[[int], Relaxed]
) -> tuple[list[Tensor], Tensor]:
    """The relaxed choices A of each step, (batch, K, Q, V), and the last scores (batch, K).

    operator(n): the relaxed top-k operator of n scores, (batch, n) -> (batch, K, n). Row i of A is the distribution of
    hypothesis i over the candidates. The next inputs, states and scores are A times embeddings, states and candidates
    (Xie et al. 2020; Goyal et al. 2018). A hypothesis has ended with the weight that it gives to END, and so much of it
    goes on with END at no cost.
    """
    V = model.num_phonemes
    states = encoded.state.unsqueeze(1)  # (batch, Q, hidden)
    inputs = model.phonemes(torch.full(states.shape[:2], END, device=states.device))  # (batch, Q, hidden)
    scores = torch.zeros_like(states[:, :, 0])  # (batch, Q)
    ended = torch.zeros_like(scores)  # (batch, Q), in [0, 1]
    end = one_hot(torch.tensor(END, device=states.device), V).to(states)  # (V,)
    choices = []
    for _ in range(num_steps):
        states = model.advance(inputs, states)
        probs = model.log_probs(states, encoded).exp()  # (batch, Q, V)
        probs = ended.unsqueeze(2) * end + (1 - ended.unsqueeze(2)) * probs
        candidates = (scores.unsqueeze(2) + (probs + LEAST).log()).flatten(1)  # (batch, Q V)
        A = operator(candidates.shape[1])(candidates)  # (batch, K, Q V)
        scores = (A @ candidates.unsqueeze(2)).squeeze(2)  # (batch, K)
        A = A.unflatten(2, (-1, V))  # (batch, K, Q, V)
        inputs = A.sum(2) @ model.phonemes.weight  # (batch, K, hidden)
        states = A.sum(3) @ states
        ended = A[..., END].sum(2).clamp(0, 1)
        choices.append(A)
    return choices, scores


def marginals(choices: list[Tensor], lengths: Tensor) -> Tensor:
    """The best hypothesis' distribution over the phonemes of each step, (batch, T, V), traced back through the beam.

    choices: of soft_beam, T steps. lengths (batch,) in [1, T]: where each word's hypotheses are compared and the first
    is taken; the steps behind it are 0.
    """
    weights = torch.zeros_like(choices[-1][:, :, 0, 0])  # (batch, K), of the hypotheses after a step
    first = pad(torch.ones_like(weights[:, :1]), (0, weights.shape[1] - 1))
    steps = []
    for step in reversed(range(len(choices))):
        weights = torch.where((lengths == step + 1).unsqueeze(1), first, weights)
        pair_weights = torch.einsum("bk,bkqv->bqv", weights, choices[step])
        steps.append(pair_weights.sum(1))
        weights = pair_weights.sum(2)
    return torch.stack(steps[::-1], dim=1)
