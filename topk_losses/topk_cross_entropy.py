"""The top-k cross-entropy: the true class must be among the k highest, with k drawn from P_K."""

import math
import warnings
from functools import partial
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from topk_losses import checks
from topk_losses.candidates import select_candidates, select_candidates_of_sets
from topk_losses.checks import PK
from topk_losses.classification import (
    CallSettings,
    ClassificationLoss,
    CommonSettings,
    class_dimension,
    label_shape,
)
from topk_losses.compilers import has_known_values
from topk_losses.methods import TOP1_MODES, find_operator
from topk_losses.numerics import MASKED, guarded_log, largest, log_add_exp, log_mixture, ranks_like
from topk_losses.operator import TopKOperator, check_probabilities
from topk_losses.temperature import Temperature, make_temperature


class TopKCrossEntropyLoss(ClassificationLoss):
    """Differentiable top-k cross-entropy (Petersen et al. 2022), with the interface of torch.nn.CrossEntropyLoss.

    L(s, y) = -log sum_k P_K(k) P(rank of y <= k), with the relaxed ranks of an operator.

    Args:
        method: the name of an operator (default: "splitter_selection"), or a TopKOperator.
        p_k: P_K, the weights of top-1, top-2, ...: p_k[j] = P(k = j + 1), non-negative and summing to 1. Shape (K,), or
            (num_classes, K) with a row for each class; or an integer k, for top-k only; or a mapping, {1: 0.5, 5: 0.5}.
            Assign another P_K to set it later: an edit in place, as of loss_fn.p_k[0], changes a copy. P_K of each
            sample is an argument of the call.
        m: number of scores that are sorted, at least 2: the true class's and the m - 1 largest others. None (default),
            or m >= n: all.
        inverse_temperature: above 0, larger = closer to the hard sort; a torch.nn.Parameter of shape () is learned;
            "auto" follows the standard deviation of the logits (AutoTemperature). None: the operator's default. A
            number can be set later, in place of "auto", too; "auto" itself only here.
        top1_mode: how the k = 1 term is computed: "sort", by the operator; "sm" (default), by softmax, inside the same
            logarithm; "smce", by a cross-entropy of its own. sparse_topk and perturbed_topk need "sm" or "smce", with
            P_K(1) > 0.
        noise_rate: eta in [0, 1) (default: 0): forward correction (Patrini et al. 2017) for symmetric label noise, L =
            -log((1 - eta) u_y + eta E[k] / n), where -log u_y is the loss without it and E[k] the mean of P_K. Not
            with top1_mode "smce" nor soft_labels "any".
        common: arguments of ClassificationLoss.

    A NaN or +inf logit makes the loss of its sample NaN and touches no other. A class at -inf is masked out. With m the
    softmax term sees the m scores, too. docs/methods/index.md has the modes' formulas and the epsilon of the logarithm.

    Example:
        >>> loss_fn = TopKCrossEntropyLoss("splitter_selection", p_k={1: 0.5, 5: 0.5}, m=16, inverse_temperature=0.25)
        >>> loss_fn(torch.arange(20.0).expand(2, 20), torch.tensor([19, 14]))
        tensor(1.1569)
    """

    m = checks.Checked(checks.check_several)
    top1_mode = checks.Checked(partial(checks.check_choice, choices=TOP1_MODES))
    noise_rate = checks.Checked(checks.check_fraction)
    rank_weights: Tensor  # P_K of the ranks that have a weight, (1, J, 1), or (1, J, num_classes)
    _first_rank: int  # the first that has a weight, of the class where it is highest

    def __init__(
        self,
        method: str | TopKOperator = "splitter_selection",
        p_k: PK = (0.2, 0.2, 0.2, 0.2, 0.2),
        *,
        m: SupportsIndex | None = None,
        inverse_temperature: float | Tensor | str | None = None,
        top1_mode: str = "sm",
        noise_rate: float = 0.0,
        **common: Unpack[CommonSettings],
    ) -> None:
        relaxation = find_operator(method)  # first: the settings of another loss are refused with its name
        super().__init__(**common)
        self.operator = relaxation
        self.m = m
        self.inverse_temperature: Temperature = make_temperature(
            inverse_temperature, self.operator.default_inverse_temperature, self.operator.logit_std
        )
        self.top1_mode = top1_mode
        self.noise_rate = noise_rate
        if self.operator.whitens and self._num_sorted(self.num_classes) == 2:
            message = (
                f"{self.operator} whitens the scores, and two scores are the same two numbers then: "
                "they get next to no gradient. Sort three or more, or take another method"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.ranks: list[int] = []
        self.register_buffer("rank_weights", torch.empty(0, device="cpu"), persistent=False)
        self._set_p_k(p_k)
        self._check_settings()

    @property
    def p_k(self) -> Tensor:
        """P_K, (K,) or (num_classes, K): a copy, so that a change of P_K needs an assignment."""
        weights = self.rank_weights[0].T  # (1 or num_classes, J)
        p_k = weights.new_zeros(len(weights), self.ranks[-1])
        p_k[:, [rank - 1 for rank in self.ranks]] = weights
        return p_k.squeeze(0)

    @p_k.setter
    def p_k(self, p_k: PK) -> None:
        self._set_p_k(p_k)

    def _set_p_k(self, p_k: PK) -> None:
        """Check P_K, and keep the ranks that have a weight."""
        num_sorted = self._num_sorted(self.num_classes)
        rows = checks.check_p_k(p_k, self.num_classes, num_sorted)
        if num_sorted is not None and rows.shape[-1] == num_sorted > 1:
            certain = float(rows[..., -1].max())
            message = (
                f"p_k has {certain:g} of its mass on rank {num_sorted}, but only {num_sorted} scores are sorted (m, or "
                "the number of classes without m): all are within that rank, so that the loss is at most "
                f"{-math.log(certain):.3g} however low the true class lies; take a lower rank, or raise m"
            )
            warnings.warn(message, UserWarning, stacklevel=3)
        if rows.dim() == 2 and self.num_classes is None:
            raise ValueError(f"p_k with one row per class needs num_classes={len(rows)}; got num_classes=None")
        self._check_top1(rows)
        rows = rows.reshape(-1, rows.shape[-1])  # (1 or num_classes, K)
        has_weight = (rows > 0).any(0)  # (K,)
        rank_weights = rows[:, has_weight].T.unsqueeze(0)  # (1, J, 1 or num_classes)
        self.ranks = (has_weight.nonzero().squeeze(1) + 1).tolist()
        self._first_rank = int((rows > 0).int().argmax(1).max()) + 1
        rank_weights = rank_weights.to(self.rank_weights.device, checks.KEPT_DTYPE)
        # with the strides of its shape, by which processes send it to each other
        self.rank_weights = rank_weights.clone(memory_format=torch.contiguous_format)

    def forward(self, logits: Tensor, labels: Tensor, p_k: Tensor | None = None) -> Tensor:
        """Compute the loss of logits and labels.

        Args:
            logits, labels: as in ClassificationLoss.
            p_k: P_K of each sample instead of the loss's own, (..., K) for labels (...): non-negative, rows summing to
                1 within 1e-4. It receives a gradient, which is why it is not scaled, unlike the loss's own.
        """
        if p_k is not None:
            p_k = self._rows_of_p_k(p_k, logits)
        return self.compute(logits, labels, p_k)

    def extra_repr(self) -> str:
        p_k: object = tuple(self.p_k.shape)
        if self.p_k.dim() == 1:
            p_k = [round(weight, 6) for weight in self.p_k.tolist()]
        return f"{super().extra_repr()}, p_k={p_k}"

    def settings_of_call(self, inverse_temperature: float | Tensor, p_k: Tensor | None) -> CallSettings:
        return CallSettings(inverse_temperature, p_k, tuple(self.ranks), self.rank_weights)

    def is_stochastic(self) -> bool:
        return self.operator.draws_noise

    def loss_of_labels(self, logits: Tensor, labels: Tensor, call: CallSettings) -> Tensor:
        scores = logits
        places = labels
        m = self._num_candidates(logits)
        if m is not None:
            top = largest(logits, m)
            candidates, place = select_candidates(logits, labels.unsqueeze(1), top)  # (rows, 1, m), (rows, 1)
            scores = logits.gather(1, candidates.squeeze(1))
            places = place.squeeze(1)
        rank_weights = select_rank_weights(self._rank_weights(logits, call), labels.unsqueeze(1))  # (1 or rows, J, 1)
        losses = self._loss_of_scores(scores, places, rank_weights.squeeze(2), call)
        if self.noise_rate:
            losses = self._correct(losses.unsqueeze(1), logits, rank_weights, call).squeeze(1)
        return losses

    def loss_of_classes(self, logits: Tensor, classes: Tensor, call: CallSettings) -> Tensor:
        m = self._num_candidates(logits)
        if m is None:
            return super().loss_of_classes(logits, classes, call)
        return self.in_chunks(TopKCrossEntropyLoss._loss_of_candidates, logits, classes, call, scores_per_loss=m)

    def _loss_of_candidates(self, logits: Tensor, classes: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss of several classes (rows, c), with m; the largest scores of a row are searched for once."""
        m = self._num_candidates(logits)
        assert m is not None
        candidates, places = select_candidates(logits, classes, largest(logits, m))  # (rows, c, m), (rows, c)
        # of the rows as they are: the gradient of a gather from expanded rows would be (rows, c, n)
        scores = logits.gather(1, candidates.flatten(1)).view(-1, m)  # (rows c, m)
        rank_weights = select_rank_weights(self._rank_weights(logits, call), classes)  # (1 or rows, J, 1 or c)
        weights_of_pairs = flatten_pairs(rank_weights, classes)  # (1 or rows c, J)
        losses = self._loss_of_scores(scores, places.flatten(), weights_of_pairs, call)
        losses = losses.view(classes.shape)
        if self.noise_rate:
            losses = self._correct(losses, logits, rank_weights, call)
        return losses

    def loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        if self._num_candidates(logits) is not None or self.operator.compares_pairs:  # each class has scores of its own
            return super().loss_of_every_class(logits, call)
        most_ranks = self._ranks(call)[-1]
        compute = TopKCrossEntropyLoss._loss_of_every_class
        return self.of_few_rows(compute, logits, call, scores_per_class=most_ranks)

    def _loss_of_every_class(self, logits: Tensor, call: CallSettings) -> Tensor:
        log_top1 = None
        if self._has_softmax_term(call):
            log_top1 = logits.log_softmax(1)  # (rows, n)
        ranks = self._sorted_ranks(logits, call)
        within = self.operator.topk_probabilities(logits, ranks, call.inverse_temperature, self.generator)
        check_probabilities(self.operator, within, logits, ranks)
        rank_weights = self._rank_weights(logits, call)
        losses = self._mix_ranks(log_top1, within, rank_weights, call)
        if self.noise_rate:
            losses = self._correct(losses, logits, rank_weights, call)
        return losses

    def loss_of_sets(self, logits: Tensor, sets: Tensor, call: CallSettings) -> Tensor:
        """Take the sum of the probabilities of the right answers, at most 1, for that of the true class."""
        scores = logits
        answers = sets
        m = self._num_candidates(logits)
        if m is not None:
            scores, answers = select_candidates_of_sets(logits, sets, m, self._ranks(call)[0])  # (rows, m) each
        log_top1 = None
        if self._has_softmax_term(call):
            log_top1 = log_mixture(scores.log_softmax(1), answers)  # (rows,)
        ranks = self._sorted_ranks(scores, call)
        within = self._within_of_sets(scores, answers, ranks, call)  # (rows, J)
        rank_weights = mean_rank_weights(self._rank_weights(logits, call), sets)  # (1 or rows, J)
        return self._mix_ranks(log_top1, within, rank_weights, call)

    def _within_of_sets(self, scores: Tensor, answers: Tensor, ranks: list[int], call: CallSettings) -> Tensor:
        """Compute the sum of P(rank <= k) over the answers, at most 1, or its logarithm: (rows, J).

        The sum counts how many are expected within k; above 1, one is. Where P of a single class may exceed 1, the sum
        may reach that, so that the loss of one answer is the loss of that label.
        """
        operator = self.operator
        if operator.exceeds_1:
            of_every_class = operator.topk_probabilities(scores, ranks, call.inverse_temperature, self.generator)
            check_probabilities(operator, of_every_class, scores, ranks)
            of_answers = of_every_class * answers.unsqueeze(1)  # (rows, J, n)
            return of_answers.sum(2).minimum(of_answers.amax(2).clamp(min=1))
        within = operator.topk_probabilities_of_sets(scores, answers, ranks, call.inverse_temperature, self.generator)
        checks.check_shape(operator, "topk_probabilities_of_sets", within, (scores.shape[0], len(ranks)))
        certainty = 0.0 if operator.returns_logarithms else 1.0
        return within.clamp(max=certainty)

    def _loss_of_scores(self, scores: Tensor, places: Tensor, rank_weights: Tensor, call: CallSettings) -> Tensor:
        """Compute the loss of scores (rows, m), all of which are sorted, for the true classes' places (rows,): (rows,).

        rank_weights: P_K of each row, (1 or rows, J).
        """
        log_top1 = None
        if self._has_softmax_term(call):
            log_top1 = -cross_entropy(scores, places, reduction="none")  # (rows,)
        ranks = self._sorted_ranks(scores, call)
        within = self.operator.topk_probabilities_of_labels(
            scores, places, ranks, call.inverse_temperature, self.generator
        )  # (rows, J)
        checks.check_shape(self.operator, "topk_probabilities_of_labels", within, (scores.shape[0], len(ranks)))
        return self._mix_ranks(log_top1, within, rank_weights, call)

    def _mix_ranks(self, log_top1: Tensor | None, within: Tensor, rank_weights: Tensor, call: CallSettings) -> Tensor:
        """Compute -log sum_k P_K(k) P(rank <= k): (rows,), or (rows, n) of every class.

        log_top1: the log softmax, (rows[, n]), where it computes rank 1. within: what the operator returns for the
        other ranks, (rows, J[, n]).
        """
        if log_top1 is None:
            return -self._log_mixture(within, rank_weights, call)
        if self.top1_mode == "smce":
            weight_of_top1 = rank_weights[:, 0]
            log_of_others = self._log_mixture(within, rank_weights[:, 1:], call)
            is_masked = log_top1 == -torch.inf  # an infinite factor of a learned P_K would leave it no gradient
            losses = -weight_of_top1 * log_top1.clamp(min=MASKED) - (1 - weight_of_top1) * log_of_others
            return losses.masked_fill(is_masked & (weight_of_top1 > 0), torch.inf)
        top1 = log_top1
        if not self.operator.returns_logarithms:
            top1 = log_top1.exp()
        within = torch.cat([top1.unsqueeze(1), within], dim=1)
        return -self._log_mixture(within, rank_weights, call)

    def _log_mixture(self, within: Tensor, rank_weights: Tensor, call: CallSettings) -> Tensor:
        """Compute log sum_k P_K(k) P(rank <= k) of what the operator returns, (rows, J[, n])."""
        if self.operator.returns_logarithms:
            is_of_all_classes = call.rank_weights is not None and call.rank_weights.shape[2] == 1
            all_positive = call.p_k is None and is_of_all_classes  # a row per class may have zeros
            return log_mixture(within, rank_weights, all_positive=all_positive)
        # columns of NeuralSort and SoftSort may sum to more than 1
        return guarded_log((within * rank_weights).sum(1).clamp(max=1))

    def _correct(self, losses: Tensor, logits: Tensor, rank_weights: Tensor, call: CallSettings) -> Tensor:
        """Correct losses (rows, c) for noise_rate; rank_weights (1 or rows, J, 1 or c)."""
        num_unmasked = (logits > -torch.inf).sum(1, keepdim=True).clamp(min=1)  # (rows, 1)
        num_within = ranks_like(self._ranks(call), losses).minimum(num_unmasked)  # (rows, J), classes within k
        expected_k = (num_within.unsqueeze(2) * rank_weights).sum(1)  # (rows, 1 or c)
        log_wrong = (self.noise_rate * expected_k / num_unmasked).log()
        log_right = math.log1p(-self.noise_rate) - losses.clamp(max=-MASKED)
        return -log_add_exp(log_right, log_wrong.expand_as(log_right))

    def _ranks(self, call: CallSettings) -> list[int]:
        """Return the ranks that have a weight; for P_K of each sample, all."""
        if call.p_k is None:
            return list(call.ranks)
        return list(range(1, call.p_k.shape[1] + 1))

    def _rank_weights(self, logits: Tensor, call: CallSettings) -> Tensor:
        """Return P_K of these ranks, (1 or rows, J, 1 or n).

        Raises:
            ValueError: P_K has a row for each class of another number of classes.
        """
        if call.p_k is not None:
            return call.p_k.to(logits).unsqueeze(2)
        assert call.rank_weights is not None  # settings_of_call
        num_rows = call.rank_weights.shape[2]
        if num_rows not in (1, logits.shape[1]):
            raise ValueError(f"p_k has a row for each of {num_rows} classes, but the logits have {logits.shape[1]}")
        return call.rank_weights.to(logits)

    def _has_softmax_term(self, call: CallSettings) -> bool:
        """Tell whether the softmax computes rank 1, instead of the operator."""
        return self.top1_mode != "sort" and self._ranks(call)[0] == 1

    def _sorted_ranks(self, scores: Tensor, call: CallSettings) -> list[int]:
        """Return the ranks that the operator computes."""
        ranks = self._ranks(call)
        num_scores = scores.shape[1]
        if ranks[-1] > num_scores:
            raise ValueError(
                f"p_k reaches rank {ranks[-1]}, but only {num_scores} scores are sorted (n, or m); shorten p_k"
            )
        if call.p_k is None and self._first_rank == num_scores > 1:
            raise ValueError(checks.about_certain_rank(num_scores))
        if self._has_softmax_term(call):
            return ranks[1:]
        return ranks

    def _num_candidates(self, logits: Tensor) -> int | None:
        """Return m, or None where all scores are sorted."""
        if self.m is None or self.m >= logits.shape[1]:
            return None
        return self.m

    def _num_sorted(self, n: int | None) -> int | None:
        """Return how many of n scores are sorted; None if that is not known."""
        if self.m is None or n is None:
            return self.m or n
        return min(self.m, n)

    def _check_settings(self) -> None:
        super()._check_settings()
        sorts_nothing = self.top1_mode != "sort" and self.ranks == [1]
        lacks_softmax = self.operator.has_zeros and (self.top1_mode == "sort" or self._first_rank > 1)
        if sorts_nothing or lacks_softmax:
            self._check_top1(self.p_k)
        if self.noise_rate and (self.top1_mode == "smce" or self.soft_labels == "any"):
            raise ValueError(
                "noise_rate corrects one logarithm of one true class: take top1_mode 'sm' or 'sort' and soft_labels "
                f"'expected'; got top1_mode={self.top1_mode!r} and soft_labels={self.soft_labels!r}"
            )

    def _check_top1(self, rows: Tensor) -> None:
        """Raise ValueError for a P_K (..., K) that does not fit the way in which its first rank is computed."""
        if self.top1_mode != "sort" and bool((rows[..., 0] == 1).all()):
            raise ValueError(
                f"top1_mode={self.top1_mode!r} leaves nothing to sort when P_K(1) = 1: the loss would be softmax "
                f"cross-entropy. Use method='softmax_cross_entropy', or top1_mode='sort'; got p_k={rows.tolist()}"
            )
        self._check_zeros(rows)

    def _check_zeros(self, rows: Tensor) -> None:
        """Raise ValueError for a P_K (..., K) that leaves classes without a gradient where the operator has zeros."""
        if not self.operator.has_zeros:
            return
        if self.top1_mode == "sort" or bool((rows[..., 0] <= 0).any()):
            raise ValueError(
                f"{self.operator} gives exactly 0 to a class far below the k highest, where the loss would have no "
                f"gradient; give the softmax a part, P_K(1) > 0 with top1_mode 'sm' or 'smce': got "
                f"p_k={rows.tolist()} with top1_mode={self.top1_mode!r}"
            )

    def _rows_of_p_k(self, p_k: Tensor, logits: Tensor) -> Tensor:
        """Check P_K of each sample, (..., K), and return it as (rows, K)."""
        checks.check_logits(logits)
        num_sorted = self._num_sorted(logits.shape[class_dimension(logits)])
        assert num_sorted is not None
        needs_top1 = self.operator.has_zeros
        rows = checks.check_p_k_of_samples(p_k, label_shape(logits), num_sorted, needs_top1)
        if has_known_values(rows) and rows.numel():
            self._check_zeros(rows)
            if not bool(rows[:, num_sorted:].any()):  # ranks without mass
                rows = rows[:, :num_sorted]
        return rows


def select_rank_weights(rank_weights: Tensor, classes: Tensor) -> Tensor:
    """Select P_K (1 or rows, J, 1 or n) of classes (rows, c): (1 or rows, J, 1 or c)."""
    if rank_weights.shape[2] == 1:
        return rank_weights
    return rank_weights[0][:, classes].transpose(0, 1)  # (rows, J, c)


def flatten_pairs(rank_weights: Tensor, classes: Tensor) -> Tensor:
    """Return P_K (1 or rows, J, 1 or c) of each pair of a row and one of its classes (rows, c): (1 or rows c, J)."""
    if rank_weights.shape[0] == 1 and rank_weights.shape[2] == 1:
        return rank_weights.squeeze(2)
    num_rows, num_classes = classes.shape
    return rank_weights.expand(num_rows, -1, num_classes).transpose(1, 2).flatten(0, 1)


def mean_rank_weights(rank_weights: Tensor, sets: Tensor) -> Tensor:
    """Average P_K (1 or rows, J, 1 or n) over sets of classes (rows, n): (1 or rows, J)."""
    if rank_weights.shape[2] == 1:
        return rank_weights.squeeze(2)
    distribution = sets / sets.sum(1, keepdim=True)  # (rows, n)
    return (distribution.unsqueeze(1) * rank_weights).sum(2)
