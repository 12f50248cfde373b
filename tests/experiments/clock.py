"""A clock that training and evaluation move, so that columns of seconds can be compared exactly."""

from collections.abc import Callable


class Clock:
    """What passes besides the seconds of the machine, which are nothing beside it."""

    def __init__(self) -> None:
        self.step = 1e4  # seconds of a training step
        self.evaluated = 1e7  # seconds of a module's call in an evaluation
        self.offset = 0.0  # seconds so far
        self.steps = 0
        self.calls = 0

    def shifted(self, real: Callable[[], float]) -> Callable[[], float]:
        return lambda: real() + self.offset
