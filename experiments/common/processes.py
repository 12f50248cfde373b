"""The processes of one run, as torchrun starts them, and the device and threads of each.

    processes = Processes(args.device, args.threads)
    share = processes.share(batch_size)                         # this process's slice of every global batch
    loss = loss_fn(model(images[share]), labels[share]) * processes.weight(batch_size)
    loss.backward()
    processes.sum_gradients(model.parameters())                 # the gradient of the mean over the global batch

With one process every method returns at once. The buckets of DistributedDataParallel change after the
first step, and a resumed run would differ in the last bits: gradients are summed here instead.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn

from experiments.common.cores import HUGE_PAGES, usable_cores

Value = TypeVar("Value")
PATIENCE = timedelta(hours=24)  # the first process may download for hours; a process that dies is noticed at once


class Processes:
    """The number of processes, `count`; this process's `rank` among all, and its `device`.

    Args:
        device: auto, cpu, cuda or cuda:<number>; under torchrun cuda is the GPU of the local rank.
        threads: number of CPU threads (default: one per core).

    Raises:
        SystemExit: this machine has no such GPU.
    """

    def __init__(self, device: str = "cpu", threads: int | None = None) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.is_first = self.rank == 0
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.device = torch.device(("cuda" if num_gpus else "cpu") if device == "auto" else device)
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if self.device.index >= num_gpus:
                raise SystemExit(
                    f"error: --device {device}: this machine has {num_gpus} GPUs; take --device cpu, or auto"
                )
        prepare_device(self.device, threads)
        if self.count > 1:
            distributed.init_process_group("cpu:gloo,cuda:nccl" if num_gpus else "gloo", timeout=PATIENCE)

    def print(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)

    def share(self, length: int) -> slice:
        """This process's part of a batch or split: contiguous, and as long as any other's or one longer.

        Raises SystemExit where there are more processes than samples: a mean over none is not a number.
        """
        if length < self.count:
            raise SystemExit(f"error: a batch or split of {length} for {self.count} processes: start fewer of them")
        return slice(length * self.rank // self.count, length * (self.rank + 1) // self.count)

    def weight(self, length: int) -> float:
        """What a mean over this process's share contributes to the mean over the whole."""
        share = self.share(length)
        return (share.stop - share.start) / length

    def from_first(self, function: Callable[[], Value]) -> Value:
        """Call `function` in the first process; return its value, which must be picklable, to all."""
        value = [function() if self.is_first else None]
        if self.count > 1:
            distributed.broadcast_object_list(value, 0)
        return value[0]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in place."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the first one's values of a model's parameters or buffers."""
        for tensor in tensors if self.count > 1 else ():
            received = tensor.contiguous()
            distributed.broadcast(received, 0)
            tensor.copy_(received)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes, in one message."""
        if self.count > 1:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
                gradient.copy_(summed.view_as(gradient))

    def close(self) -> None:
        """Part from the others, after a run that succeeded."""
        if self.count > 1:
            distributed.destroy_process_group()


def prepare_device(device: torch.device, threads: int | None) -> None:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", HUGE_PAGES["THP_MEM_ALLOC_ENABLE"])  # read at the first tensor
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    Given back between two steps, large tensors return as new pages, which the kernel zeroes: a tenth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation is a mapping of its own, unmapped when it is freed
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink
