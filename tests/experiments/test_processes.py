"""Memory of a training process: it asks for huge pages, and its figures are the same bits with and without them."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

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


def test_huge_pages_change_no_bit(tmp_path):
    script = ROOT / "experiments" / "train_cifar100.py"
    rows = []
    for name, settings in {"without": NOT_ASKED, "with": HUGE_PAGES}.items():
        flags = [
            "--dataset",
            "digits",
            "--limit_train",
            "48",
            "--batch_size",
            "16",
            "--n_epochs",
            "1",
            "--method",
            "softsort",
        ]
        results = tmp_path / name / "rows.csv"
        command = [sys.executable, str(script), *flags, "--device", "cpu", "--results", str(results)]
        subprocess.run(command, env=environment(settings), check=True, capture_output=True)
        rows.append(pd.read_csv(results).iloc[0])
    columns = [name for name in rows[0].index if name.endswith("_loss") or "_top" in name]
    assert len(columns) > 20
    assert rows[0][columns].equals(rows[1][columns])
