"""Where and when a run was computed: time, machine, memory, commit."""

import platform
import re
import resource
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from experiments.common.paths import ROOT


def utc_now() -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return now.replace("+00:00", "Z")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE)
        if model:
            return model[1].strip()
    return platform.processor() or platform.machine()


def peak_memory_mib(device: torch.device) -> float:
    """The most memory used so far: by tensors on a GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak / 2**20  # macOS counts bytes
    return peak / 2**10  # Linux counts KiB


def git_commit() -> str:
    """This checkout's commit, "-dirty" where tracked files outside results/ differ.

    Empty without git, and within another repository, whose commits do not say what this code was.
    """
    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return ""
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        commit = git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""
    if changed:
        return f"{commit}-dirty"
    return commit


def joined(earlier: str, later: str) -> str:
    """The commits of what was computed by two, a+b, each once; either may be such a text itself."""
    commits = dict.fromkeys([*earlier.split("+"), *later.split("+")])
    return "+".join(filter(None, commits))


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
