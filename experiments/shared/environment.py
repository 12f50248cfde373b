"""Where a run happens: device, threads, determinism, peak memory, and the versions that a row records."""

import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy
import torch

from data.program import CommandLineError
from experiments.shared.cores import usable_cores

ROOT = Path(__file__).resolve().parents[2]


def resolve_device(name: str) -> torch.device:
    """Return the device of "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:<index>". CommandLineError."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,9})?", name):
        raise CommandLineError(f"--device must be auto, cpu, cuda or cuda:<index>, got {name!r}")
    if name == "cpu":
        return torch.device(name)
    index = int(name[5:] or 0)
    if index >= count:
        available = f"this machine has {count} (cuda:0 to cuda:{count - 1})" if count else "PyTorch sees no GPU here"
        raise CommandLineError(f"--device {name} is not there: {available}; use --device cpu or auto")
    return torch.device("cuda", index)


def set_up_device(device: torch.device, threads: int | None, deterministic: bool) -> None:
    """Apply --threads (without it PyTorch's choice, at most one per core) and --deterministic, process-wide."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
    if device.type == "cuda":
        torch.cuda.init()  # the statistics are not there before
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # cuBLAS reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        # On CUDA the backward pass of max-pooling has no deterministic kernel: warn there rather than stop.
        torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc.

    Given back between two steps, large tensors return as new pages, which the kernel zeroes: a tenth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation is a mapping of its own, unmapped when it is freed
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory used so far: by tensors on a GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return models[0].strip() if models else platform.processor() or platform.machine()


def git_commit() -> str:
    """Return this checkout's commit, "-dirty" if tracked files outside results/ differ; empty where there is none."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return the row's columns on hardware and software, under the names of run_record.COLUMNS."""
    return {
        "device_name": device_name(device),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "torchvision_version": version("torchvision"),  # importing it takes two seconds, and not all need it
        "numpy_version": numpy.__version__,
    }
