"""Devices are resolved or refused with a sentence; what a row says about the machine is there."""

import platform
import resource
import subprocess

import pytest
import torch
from data.program import CommandLineError
from experiments.shared import cores, environment
from experiments.shared.environment import (
    describe_environment,
    git_commit,
    keep_freed_memory,
    peak_memory_mib,
    resolve_device,
)

from tests.processes import run


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("auto", "cuda", "cuda:1", "cpu")
    assert [str(resolve_device(name)) for name in names] == ["cuda:0", "cuda:0", "cuda:1", "cpu"]
    with pytest.raises(CommandLineError, match="this machine has 2"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(resolve_device("auto")) == "cpu"
    with pytest.raises(CommandLineError, match="no GPU here; use --device cpu"):
        resolve_device("cuda")
    for name in ("", "gpu", "cuda:", "cuda:-1", "mps", "cpu:0", "CPU"):
        with pytest.raises(CommandLineError, match="--device must be auto, cpu, cuda or cuda:<index>"):
            resolve_device(name)


def test_threads_are_given_or_one_per_core_and_hardware_threads_of_one_count_once(monkeypatch):
    siblings = {0: "0,4", 4: "0,4", 1: "1,5"}
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(siblings), raising=False)
    monkeypatch.setattr(cores, "_siblings", siblings.get)
    assert cores.usable_cores() == 2
    for given, started_with, expected in ((None, 4, 2), (None, 1, 1), (3, 1, 3)):
        torch.set_num_threads(started_with)
        environment.set_up_device(torch.device("cpu"), given, deterministic=False)
        assert torch.get_num_threads() == expected


def pages_fetched() -> int:
    """The fewest that a tensor of 64 MiB took, more than malloc would keep."""
    keep_freed_memory()
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(64, 2**18)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(min(faults))  # a system short of memory may take pages away in between
    return 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_memory_that_is_kept_is_not_fetched_again():
    assert int(run(pages_fetched).stdout) < 1000


def test_the_machine_is_described():
    description = describe_environment(torch.device("cpu"))
    assert all(description.values())
    assert description["torch_version"] == torch.__version__
    assert peak_memory_mib(torch.device("cpu")) > 50


def test_the_commit_is_marked_when_tracked_files_outside_results_differ(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert git_commit() == ""
    git("init")
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/table.csv"):
        (tmp_path / name).write_text("before")
    git("add", ".")
    git("commit", "-m", "first")
    clean = git_commit()
    assert len(clean) == 40
    (tmp_path / "results" / "table.csv").write_text("a new row")
    (tmp_path / "untracked").touch()
    assert git_commit() == clean
    (tmp_path / "code.py").write_text("after")
    assert git_commit() == clean + "-dirty"
