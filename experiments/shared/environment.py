"""Where a run happens: device, threads, determinism, peak memory, and the versions that a row records."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import torch
import torchvision

from experiments.shared.cores import usable_cores

ROOT = Path(__file__).resolve().parents[2]


def resolve_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu", "cuda" or "cuda:<index>" names; "auto" is CUDA where there is
    one.

    Raises ValueError for any other name and for a GPU that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()) or name == "cuda:":
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:<index>, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        available = f"this machine has {count} (cuda:0 to cuda:{count - 1})" if count else "PyTorch sees no GPU here"
        raise ValueError(f"--device {name} is not there: {available}; use --device cpu or auto")
    return torch.device("cuda", int(index or 0))


def check_compiler() -> None:
    """Raise ValueError unless there is the compiler that torch.compile needs."""
    names = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "c++", "gcc", "clang", "cc", "cl"]
    if not any(shutil.which(name) for name in names if name):
        raise ValueError("--compile needs a C++ compiler, and none is on PATH; install g++, or leave --compile out")


def set_up_device(device: torch.device, threads: int | None, deterministic: bool) -> None:
    """Apply --threads and --deterministic, process-wide, before the first tensor is placed on the device.

    threads: None for PyTorch's choice, which OMP_NUM_THREADS decides, but no more than there are cores.
    """
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
    """Let this process keep the memory that it frees, where the C library is glibc; elsewhere nothing happens.

    For loops whose steps need the same large tensors. Given back in between, they return as new pages, which the kernel
    zeroes one by one: a tenth of a ResNet-18's step in fp32, and of that of a head of 10,450 classes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation is a mapping of its own, unmapped when it is freed
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory used so far: by tensors on a GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """Return the commit of this checkout, with "-dirty" if tracked files outside results/ differ from it.

    The rows that runs append to results/ must not mark the next run. Empty without git or outside a
    repository.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("-dirty" if dirty else "")


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return the row's columns on hardware and software, under the names of run_record.COLUMNS."""
    return {
        "device_name": device_name(device),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "torchvision_version": torchvision.__version__,
        "numpy_version": numpy.__version__,
    }
