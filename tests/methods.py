"""The methods by what tests must know of them: those that draw no noise, and so are functions of their arguments."""

from topk_losses import METHODS, RELAXATIONS

DETERMINISTIC = tuple(name for name, method in METHODS.items() if not method.stochastic)
# with the official guard, log(p (1 - 2e-7) + 1e-7); the others stay in exact logarithms
GUARDED = {"neuralsort", "softsort", "sinkhorn_sort", "sparse_topk", "perturbed_topk"}
GUARDED |= {name for name, method in METHODS.items() if method.network}
RELAXED = tuple(name for name in RELAXATIONS if name in DETERMINISTIC)
