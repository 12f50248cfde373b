"""Commands in processes of their own, forked from one that has imported the scripts, which takes seconds."""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from types import ModuleType

from torch.distributed import TCPStore

from experiments import extract_embeddings, train_cifar100
from tests.experiments import scripts

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = (extract_embeddings.__name__, scripts.__name__, "sklearn.datasets", "sklearn.model_selection")
FORKS.set_forkserver_preload(IMPORTED)  # scripts imports the others; the process itself computes nothing


def command(name: str, words: list[str], environment: dict[str, str], killed_at: int | None) -> None:
    """Run a script by its module's name; with the small network instead of the ResNet.

    killed_at: the number of the file, counted from 0 as they take their names, with which the process kills itself:
    before an even one has its name, after an odd one has.
    """
    os.environ.update(environment)
    train_cifar100.resnet_cifar = scripts.small_network
    real = os.replace
    numbers = iter(range(10**9))

    def replace(source: str, target: str) -> None:
        number = next(numbers)
        if number == killed_at and number % 2 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace
    importlib.import_module(name).main(words)


def ended(processes: list) -> list[int]:
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def fork(script: ModuleType, words: list[str], killed_at: int | None = None) -> int:
    """Run a command to its end, or until it kills itself; return its exit status."""
    (status,) = ended([FORKS.Process(target=command, args=(script.__name__, words, {}, killed_at))])
    return status


def fork_together(
    script: ModuleType, words: list[str], count: int = 2, target: Callable = command, killed_at: int | None = None
) -> list[int]:
    """Run a command in so many processes that know one another as those of torchrun do; return their statuses.

    killed_at: as of `command`, of the first process, after which the others end by themselves.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # any free port
    processes = []
    for rank in range(count):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as torchrun: the store is there already
        own = killed_at if rank == 0 else None
        processes.append(FORKS.Process(target=target, args=(script.__name__, words, environment, own)))
    return ended(processes)
