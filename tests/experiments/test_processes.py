"""A training process asks for huge pages, with which its figures are the same bits, and says where bf16 is slow."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import train_knn
from experiments.common.cores import HUGE_PAGES

ROOT = Path(__file__).parents[2]
NOT_ASKED = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "THP_MEM_ALLOC_ENABLE": "0"}
ASKED_MAPPINGS = """
import torch
from experiments.common.processes import prepare_device
prepare_device(torch.device("cpu"), 1)
tensor = torch.ones(1 << 24)  # 64 MiB
flags = [line.split() for line in open("/proc/self/smaps") if line.startswith("VmFlags")]
print(sum("hg" in words for words in flags))
"""


def environment(settings: dict[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in HUGE_PAGES}
    return inherited | {"PYTHONPATH": str(ROOT)} | settings


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize(("settings", "expected"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_large_tensors_ask_for_huge_pages(settings, expected):
    command = [sys.executable, "-c", ASKED_MAPPINGS]
    printed = subprocess.run(command, env=environment(settings), check=True, capture_output=True, text=True).stdout
    assert (int(printed) > 0) is expected


def run(script: str, flags: str, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments" / f"{script}.py"), *shlex.split(flags)]
    return subprocess.run(command, env=environment(settings), check=True, capture_output=True, text=True)


def test_huge_pages_change_no_bit(tmp_path):
    """One epoch of three batches."""
    flags = "--dataset digits --limit_train 48 --batch_size 16 --n_epochs 1 --method softsort --device cpu --threads 1"
    rows = []
    for name, settings in {"without": NOT_ASKED, "with": HUGE_PAGES}.items():
        results = tmp_path / name / "rows.csv"
        run("train_cifar100", f"{flags} --results {shlex.quote(str(results))}", settings)
        rows.append(pd.read_csv(results).iloc[0])
    columns = [name for name in rows[0].index if name.endswith("_loss") or "_top" in name]
    assert len(columns) > 20
    assert rows[0][columns].equals(rows[1][columns])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_note_says_where_bf16_is_slow(precision, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    flags = f"""
        --dataset digits --model linear --limit_train 200 --n_epochs 1 --method softsort --device cpu --threads 1
        --precision {precision} --results {shlex.quote(str(tmp_path / "rows.csv"))}
    """
    assert train_knn.main(shlex.split(flags)) == 0
    assert ("note: this processor has no AVX-512" in capsys.readouterr().err) is (precision == "bf16")
