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
import re
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

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
        precision: of the network, fp32 or bf16; a note says where the processor has no instructions for it.

    Raises:
        ValueError: this machine has no such device, or the variables of torchrun are incomplete.
    """

    def __init__(self, device: str = "cpu", threads: int | None = None, precision: str = "fp32") -> None:
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = 0
        local_rank = 0
        if self.count > 1:  # a process alone is the first, whatever variables a cluster has left behind
            check_variables()
            self.rank = int(os.environ["RANK"])
            local_rank = int(os.environ["LOCAL_RANK"])
        self.is_first = self.rank == 0
        self.device = choose_device(device, local_rank)
        prepare_device(self.device, threads)
        if self.count > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, timeout=PATIENCE)
        if self.is_first:
            note_if_slow(self.device, precision)

    def print(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)

    def share(self, length: int) -> slice:
        """This process's part of a batch or split: contiguous, and as long as any other's or one longer.

        Raises ValueError where there are more processes than samples: a mean over none is not a number.
        """
        if length < self.count:
            raise ValueError(f"a batch or split of {length} for {self.count} processes: start fewer of them")
        return slice(length * self.rank // self.count, length * (self.rank + 1) // self.count)

    def weight(self, length: int) -> float:
        """What a mean over this process's share contributes to the mean over the whole."""
        share = self.share(length)
        return (share.stop - share.start) / length

    def from_first(self, function: Callable[[], Value]) -> Value:
        """Call `function` in the first process; return its value, which must be picklable, to all."""
        if self.count == 1:
            return function()
        value: list[Any] = [None]
        if self.is_first:
            value[0] = function()
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
        if self.count == 1:
            return
        for tensor in tensors:
            received = tensor.contiguous()
            distributed.broadcast(received, 0)
            tensor.copy_(received)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes, in one message."""
        if self.count == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        place = 0
        for gradient in gradients:
            summed = flat[place : place + gradient.numel()]
            gradient.copy_(summed.view_as(gradient))
            place += gradient.numel()

    def close(self) -> None:
        """Part from the others, after a run that succeeded."""
        if self.count > 1:
            distributed.destroy_process_group()


def check_variables() -> None:
    """Raise ValueError if WORLD_SIZE is set without the other variables of torchrun."""
    for variable in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {variable} is not set: start several processes by "
                "torchrun, or unset WORLD_SIZE"
            )


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device auto, cpu, cuda or cuda:<number>. Raises ValueError if this machine has none of that name."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:1, got {name}")
    if name == "cpu":
        return torch.device(name)
    index = local_rank
    if ":" in name:
        index = int(name.partition(":")[2])
    if index >= num_gpus:
        raise ValueError(f"--device {name}: this machine has {num_gpus} GPUs; take --device cpu, or auto")
    return torch.device("cuda", index)


def note_if_slow(device: torch.device, precision: str) -> None:
    """Print a note where PyTorch has no fast code in bf16 for this processor; on x86 it needs AVX-512."""
    if precision == "bf16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        note = "note: this processor has no AVX-512, and takes many times as long in bf16 as in fp32"
        print(note, file=sys.stderr, flush=True)


def prepare_device(device: torch.device, threads: int | None) -> None:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", HUGE_PAGES["THP_MEM_ALLOC_ENABLE"])  # read at the first tensor
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    keep_freed_memory()


def compiled(model: nn.Module, wanted: bool, device: torch.device) -> nn.Module:
    """Compile a module if wanted; on a GPU its kernels are launched as one CUDA graph."""
    if not wanted:
        return model
    if device.type == "cuda":
        return torch.compile(model, mode="reduce-overhead")
    return torch.compile(model)


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    Given back between two steps, large tensors return as new pages, which the kernel zeroes: a tenth of a step.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation is a mapping of its own, unmapped when it is freed
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink
