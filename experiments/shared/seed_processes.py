"""Several seeds of one row at the same time, one process each.

A process, since nothing less shares a machine well: threads wait for one another in the interpreter, and with stacked
parameters (torch.func.vmap) a convolution has a group per seed, is slower than one after another, and has other bits.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch

from data import program
from experiments.shared.command_line import AlreadyRecorded, check, finish
from experiments.shared.cores import usable_cores
from experiments.shared.ranks import Ranks

# Seconds after which SIGTERM is sent again: the exception that it raises is lost where it comes in a callback from C,
# as of Numba's compiler.
LOST_AFTER = 5


def division(num_seeds: int, threads: int | None, on_gpu: bool) -> tuple[int, int]:
    """Return how many processes run at a time, and the CPU threads of each. threads: --threads.

    Not by what is left to do: with other threads a resumed seed would end with other bits. On a GPU all run at a time.
    """
    cores = usable_cores()
    threads = threads or max(1, min(torch.get_num_threads(), cores // min(num_seeds, cores)))
    return (num_seeds if on_gpu else min(num_seeds, max(1, cores // threads))), threads


def each_seed(begin: Callable[..., Any], train: Callable[[Any, Ranks], int], args: Any, ranks: Ranks) -> int:
    """Call `train` with the arguments, or for each of several seeds in a process of its own; return the exit status.

    begin: refuses, with the same arguments, what can be refused, and raises AlreadyRecorded: here, once, not in each.
    """
    if len(args.seeds) == 1:
        return train(args, ranks)
    told = f"--seeds starts a process per seed, and torchrun has started {ranks.count}: give one --seed"
    check(ranks.count == 1, told)
    on_gpu = ranks.device(args.device).type == "cuda"
    # A GPU, and what it alone can do, is left to the processes.
    here = {"device": "cpu"} | ({"graph": False} if on_gpu and hasattr(args, "graph") else {})
    unfinished = []
    for seed in args.seeds:
        with contextlib.suppress(AlreadyRecorded):
            begin(dataclasses.replace(args, seed=seed, **here), ranks)
            unfinished.append(dataclasses.replace(args, seed=seed))
    if not unfinished:
        return 0
    at_a_time, threads = division(len(args.seeds), args.threads, on_gpu)
    for number, each in enumerate(unfinished):
        each.threads = threads
        if on_gpu and each.device in ("auto", "cuda"):
            each.device = f"cuda:{number % torch.cuda.device_count()}"
    statuses = run_seeds(train, unfinished, at_a_time)
    failed = [f"{each.seed} (status {statuses[each.seed]})" for each in unfinished if statuses[each.seed] != 0]
    if failed:
        told = f"{len(failed)} of {len(args.seeds)} seeds failed: {', '.join(failed)}"
        print(f"error: {told}. The same command trains what is not recorded", file=sys.stderr)
    return 1 if failed else 0


def run_seeds(train: Callable[[Any, Ranks], int], waiting: Sequence[Any], at_a_time: int) -> dict[int, int | None]:
    """Call `train` for each seed in a process of its own; return the exit statuses. A failure stops no other."""
    processes = multiprocessing.get_context("spawn")  # forked, a process could use neither CUDA nor OpenMP
    waiting = list(waiting)
    running, statuses = {}, {}
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                args = waiting.pop(0)
                process = processes.Process(target=_watched, args=(train, args))
                # Ctrl-C reaches every process of a terminal; this one stops the others, with SIGTERM.
                previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
                process.start()
                signal.signal(signal.SIGINT, previous)
                running[process.sentinel] = args.seed, process
            for sentinel in wait(list(running)):
                seed, process = running.pop(sentinel)
                process.join()
                statuses[seed] = process.exitcode
    finally:
        while running:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join(LOST_AFTER)
            running = {sentinel: each for sentinel, each in running.items() if each[1].is_alive()}
    return statuses


def _watched(train: Callable[[Any, Ranks], int], args: Any) -> None:
    """Train, and stop as for SIGTERM when the process that started this one is no more, killed even."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LOST_AFTER)

    program.begin()
    threading.Thread(target=watch, daemon=True).start()
    program.end(finish(lambda ranks: train(args, ranks), stopped="", name=f"seed {args.seed}: "))
