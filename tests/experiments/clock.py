"""A clock that training and evaluation move, so that columns of seconds can be compared exactly."""

from collections.abc import Callable

STEP = 1e4  # seconds of a training step; how long the test itself takes is nothing beside it
EVALUATED = 1e7  # seconds of a module's call in an evaluation


class Clock:
    """What passed besides the seconds of the machine: `offset`, of so many training steps and calls in evaluations."""

    def __init__(self) -> None:
        self.offset = 0.0
        self.steps = 0
        self.calls = 0

    def shifted(self, real: Callable[[], float]) -> Callable[[], float]:
        return lambda: real() + self.offset
