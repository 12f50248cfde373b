"""A training step as one CUDA graph: recorded once, then launched as a whole, since a small network waits for launches.

What a step reads must lie where it lay when the graph was recorded: its tensors are copied into the first ones, and
what changes from step to step (rate, inverse temperature, noise) is written in place. No GPU has seen this yet.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

WARM_UP = 5  # real steps, on a stream of their own, before the graph is recorded: what they allocate stays


def record(step: Callable[[], Any], generator: torch.Generator | None) -> tuple[Any, Callable[[], None]]:
    """Record a step, which isn't taken by that; return what it will return, and what takes it.

    generator: whose numbers it draws, to be seeded between steps.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        returned = step()
    return returned, graph.replay


class GraphedStep:
    """step(*arguments) -> (Tensor, Tensor or None), tensors of the same shapes each time, other arguments unchanged."""

    def __init__(self, step: Callable[..., tuple[Tensor, Tensor | None]], device: torch.device) -> None:
        self.step, self.device, self.taken, self.replay = step, device, 0, None

    def __call__(self, generator: torch.Generator | None, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Take a step, whose noise is drawn from that generator."""
        self.taken += 1
        if self.taken <= WARM_UP:
            return self._on_another_stream(*arguments)
        if self.replay is None:
            self.inputs = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
            self.outputs, self.replay = record(partial(self.step, *self.inputs), generator)
        for place, each in zip(self.inputs, arguments):
            if isinstance(each, Tensor):
                place.copy_(each)
        self.replay()
        loss, result = self.outputs
        return loss.clone(), result if result is None else result.clone()

    def _on_another_stream(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            returned = self.step(*arguments)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return returned
