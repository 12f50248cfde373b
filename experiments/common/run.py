"""A run: one configuration, its folder results/runs/<name>/, its checkpoint, and its one row in a results file.

    run = Run(CIFAR, READABLE, config, processes)
    if not run.start():                                          # the row is there already
        return
    model, optimizer = ...
    run.resume(model=model, optimizer=optimizer)
    for epoch in range(run.done + 1, config["n_epochs"] + 1):
        ...
        run.save({"epoch": epoch, "train_loss": ...}, last=epoch == config["n_epochs"])
    run.record({"num_classes": 100})

Files are replaced, never edited. A checkpoint follows an evaluation, where --checkpoint_seconds have passed since the
last. A run that ends in any way (Ctrl-C, kill -9, a crash, a time limit) loses what came since, and the same command
continues it with the same bits. Under torchrun all processes call these methods; only the first writes and prints.
"""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.torch_file import load_torch_file, reason
from experiments.common import provenance, settings
from experiments.common.files import check_replaceable, lock_folder, replace_file
from experiments.common.metrics import summary
from experiments.common.paths import HISTORY_FILES
from experiments.common.processes import Processes
from experiments.common.rows import check_writable, locked, read_rows, write_rows
from experiments.common.torch_files import save_torch_file

PRINTED = re.compile("train_loss|(valid|test)_top[15]|valid_wer|valid_per|test_wer_.*")  # after an evaluation


