"""Processes of the tests that start in milliseconds: forked from a server that has imported what takes seconds.

A script's main does in one what the script does as a program. What needs the real thing (an interpreter that imports,
torchrun, `spawn`) is started once per script.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.run

SERVER = multiprocessing.get_context("forkserver")
# It imports them once and runs no tensor operation: a fork of it has nothing to inherit.
SERVER.set_forkserver_preload(
    [
        *("sklearn.datasets", "sklearn.model_selection", "moto.server", "torch.distributed.run"),
        *(f"experiments.{name}" for name in ("train_cifar100", "finetune_imagenet", "extract_embeddings")),
        *(f"benchmarks.{name}" for name in ("finetuning", "machine")),
        *(f"benchmarks.{name}" for name in ("recipe", "scaling", "transport")),
    ]
)


def _begin(work: Callable[[], int], words: Sequence[str], streams: Sequence[Path], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(streams, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    multiprocessing.set_start_method(None, force=True)  # that of the platform, and not the server's
    sys.argv = ["program", *words]
    torch.set_num_threads(1)
    sys.exit(work())


def wait_for(
    condition: Callable[[], object],
    alive: Callable[[], object] = lambda: True,
    told: Callable[[], str] = lambda: "nothing happened",
    seconds: float = 120,
) -> None:
    """Until `condition()` holds, as long as what brings it about is alive; told: what is said where it does not."""
    deadline = time.monotonic() + seconds
    while True:
        was_alive = alive()  # asked first: it may end as soon as the condition holds
        if condition():
            return
        assert was_alive, told()
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)


class Ended(NamedTuple):
    """How a program ended: its status, or minus the number of the signal that ended it, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Program:
    """`work` in a process of its own, which ends with the status that it returns; `words` is its command line.

    work: a function at the top of a module, such as a script's main, or a functools.partial of one. What it prints is
    in `stdout` and `stderr`, files of `folder`. environment: beside that of this process.
    """

    def __init__(self, work: Callable[[], int], words: Sequence[object] = (), *, folder: Path, **environment: object):
        number = len(list(folder.glob("program.*.stdout")))
        self.stdout, self.stderr = (folder / f"program.{number}.{name}" for name in ("stdout", "stderr"))
        self.stdout.touch()
        self.stderr.touch()
        environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        arguments = (work, [str(word) for word in words], (self.stdout, self.stderr), environment)
        self.process = SERVER.Process(target=_begin, args=arguments)
        self.process.start()

    def wait_for(self, text: str) -> None:
        """Until it has printed `text`."""
        wait_for(lambda: text in self.stdout.read_text(), self.process.is_alive, self.stderr.read_text)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 120) -> Ended:
        """Wait for its end."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"it does not end: {self.stderr.read_text()}")
        return Ended(self.process.exitcode, self.stdout.read_text(), self.stderr.read_text())


def run(work: Callable[[], int], *words: object, **environment: object) -> Ended:
    """Run `work` as a program to its end."""
    with tempfile.TemporaryDirectory() as folder:
        return Program(work, words, folder=Path(folder), **environment).end()


def together(count: int, folder: Path, work: Callable[[], int]) -> tuple[list[int], list[str]]:
    """Let `count` processes work in the environment that torchrun makes; return the status and the output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    started = [Program(work, folder=folder, **place, RANK=rank, LOCAL_RANK=rank) for rank in range(count)]
    try:
        ended = [program.end(60) for program in started]
    finally:
        for program in started:
            program.process.kill()
    return [each.returncode for each in ended], [each.stdout + each.stderr for each in ended]


def torchrun(script: str | Path, words: Sequence[object]) -> Ended:
    """Let torchrun start two processes of a script: real ones, which import what they need."""
    # The --: torchrun takes --m, which may follow, for an abbreviation of its own flags.
    launcher = ("--standalone", "--nproc_per_node=2", "--")
    return run(torch.distributed.run.main, *launcher, script, *words, OMP_NUM_THREADS=1)
