"""A run: one configuration on its way to its row. It is skipped, held, resumed, saved and recorded here, and only here.

    run = Run(args, flags, IDENTITY, READABLE, device, ranks)  # recorded already: the program ends, with status 0
    with run.held():
        model, optimizer = ...
        run.track(model, {"model": model, "optimizer": optimizer}, end=args.n_epochs)  # restored, or begun alike
        for epoch in run.remaining():
            steps = Steps(run, optimizer, loss_fn, num_steps, args.n_epochs)
            for step in steps.of(epoch):
                steps.take(batch_loss, rows, crops)
            run.save({"epoch": epoch, "train_loss": steps.mean(), "test_top1": ...})
        run.record({"num_classes": 100}, num_images)

Its folder, results/runs/<run id>/, is held by one process. The checkpoint there is written at the end, a minute after
the last one, and when the run is stopped: killed, it repeats what it did since, with the same bits. The processes of
torchrun enter and leave together; the first alone reads, writes and prints.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.atomic_file import atomic_write
from data.program import ProgramError
from experiments.shared import environment
from experiments.shared.checkpoint import CURRENT, check_like, read_checkpoint, write_checkpoint
from experiments.shared.command_line import AlreadyRecorded
from experiments.shared.graph import GraphedStep
from experiments.shared.loss_state import anneal
from experiments.shared.metrics import summary
from experiments.shared.ranks import Ranks
from experiments.shared.run_record import find_row, open_run, run_id, utc_now, write_history, write_row

# What is said of an evaluation, all fractions but the loss.
SAID = {
    "train_loss": "train loss",
    **{f"{split}_top{k}": f"{split} top-{k}" for split in ("valid", "test") for k in (1, 5)},
    **{"valid_wer": "valid word error", "valid_per": "phoneme error"},
    **{f"test_wer_beam{size}": f"test word error of beam {size}" for size in (1, 4, 8)},
}
HISTORY_FILES = {"epoch": "epochs.csv", "step": "evaluations.csv", "update": "updates.csv"}  # by what they count
SAVE_SECONDS = 60  # from one checkpoint to the next, at least


@dataclass(eq=False)
class Run:
    """One configuration, one folder, one row.

    flags: all of them, resolved, under the names of their columns. identity: those that make it another experiment.
    readable: the template of its name. clock: what the history counts, a key of HISTORY_FILES. wait: for another
    process that holds the folder.
    """

    args: Any
    flags: dict[str, Any]
    identity: Sequence[str]
    readable: str
    device: torch.device
    ranks: Ranks
    clock: str = "epoch"
    wait: bool = False

    def __post_init__(self) -> None:
        self.name = run_id({flag: self.flags[flag] for flag in self.identity}, self.readable)
        self.flags = {**self.flags, "device": str(self.device)}
        self.folder = self.args.results.parent / "runs" / self.name
        self.history: list[dict[str, Any]] = []  # one entry per save
        self.origin = {"started_utc": utc_now(), "times_resumed": 0, "git_commits": [environment.git_commit()]}
        self._snapshot: dict[str, Any] | None = None  # of the last save, where that is not on the disk
        self._refuse_recorded()

    def _refuse_recorded(self) -> None:
        results = self.args.results
        if not self.args.force and self.ranks.from_first(lambda: find_row(results, self.name)):
            self.ranks.say(f"skipped: {results} already has {self.name} (--force repeats it)")
            raise AlreadyRecorded

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, and leave there what was saved last, after Ctrl-C and errors, too. AlreadyRecorded."""
        environment.set_up_device(self.device, self.args.threads, getattr(self.args, "deterministic", False))
        environment.keep_freed_memory()
        self.flags["threads"] = torch.get_num_threads()
        self.environment = environment.describe_environment(self.device)
        with open_run(self.folder, self.wait) if self.ranks.is_first else nullcontext():
            self._refuse_recorded()  # another process may have finished it before the folder was ours
            if self.ranks.is_first:
                origin = {"git_commit": self.origin["git_commits"][0]}
                config = {"run_id": self.name, **self.flags, **self.environment, **origin}
                with atomic_write(self.folder / "config.json") as file:
                    file.write(json.dumps(config, indent=2, default=str) + "\n")
            # Another one for what the other processes draw.
            torch.manual_seed(self.flags["seed"] + (self.ranks.rank << 32))
            try:
                yield
            finally:
                if self._snapshot:
                    self._write()

    @property
    def done(self) -> int:
        return self.history[-1][self.clock] if self.history else 0

    def track(self, weights: nn.Module, training: Mapping[str, Any], end: int) -> None:
        """Restore what was saved, or begin alike in all processes. Raises ProgramError where that does not fit.

        weights: what every checkpoint holds. training: modules and optimizers (or None), which one holds until `end`.
        """
        self.end, self._weights = end, weights
        self._training = {name: part for name, part in training.items() if part is not None}
        if saved := self.ranks.from_first(self._saved):
            try:
                self._restore(saved)
            except Exception as error:  # whatever another network's or optimizer's state comes to
                raise ProgramError(
                    f"the checkpoint in {self.folder} is of another version of this code, or was changed "
                    f"({type(error).__name__}: {error}); delete that folder to begin anew"
                ) from None
        else:
            self.ranks.copy_from_first(weights.parameters())
        if self.ranks.is_first and self.history:
            write_history(self.folder / HISTORY_FILES[self.clock], self.history)
        self._written = time.monotonic()
        where = f"continuing after {self.clock} {self.done} of {end}" if self.history else "beginning"
        threads = f"{self.ranks.count} processes, " * (self.ranks.count > 1) + f"{self.flags['threads']} threads"
        self.ranks.say(f"{self.name}: {where} on {self.environment['device_name']}, {threads}")

    def _saved(self) -> dict[str, Any] | None:
        """Return the checkpoint; with --force not that of the very run which the row reports. Raises ProgramError."""
        try:
            saved = read_checkpoint(self.folder / CURRENT)
        except FileNotFoundError:
            return None
        except ProgramError as error:
            raise ProgramError(f"{error}; delete {self.folder} to begin anew") from None
        row = find_row(self.args.results, self.name)
        return None if row and row["started_utc"] == saved.get("started_utc") else saved

    def _restore(self, saved: Mapping[str, Any]) -> None:
        history, training = saved["history"], saved["training"]
        clocks = [each[self.clock] for each in history]
        if not clocks or clocks != sorted({*clocks} & {*range(1, self.end + 1)}):
            raise ValueError(f"its history counts {self.clock}s {clocks} of {self.end}")
        check_like(history, history[-1:], "history")
        if (clocks[-1] == self.end) != (training is None):
            raise ValueError(f"training must be there until {self.clock} {self.end}, and then no more")
        check_like({name: saved[name] for name in self.origin}, self.origin, "origin")
        saved["started_utc"].encode()
        check_like(saved["model"], self._weights.state_dict(), "model")
        self._weights.load_state_dict(saved["model"])
        if training is not None:
            check_like(training, {name: expected_of(part) for name, part in self._training.items()}, "training")
            for name, value in training.get("loss", {}).items():
                if name.endswith("_extra_state") and not value > 0:  # the spread of the logits
                    raise ValueError(f"training.loss.{name} must be above 0, and is {value.item()}")
            for name, part in self._training.items():
                # Of an optimizer the settings are the command's.
                is_module = isinstance(part, nn.Module)
                part.load_state_dict(training[name] if is_module else {**part.state_dict(), "state": training[name]})
        if self.ranks.rank < len(saved["random_states"]):
            states = saved["random_states"][self.ranks.rank]
            torch.set_rng_state(states["cpu"])
            if self.device.type == "cuda" and "cuda" in states:  # it may have moved between CPU and GPU
                torch.cuda.set_rng_state(states["cuda"], self.device)
        self.history = history
        commits = list(dict.fromkeys([*saved["git_commits"], *self.origin["git_commits"]]))
        resumed = saved["times_resumed"] + 1
        self.origin = {"started_utc": saved["started_utc"], "times_resumed": resumed, "git_commits": commits}

    def remaining(self) -> Iterator[int]:
        numbers = range(self.done + 1, self.end + 1)
        yield from tqdm(numbers, initial=self.done, total=self.end, unit=self.clock, disable=not self.on_terminal)

    def save(self, measured: Mapping[str, Any], told: str = "") -> None:
        """Add to the history what an evaluation gave, and make sure that the run can go on from here.

        told: when that was, to be said with the figures; nothing is said without it.
        """
        self.history.append({**measured, "peak_memory_mib": environment.peak_memory_mib(self.device)})
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        random_states = self.ranks.gathered(states)
        if not self.ranks.is_first:
            return
        finished = self.done >= self.end  # nothing continues it: its file keeps the weights alone
        training = {
            name: part.state_dict() if isinstance(part, nn.Module) else part.state_dict()["state"]
            for name, part in self._training.items()
        }
        state = {
            "model": self._weights.state_dict(),
            "training": None if finished else training,
            "random_states": random_states,
            "history": self.history,
            **self.origin,
        }
        self._snapshot = copy.deepcopy(state)
        if finished or time.monotonic() - self._written >= SAVE_SECONDS:
            self._write()
        write_history(self.folder / HISTORY_FILES[self.clock], self.history)
        if told:
            seed = f"seed {self.flags['seed']} " if len(getattr(self.args, "seeds", [0])) > 1 else ""
            seconds = "trained {train_seconds:.1f} s, evaluated {eval_seconds:.1f} s".format(**measured)
            self.ranks.say("  ".join((seed + told, *figures(measured), seconds)))

    def _write(self) -> None:
        write_checkpoint(self.folder / CURRENT, self._snapshot)
        self._snapshot, self._written = None, time.monotonic()

    def record(self, columns: Mapping[str, Any], num_images: int | None = None) -> None:
        """Write the row: the flags, `columns`, and what the machine and the history of the run say.

        num_images: of all training steps together.
        """
        if not self.ranks.is_first:
            return
        # Where the file is, it says itself; and of a repetition nothing else is new.
        flags = {name: value for name, value in self.flags.items() if name not in ("results", "force")}
        origin = {**self.origin, "git_commit": "+".join(filter(None, self.origin["git_commits"]))}
        del origin["git_commits"]
        measured = {**columns, **summary(self.history, self.clock, num_images), **columns}
        row = {"run_id": self.name, **flags, **measured, **self.environment, **origin, "finished_utc": utc_now()}
        write_row(self.args.results, row)
        told = ", ".join((*figures(row), f"{row['train_seconds']:.1f} s of training"))
        self.ranks.say(f"{self.name}: {told}\nrow: {self.args.results}\nrun: {self.folder}")

    def autocast(self) -> torch.autocast:
        """The context in which a network computes with the precision of the run."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.flags["precision"] == "bf16")

    def compiled(self, module: nn.Module) -> nn.Module:
        """A module as --compile has it: on a GPU its kernels are launched at once, unless --graph does that."""
        if not self.args.compile:
            return module
        graphs = self.device.type == "cuda" and not getattr(self.args, "graph", False)
        return torch.compile(module, mode="reduce-overhead" if graphs else None)

    @property
    def on_terminal(self) -> bool:
        """Whether bars are shown: to somebody, and by one process alone."""
        return sys.stderr.isatty() and self.ranks.is_first and len(getattr(self.args, "seeds", [0])) == 1


def figures(measured: Mapping[str, Any]) -> list[str]:
    """What is said of an evaluation or of a row."""
    return [f"{words} {measured[name]:.4f}" for name, words in SAID.items() if measured.get(name) is not None]


def expected_of(part: Any) -> dict[Any, Any]:
    """Return what a checkpoint in the middle of a run must hold of a module or an optimizer, in form."""
    if isinstance(part, nn.Module):
        return part.state_dict()
    parameters = [each for group in part.param_groups for each in group["params"]]
    if isinstance(part, torch.optim.SGD):
        return {number: {"momentum_buffer": each} for number, each in enumerate(parameters)}
    step = torch.zeros(())
    return {number: {"step": step, "exp_avg": each, "exp_avg_sq": each} for number, each in enumerate(parameters)}


class Diverged(ProgramError):
    """A loss is not finite."""


@dataclass(eq=False)
class Steps:
    """The steps of one optimizer: bar, schedules, gradients, and losses that are read once, at the end of an epoch.

    num_steps: of an epoch; of n_epochs. loss_fn: whose inverse temperature may follow a schedule. after: each step.
    With --graph all steps are of one function of tensors.
    """

    run: Run
    optimizer: torch.optim.Optimizer
    loss_fn: nn.Module | None
    num_steps: int
    n_epochs: int
    lr_schedule: str | None = None
    after: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        self.losses: list[Tensor] = []  # each (), since the last mean
        self.graphed = None
        if getattr(self.run.args, "graph", False):
            self.graphed = GraphedStep(self._step, self.run.device)
            for group in self.optimizer.param_groups:
                group["capturable"] = True
                if self.lr_schedule == "cosine":
                    group["lr"] = torch.tensor(group["lr"], device=self.run.device)
            beta = torch.zeros((), dtype=torch.float64, device=self.run.device)
            anneal(self.loss_fn, self.run.flags["inverse_temperature"], 0.0, beta)

    def of(self, epoch: int, first: int = 0, stop: int | None = None) -> Iterator[int]:
        """The steps of an epoch, which is counted from 1, from 0 on; each is to be taken."""
        steps = range(first, self.num_steps if stop is None else stop)
        for step in tqdm(steps, f"epoch {epoch}", unit="batch", leave=False, disable=not self.run.on_terminal):
            self.begin(epoch, step)
            yield step

    def begin(self, epoch: int, step: int) -> None:
        """Set rate and temperature to where their schedules are."""
        self.epoch, self.step = epoch, step
        elapsed = (epoch - 1 + step / self.num_steps) / self.n_epochs  # from 0 to almost 1
        anneal(self.loss_fn, self.run.flags["inverse_temperature"], elapsed)
        if self.lr_schedule == "cosine":
            rate = self.optimizer.defaults["lr"] * (1 + math.cos(math.pi * elapsed)) / 2
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        if getattr(self.run.args, "compile", False) and self.run.device.type == "cuda" and not self.graphed:
            torch.compiler.cudagraph_mark_step_begin()

    def take(self, batch_loss: Callable[..., tuple[Tensor, Any]], *tensors: Any) -> Any:
        """Step down the gradient of a loss () of tensors; return what else their function returns. Raises Diverged.

        With --graph the function is the same in all steps.
        """
        if self.graphed:
            loss, result = self.graphed(getattr(self.loss_fn, "generator", None), batch_loss, *tensors)
        else:
            loss, result = self._step(batch_loss, *tensors)
        if self.after:
            self.after()
        self.losses.append(loss)
        return result

    def _step(self, batch_loss: Callable[..., tuple[Tensor, Any]], *tensors: Any) -> tuple[Tensor, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, result = batch_loss(*tensors)
        if self.run.device.type == "cpu" and self.run.ranks.count == 1:
            self._check(loss.item(), self.step)
        loss.backward()
        self.run.ranks.sum_gradients(self.parameters)
        self.optimizer.step()
        return loss.detach(), result

    def mean(self) -> float:
        """The mean loss since the last mean. Raises Diverged."""
        losses, self.losses = torch.stack(self.losses), []  # (steps,)
        losses = self.run.ranks.total(losses).tolist()  # the one wait for a GPU
        getattr(self.loss_fn, "check_convergence", lambda: None)()
        for step, value in enumerate(losses, self.step + 1 - len(losses)):
            self._check(value, step)
        return math.fsum(losses) / len(losses)

    def _check(self, value: float, step: int) -> None:
        check_finite(self.run, value, f"in {self.run.clock} {self.epoch}, step {step + 1} of {self.num_steps}")


def check_finite(run: Run, value: float, where: str) -> None:
    """Raise Diverged where a loss is not finite."""
    if not math.isfinite(value):
        raise Diverged(
            f"the loss became {value} {where}, seed {run.flags['seed']}, with method {run.flags['method']}; no row is "
            "written. Try a smaller --lr, --precision fp32, or another --inverse_temperature"
        )
