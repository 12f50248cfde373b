"""A kill inside a write leaves the old file or the new one, whichever script writes and whatever it writes.

The system kills a process that writes more than so many bytes into one file: so it ends in the middle of a write.
"""

import csv
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from experiments.common.settings import cell
from tests.scripts.trained import BEAM

ROOT = Path(__file__).parents[2]
# Reads lines of [module, limit in bytes, working directory, words], and tells the signal that ended each.
KILLER = """
import importlib, json, os, resource, signal, sys
import experiments.train_beam_search, scripts.epochs, scripts.relabel, scripts.report
for line in sys.stdin:
    module, limit, folder, words = json.loads(line)
    if not (child := os.fork()):
        os.chdir(folder)
        os.dup2(2, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        os._exit(importlib.import_module(module).main(words.split()))
    status = os.waitpid(child, 0)[1]
    print(-os.waitstatus_to_exitcode(status), flush=True)
"""
ARM = f"--arm cross_entropy --method softmax_cross_entropy {BEAM} --eval_freq 1 --pretrain_updates 24"
SIGXFSZ = 25


def is_whole(path: Path) -> bool:
    """Whether a file of a run folder can be read to its end."""
    if path.suffix == ".json":
        return bool(json.loads(path.read_text()))
    if path.suffix == ".pt":
        return bool(torch.load(path, weights_only=True)["history"])
    lines = list(csv.reader(path.open(newline="")))
    return path.read_text().endswith("\n") and {len(line) for line in lines} == {len(lines[0])}


def test_a_kill_inside_a_write_leaves_the_old_file_or_the_new_one(trained, tmp_path):
    old = "the old file\n" * 10
    calls = []
    checks = []

    def case(written: str, module: str, limit: int, words: str, kept: dict[str, str]) -> None:
        folder = tmp_path / f"when {written} is written"
        folder.mkdir()
        for file, content in kept.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(content)
        calls.append([module, limit, str(folder), words])
        checks.append((written, folder, kept))

    table = (trained / "cifar.csv").read_text()
    case("cifar_accuracy.svg", "scripts.report", 4000, f"{trained}/cifar.csv --figures .", {"cifar_accuracy.svg": old})
    case("t.md", "scripts.report", 200, f"{trained}/cifar.csv --output t.md", {"t.md": old})
    case("cifar_epochs.csv", "scripts.epochs", 200, f"cifar.csv --runs {trained}/runs", {"cifar.csv": table})
    noise = f"{trained}/heads.pt --label_noise .4 --among 100 --num_valid 100 --output new.pt"
    case("new_true.pt", "scripts.relabel", 2000, noise, {})
    row = table.splitlines()[1].partition(",")[2]
    header = table.splitlines()[0]
    many = "".join(f"{number},{row}\n" for number in range(3000))
    case("beam.csv", "experiments.train_beam_search", 1_000_000, ARM, {"beam.csv": f"{header}\n{many}"})
    for written, limit in (("config.json", 200), ("updates.csv", 1000), ("checkpoint.pt", 6000)):
        case(written, "experiments.train_beam_search", limit, ARM, {})
    lines = "".join(f"{json.dumps(call)}\n" for call in calls)
    done = subprocess.run(
        [sys.executable, "-c", KILLER], input=lines, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == [cell(SIGXFSZ)] * len(calls), done.stderr[-2000:]
    for written, folder, kept in checks:
        (left,) = folder.rglob("*.tmp")
        assert re.fullmatch(rf"\.{re.escape(written)}\.{re.escape(platform.node())}\.\d+\.tmp", left.name)
        for file, content in kept.items():
            assert (folder / file).read_bytes() == content.encode(), (folder, file)
        others = [path for path in folder.rglob("*.*") if path.suffix in (".csv", ".json", ".pt")]
        assert all(map(is_whole, {*others} - {folder / file for file in kept})), folder
