"""A run: one configuration, its folder results/runs/<name>/, its checkpoint, and its one row in a results file.

    run = Run(args, config, IDENTITY, READABLE, processes)
    if not run.begin():                                          # the row is there already
        return
    model, optimizer = ...
    run.resume(model=model, optimizer=optimizer)
    for epoch in range(run.done + 1, args.n_epochs + 1):
        ...
        run.save({"epoch": epoch, "train_loss": ...}, last=epoch == args.n_epochs)
    run.record({"num_classes": 100})

Files are replaced, never edited, and a checkpoint is written every --checkpoint_seconds. A run that ends in any way
(Ctrl-C, kill -9, a crash, a time limit) loses at most what came since, and the same command continues it with the same
bits. Under torchrun all processes call these methods; only the first writes and prints.
"""

import json
import re
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from data.torch_file import load_torch_file, reason
from experiments.common import records
from experiments.common.flags import portable
from experiments.common.metrics import summary
from experiments.common.processes import Processes

HISTORY_FILES = {"epoch": "epochs.csv", "step": "evaluations.csv", "update": "updates.csv"}  # by the clock
SHOWN = re.compile("train_loss|(valid|test)_top[15]|valid_wer|valid_per|test_wer_.*")  # printed after an evaluation
NOT_COLUMNS = ("also", "results", "force", "checkpoint_seconds", "cache_dir", "sha256", "requester_pays", "stream")