class Run:
    """One configuration, one folder, one row.

    Args:
        script: the script, as settings.py names it.
        readable: template of the readable part of the run's name.
        config: every setting with its default filled in, those of the call among them.
        clock: what the history counts, a key of HISTORY_FILES.

    Raises:
        ValueError: a results file cannot have a value, such as a path that is not in UTF-8.
    """

    def __init__(
        self, script: str, readable: str, config: Mapping[str, Any], processes: Processes, clock: str = "epoch"
    ) -> None:
        self.name = settings.run_id(script, config, readable)
        self.config = {**config, "device": str(processes.device)}
        self.columns = settings.columns(self.config)
        check_writable(self.columns)
        self.processes = processes
        self.clock = clock
        self.results: Path = config["results"]
        self.folder = self.results.parent / "runs" / self.name
        self.history: list[dict[str, Any]] = []  # one entry per evaluation
        self.info = {
            "started_utc": provenance.utc_now(),
            "times_resumed": 0,
            "git_commit": provenance.git_commit(),
        }
        # Where the training ran, a list per column: a value of its own for each part that differs from the one before.
        self.machine: dict[str, list[Any]] = {
            "device": [self.config["device"]],
            "threads": [torch.get_num_threads()],
            "processes": [processes.count],
            "device_name": [provenance.device_name(processes.device)],
            "torch_version": [str(torch.__version__)],
        }
        if "compile" in config:
            self.machine["compile"] = [config["compile"]]
        self.state: dict[str, Any] = {}
        self.saved_at = 0.0

    @property
    def done(self) -> int:
        """Number of epochs, steps or updates that are done."""
        if not self.history:
            return 0
        return self.history[-1][self.clock]

    def start(self, wait: bool = False) -> bool:
        """Lock the folder; return False, and print so, if the results file has the row already.

        Args:
            wait: wait for another process that has locked it.

        Raises:
            OSError: another process has locked it, or the results file cannot be written. The lock ends with the
                process.
        """
        return self.processes.from_first(lambda: self._start(wait))

    def _start(self, wait: bool) -> bool:
        if self._is_recorded():
            return False
        self.lock = lock_folder(self.folder / "run.lock", self.name, wait)
        if self._is_recorded():  # another process may just have finished it
            self.release()
            return False
        check_replaceable(self.results)
        if not (self.folder / "config.json").exists():  # that of a run which continues has its earlier machines
            self._write_config()
        if self.processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.processes.device)
        return True

    def _write_config(self) -> None:
        """Write what the row will have of the settings, the machines and the commits."""
        config = {"run_id": self.name, "results": self.results.name}
        config |= self.columns
        config |= {name: cell_of_parts(name, values) for name, values in self.machine.items()}
        config |= self.info
        replace_file(self.folder / "config.json", f"{json.dumps(config, indent=2)}\n")

    def _is_recorded(self) -> bool:
        if self.config["force"]:
            return False
        for row in read_rows(self.results):
            if row["run_id"] == self.name:
                print(f"skipped: {self.results} already has {self.name} (--force repeats it)", flush=True)
                return True
        return False

    def resume(self, **state: Any) -> None:
        """Load the checkpoint, if there is one; otherwise copy the first process's weights to the others.

        Args:
            state: modules and optimizers (or None) by name; "model" is what the last checkpoint keeps.

        Raises:
            ValueError: the checkpoint is damaged, or is no checkpoint of this run; the message has the folder to
                delete.
        """
        self.state = {name: part for name, part in state.items() if part is not None}
        self.saved_at = time.monotonic()
        saved = self.processes.from_first(self._read_checkpoint)
        if saved is None:
            self.processes.copy_from_first(self.state["model"].parameters())
            start = "starting"
        else:
            self._load(saved)
            start = f"continuing after {self.clock} {self.done}"
            if saved["training"] is None:
                advice = f"to train it delete {self.folder} and give --force"
                start = f"finished after {self.clock} {self.done}, and not trained again ({advice})"
        if self.processes.is_first:
            self._write_config()
        self.processes.print(f"{self.name}: {start} on {self.processes.device}, {torch.get_num_threads()} threads")

    def _read_checkpoint(self) -> dict[str, Any] | None:
        if not (self.folder / "checkpoint.pt").exists():
            return None
        saved = load_checkpoint(self.folder)
        if saved.get("run_id") != self.name:
            whose = saved.get("run_id", "an earlier version of this code")
            raise ValueError(f"the checkpoint in {self.folder} is of {whose}: delete that folder to start anew")
        if self.config["force"] and saved["training"] is None:
            return None
        for row in read_rows(self.results):
            if row["run_id"] == self.name and row["started_utc"] == saved["info"]["started_utc"]:
                return None  # --force: a recorded run starts anew
        return saved

    def _load(self, saved: dict[str, Any]) -> None:
        try:
            self.state["model"].load_state_dict(saved["model"])
            for name, part in self.state.items():
                if name != "model" and saved["training"] is not None:
                    part.load_state_dict(saved["training"][name])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint in {self.folder} is of another version of this code ({reason(error)}): delete that "
                "folder to start anew"
            ) from None
        self.history = saved["history"]
        earlier = saved.get("machine", {})
        if saved["training"] is None:  # nothing is trained by this command
            self.info = saved["info"]
            self.machine |= earlier
        else:
            self._add_part(saved["info"], earlier)

    def _add_part(self, info: dict[str, Any], machine: Mapping[str, list[Any]]) -> None:
        """Join this part of the training to the earlier ones, of which a checkpoint has info and machine."""
        commits = provenance.joined(info["git_commit"], self.info["git_commit"])
        self.info = info
        self.info["times_resumed"] += 1
        self.info["git_commit"] = commits
        for name, values in machine.items():
            if values[-1:] != self.machine[name]:
                values = values + self.machine[name]
            self.machine[name] = values

    def builds_on(self, other: "Run") -> None:
        """Let the row name the commits of a pretraining, too."""
        self.info["git_commit"] = provenance.joined(other.info["git_commit"], self.info["git_commit"])

    def save(self, entry: Mapping[str, Any], last: bool = False, message: str = "") -> None:
        """Append an evaluation to the history, and write the checkpoint if it is time.

        Args:
            entry: the evaluation, by column.
            last: the run ends, and its checkpoint keeps only the model.
            message: printed with the metrics.

        Raises:
            FloatingPointError: weights are not finite.
            OSError: the disk is full.
        """
        self._check_weights(entry[self.clock])
        memory = provenance.peak_memory_mib(self.processes.device)
        self.history.append({**entry, "peak_memory_mib": memory})
        if not self.processes.is_first:
            return
        write_rows(self.folder / HISTORY_FILES[self.clock], self.history)
        seconds = time.monotonic() - self.saved_at
        if last or seconds >= self.config["checkpoint_seconds"]:
            self._write_checkpoint(last)
        if message:
            print(f"{message}  {format_metrics(entry)}  {entry['train_seconds']:.1f} s", flush=True)

    def _check_weights(self, number: int) -> None:
        for name, part in self.state.items():
            if name == "loss" or not isinstance(part, nn.Module):
                continue
            for tensor in part.state_dict().values():
                if not tensor.isfinite().all():
                    raise FloatingPointError(
                        f"weights of {self.name} are not finite at {self.clock} {number}; nothing is recorded. Try a "
                        "smaller --lr, or --precision fp32"
                    )

    def _write_checkpoint(self, last: bool) -> None:
        training = None
        if not last:
            training = {name: part.state_dict() for name, part in self.state.items() if name != "model"}
        saved = {
            "run_id": self.name,
            "model": self.state["model"].state_dict(),
            "training": training,
            "history": self.history,
            "info": self.info,
            "machine": self.machine,
        }
        save_torch_file(self.folder / "checkpoint.pt", saved)
        self.saved_at = time.monotonic()

    def record(self, columns: Mapping[str, Any]) -> None:
        """Add the row with these columns, or replace the run's earlier row."""
        if not self.processes.is_first:
            return
        row = {"run_id": self.name}
        row |= self.columns
        row |= columns
        row |= summary(self.history, self.clock)
        row |= {name: cell_of_parts(name, values) for name, values in self.machine.items()}
        row |= self.info
        row["finished_utc"] = provenance.utc_now()
        with locked(self.results) as file:
            others = [old for old in read_rows(file) if old["run_id"] != self.name]
            write_rows(file, [*others, row])
        self.release()
        print(f"{self.name}:  {format_metrics(row)}\nrow: {self.results}\nrun: {self.folder}", flush=True)

    def release(self) -> None:
        """Let another process have the run."""
        if self.processes.is_first:
            self.lock.release(force=True)


def cell_of_parts(name: str, values: list[Any]) -> Any:
    """The cell of what the parts of a training had: one value, or "2, then 1"."""
    if len(values) == 1:
        return values[0]
    if name in settings.BY_NAME and settings.BY_NAME[name].kind is not str:
        return None  # the column has a number, or true and false, and no single one is right
    return ", then ".join(str(value) for value in values)


def format_metrics(entry: Mapping[str, Any]) -> str:
    parts = []
    for name, value in entry.items():
        if PRINTED.fullmatch(name) and value is not None:
            parts.append(f"{name.replace('_', ' ')} {float(value):.4f}")
    return "  ".join(parts)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run folder, on the CPU: "run_id", "model", "training" (None at the end), "history", "info".

    Raises:
        OSError: it is absent.
        ValueError: it is damaged: a checksum is not that of what it holds.
    """
    path = folder / "checkpoint.pt"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: give the folder of a run, results/runs/<run id>")
    advice = f": delete {folder} to start anew"
    saved = load_torch_file(path, "a checkpoint", checked=True, advice=advice)
    if not isinstance(saved, dict) or not saved.keys() >= {"model", "training", "history", "info"}:
        raise ValueError(f"{path} is not a checkpoint of this version of the code{advice}")
    return saved
