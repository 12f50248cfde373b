"""The methods by what tests must know of them, and batches for their losses."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, autograd

from topk_losses import METHODS, RELAXATIONS, TOP1_MODES, TopKOperator, make_operator
from topk_losses.methods import TOP1

# without noise: functions of their arguments
DETERMINISTIC = tuple(name for name, method in METHODS.items() if not method.stochastic)
# with a temperature that can be learned, and with "auto"
LEARNABLE = [name for name in DETERMINISTIC if METHODS[name].inverse_temperature is not None]
FOLLOW = [name for name, method in METHODS.items() if method.spread]
STOCHASTIC = tuple(name for name, method in METHODS.items() if method.stochastic)
# with the official epsilon, log(p (1 - 2e-7) + 1e-7); the others stay in exact logarithms
GUARDED = {"neuralsort", "softsort", "sinkhorn_sort", "sparse_topk", "perturbed_topk"}
GUARDED |= {name for name, method in METHODS.items() if method.family == "networks"}
RELAXED = tuple(name for name in RELAXATIONS if name in DETERMINISTIC)
# whose indicators do not sum to k, nor do rows of P to 1
WITHOUT_A_SUM = ("df_topk", "recall_surrogate")
# whose indicators have zeros: their losses want a part of the softmax
HAVE_ZEROS = {"sparse_topk", "perturbed_topk"}
MODES = [(method, mode) for method in RELAXED for mode in TOP1_MODES if mode != "sort" or method not in HAVE_ZEROS]
WITH_MODES = [*MODES, *((method, None) for method in DETERMINISTIC if method not in RELAXED)]
# whose operators a kernel computes in float32; every backend computes the others alike
WITH_KERNELS = {"sinkhorn_sort", "smooth_topk", "smooth_hard_topk", "subset_topk"}
WITH_KERNELS |= {name for name, method in METHODS.items() if method.family == "networks"}
# PyTorch's, along a random direction of all entries: a quarter of the time of one entry after the other. There an error
# in one entry is a small part of the whole, whence these tolerances.
gradcheck = partial(autograd.gradcheck, fast_mode=True, rtol=1e-6, atol=1e-8)
gradgradcheck = partial(autograd.gradgradcheck, fast_mode=True, rtol=1e-6, atol=1e-8)


def with_backends(cases, eager=("torch",), compiled=("",)) -> list[tuple]:
    """Each case, whose first item is a method, by PyTorch, and by the default backend where that has a kernel."""
    found = []
    for case in cases:
        backends = [*eager, *compiled] if case[0] in WITH_KERNELS else eager
        found += [(*case, backend) for backend in backends]
    return found


def p_k_of(method: str, k: int = 5):
    """A P_K that every method takes: half on 1 and half on k, for those of a single k on k, for those of none on 1."""
    if method in RELAXATIONS:
        return {1: 0.5, k: 0.5}
    return 1 if method in TOP1 else k


def random_batch(batch=6, n=12, scale=2.0, dtype=torch.float64, seed=0) -> tuple[Tensor, Tensor]:
    """logits (batch, n) and labels (batch,)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, n, dtype=dtype, generator=generator) * scale
    return logits, torch.randint(n, (batch,), generator=generator)


def random_logits(batch, n, scale=1.0, dtype=torch.float64, seed=0) -> Tensor:
    return random_batch(batch, n, scale, dtype, seed)[0]


def value_and_gradient(function, logits: Tensor, *others) -> tuple[Tensor, Tensor]:
    """What a loss or an operator gives, and the gradient of its sum by the logits."""
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf, *others)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


@dataclass
class Bound:
    """An operator with the number of ranks and the inverse temperature of a test; None: its default."""

    operator: TopKOperator
    k: int
    beta: float | Tensor | None = None

    def permutation_matrix(self, logits, **given):
        return self.operator.permutation_matrix(logits, self.k, **{"inverse_temperature": self.beta, **given})

    __call__ = permutation_matrix

    def rank_probabilities(self, logits, labels, **given):
        return self.operator.rank_probabilities(logits, labels, self.k, **{"inverse_temperature": self.beta, **given})

    def topk_mass(self, logits, sets, **given):
        return self.operator.topk_mass(logits, sets, self.k, **{"inverse_temperature": self.beta, **given})

    def mask(self, logits, k=None, **given):
        k = self.k if k is None else k
        return self.operator.mask(logits, k, **{"inverse_temperature": self.beta, **given})

    def exact(self):
        """The same, with a transport that is solved to the last digits."""
        if not hasattr(self.operator, "tolerance"):
            return self
        return Bound(replace(self.operator, tolerance=1e-13), self.k, self.beta)


def bound(method, k, beta=None, distribution=None) -> Bound:
    """The operator of a method, with k ranks and an inverse temperature."""
    return Bound(make_operator(method, distribution), k, beta)
