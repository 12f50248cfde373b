"""The losses of train_beam_search.py, each a mean over the phonemes of a batch, the end of a reading among them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, pad

from data.cmudict import END
from models.beam_search import marginals, search, soft_beam
from models.encoder_decoder import Encoded, EncoderDecoder
from topk_losses import TopKOperator
from topk_losses.operator import guarded_log

Objective = Callable[[EncoderDecoder, Tensor, Tensor], Tensor]  # model, letters (batch, L), phonemes (batch, T) -> ()
IGNORED = -100  # the label of a place that counts for nothing


def labels_of(phonemes: Tensor) -> Tensor:
    """phonemes (batch, T), IGNORED behind the first END."""
    behind = pad(phonemes[:, :-1] == END, (1, 0))  # (batch, T)
    return phonemes.masked_fill(behind, IGNORED)


def cross_entropy(model: EncoderDecoder, letters: Tensor, phonemes: Tensor) -> Tensor:
    """-log p of each phoneme, the right ones before it given."""
    return _cross_entropy(model, model.encode(letters), labels_of(phonemes), phonemes)


def retain(
    model: EncoderDecoder, letters: Tensor, phonemes: Tensor, K: int, loss_fn: nn.Module, nll_weight: float
) -> Tensor:
    """In each step loss_fn, which sums, of the candidates' scores: the right one, put back where it fell off, is to be
    the best, or among the K that stay, as P_K says. Plus nll_weight times cross_entropy."""
    encoded, labels = model.encode(letters), labels_of(phonemes)
    total = torch.zeros((), device=phonemes.device)
    for number, step in enumerate(search(model, encoded, K, phonemes)):
        total = total + loss_fn(step.candidates, step.gold.masked_fill(labels[:, number] == IGNORED, IGNORED))
    return total / (labels != IGNORED).sum() + nll_weight * _cross_entropy(model, encoded, labels, phonemes)


def soft_beam_loss(
    model: EncoderDecoder,
    letters: Tensor,
    phonemes: Tensor,
    K: int,
    operators: Callable[[int], TopKOperator],
    nll_weight: float,
) -> Tensor:
    """-log q of each phoneme, q the distribution of the soft beam's best hypothesis where the right reading ends. Plus
    nll_weight times cross_entropy."""
    encoded, labels = model.encode(letters), labels_of(phonemes)
    counted = labels != IGNORED  # (batch, T)
    choices, _ = soft_beam(model, encoded, K, phonemes.shape[1], operators)
    q = marginals(choices, counted.sum(1)).gather(2, phonemes.unsqueeze(2)).squeeze(2)  # (batch, T)
    loss = -guarded_log(q[counted].clamp(0, 1)).mean()
    return loss + nll_weight * _cross_entropy(model, encoded, labels, phonemes)


def _cross_entropy(model: EncoderDecoder, encoded: Encoded, labels: Tensor, phonemes: Tensor) -> Tensor:
    return nll_loss(model.forced(encoded, phonemes).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