class Run:
    """One configuration, one folder, one row.

    Args:
        config: every flag with its default filled in, "seed" among them.
        identity: names in config on which the run's name depends.
        readable: template of the readable part of its name.
        clock: what the history counts, a key of HISTORY_FILES.
    """

    def __init__(
        self, args: Namespace, config: dict, identity: Sequence[str], readable: str, processes: Processes,
        clock: str = "epoch",
    ) -> None:  # fmt: skip
        self.name = records.run_id({name: config[name] for name in identity}, readable)
        columns = {name: value for name, value in config.items() if name not in NOT_COLUMNS}
        self.config = columns | {name: portable(value) for name, value in columns.items() if isinstance(value, Path)}
        self.config["device"] = str(processes.device)
        self.args, self.processes, self.clock, self.results = args, processes, clock, args.results
        self.folder = args.results.parent / "runs" / self.name
        self.history: list[dict[str, Any]] = []  # one entry per evaluation
        self.info = {"started_utc": records.utc_now(), "times_resumed": 0, "git_commit": records.git_commit()}
        self.machine = {"device_name": records.device_name(processes.device), "torch_version": torch.__version__}
        self.state: dict[str, Any] = {}

    def begin(self, wait: bool = False) -> bool:
        """Lock the folder; return False, and print so, if the results file has the row already.

        wait: wait for another process that has locked it. Raises SystemExit without. The lock ends with the process.
        """
        return self.processes.from_first(lambda: self._begin(wait))

    def _begin(self, wait: bool) -> bool:
        if self._is_recorded():
            return False
        self.lock = records.hold(self.folder / "run.lock", self.name, wait)
        if self._is_recorded():  # another process may just have finished it
            self.lock.release()
            return False
        config = {"run_id": self.name, "results": self.results.name} | self.config | self.machine | self.info
        records.replace_file(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
        if self.processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.processes.device)
        return True

    def _is_recorded(self) -> bool:
        skipped = not self.args.force and any(row["run_id"] == self.name for row in records.read_rows(self.results))
        if skipped:
            print(f"skipped: {self.results} already has {self.name} (--force repeats it)", flush=True)
        return skipped

    @property
    def done(self) -> int:
        """Number of epochs, steps or updates that are done."""
        return self.history[-1][self.clock] if self.history else 0

    def resume(self, **state: Any) -> None:
        """Load the checkpoint, if there is one; otherwise copy the first process's weights to the others.

        state: modules and optimizers (or None) by name; "model" is what the last checkpoint keeps. Raises SystemExit
        for a checkpoint that does not load, with the folder to delete.
        """
        self.state = {name: part for name, part in state.items() if part is not None}
        self.saved_at = time.monotonic()
        saved = self.processes.from_first(self._read_checkpoint)
        if saved:
            try:
                for name, part in self.state.items():
                    if name == "model" or saved["training"]:
                        part.load_state_dict(saved["model"] if name == "model" else saved["training"][name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise SystemExit(
                    f"error: the checkpoint in {self.folder} is of another version of this code "
                    f"({reason(error)}): delete that folder to start anew"
                ) from None
            commits = dict.fromkeys([*saved["info"]["git_commit"].split("+"), self.info["git_commit"]])
            self.history, self.info = saved["history"], saved["info"]
            self.info["times_resumed"] += 1
            self.info["git_commit"] = "+".join(filter(None, commits))
        else:
            self.processes.copy_from_first(self.state["model"].parameters())
        where = f"continuing after {self.clock} {self.done}" if saved else "starting"
        self.processes.print(f"{self.name}: {where} on {self.processes.device}, {torch.get_num_threads()} threads")

    def _read_checkpoint(self) -> dict[str, Any] | None:
        if not (self.folder / "checkpoint.pt").exists():
            return None
        saved = load_checkpoint(self.folder)
        started = [row["started_utc"] for row in records.read_rows(self.results) if row["run_id"] == self.name]
        return None if started == [saved["info"]["started_utc"]] else saved  # --force: a recorded run starts anew

    def save(self, entry: Mapping[str, Any], last: bool = False, message: str = "") -> None:
        """Append an evaluation to the history, and write the checkpoint if it is time.

        last: the run ends, and its checkpoint keeps only the model. message: printed with the figures. Raises
        SystemExit for weights that are not finite, and if the disk is full.
        """
        networks = [part for name, part in self.state.items() if isinstance(part, nn.Module) and name != "loss"]
        if not all(tensor.isfinite().all() for network in networks for tensor in network.state_dict().values()):
            raise SystemExit(
                f"error: weights of {self.name} are not finite at {self.clock} {entry[self.clock]}; nothing is "
                "recorded. Try a smaller --lr, or --precision fp32"
            )
        self.history.append({**entry, "peak_memory_mib": records.peak_memory_mib(self.processes.device)})
        if not self.processes.is_first:
            return
        records.write_csv(self.folder / HISTORY_FILES[self.clock], self.history)
        if last or time.monotonic() - self.saved_at >= self.args.checkpoint_seconds:
            training = {name: part.state_dict() for name, part in self.state.items() if name != "model"}
            saved = {"model": self.state["model"].state_dict(), "training": None if last else training}
            records.replace_file(self.folder / "checkpoint.pt", saved | {"history": self.history, "info": self.info})
            self.saved_at = time.monotonic()
        if message:
            print("  ".join([message, *figures(entry), "{train_seconds:.1f} s".format(**entry)]), flush=True)

    def record(self, columns: Mapping[str, Any]) -> None:
        """Add the row with these columns, or replace the run's earlier row."""
        if not self.processes.is_first:
            return
        row = {"run_id": self.name} | self.config | {"threads": torch.get_num_threads()} | dict(columns)
        row |= summary(self.history, self.clock) | self.machine
        row |= self.info | {"finished_utc": records.utc_now()}
        with FileLock(f"{self.results}.lock"):
            # Over NFS, a new file in the folder refreshes this machine's cache of the others.
            self.results.with_name(self.results.name + ".tmp").touch()
            rows = [old for old in records.read_rows(self.results) if old["run_id"] != self.name]
            records.write_csv(self.results, [*rows, row])
        self.lock.release()
        print("  ".join([f"{self.name}:", *figures(row)]) + f"\nrow: {self.results}\nrun: {self.folder}", flush=True)


def figures(entry: Mapping[str, Any]) -> list[str]:
    shown = ((name, value) for name, value in entry.items() if SHOWN.fullmatch(name) and value is not None)
    return [f"{name.replace('_', ' ')} {float(value):.4f}" for name, value in shown]


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run folder, on the CPU: "model", "training" (None at the end), "history", "info".

    Raises:
        SystemExit: it is absent or damaged.
    """
    path = folder / "checkpoint.pt"
    if not path.is_file():
        raise SystemExit(f"error: there is no {path}: give the folder of a run, results/runs/<run id>")
    return load_torch_file(path, "a checkpoint", advice=f": delete {folder} to start anew")
