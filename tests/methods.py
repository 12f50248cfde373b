"""The methods by what tests must know of them: those that draw no noise, and so are functions of their arguments."""

from topk_losses import METHODS, RELAXATIONS

DETERMINISTIC = tuple(name for name, method in METHODS.items() if not method.stochastic)
RELAXED = tuple(name for name in RELAXATIONS if name in DETERMINISTIC)
