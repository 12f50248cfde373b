"""The rows of a sweep: read from lines, asked for in their results files, started, and summed up at the end."""

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tqdm import tqdm

from data.program import CommandLineError, is_text

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 100_000  # characters of a row: Linux gives a program no longer word, and splitting takes its time
TAIL = 12  # lines of a failed row's log in the summary


class SweepError(CommandLineError):
    """The sweep cannot be run as asked, and nothing was started."""


@dataclass(frozen=True)
class Row:
    """One line of a sweep. `number` is its place among all lines, from 1; `log` is named after it."""

    number: int
    command: str
    words: tuple[str, ...]
    log: Path

    @property
    def name(self) -> str:
        return self.log.stem


def read_rows(lines: Iterable[str], extra: Sequence[str], logs: Path) -> list[Row]:
    """Return one row per line that is neither empty nor a comment, with `extra` words at its end.

    Raises SweepError for a line that only a shell could run, for the same line twice, and for no line at all.
    """
    rows: dict[str, Row] = {}
    added = f" {shlex.join(extra)}" if extra else ""
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        number, command = len(rows) + 1, line.strip() + added
        if len(command) > LONGEST:
            raise SweepError(f"row {number} has {len(command)} characters, and a row may have {LONGEST}: split it")
        if not is_text(command):
            raise SweepError(f"row {number} must be UTF-8 text without NUL, got {command!r}")
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            operators = [word for word in lexer if re.fullmatch(r"[();<>|&]+", word)]
        except ValueError as error:
            raise SweepError(f"row {number} cannot be split into words ({error}): {command}") from None
        if operators:
            raise SweepError(
                f"row {number} needs a shell for {operators[0]!r}, and rows are run without one; "
                f"write bash -c '...' if you mean it: {command}"
            )
        if command in rows:
            raise SweepError(f"rows {rows[command].number} and {number} are the same command: {command}")
        words = tuple(shlex.split(command))
        rows[command] = Row(number, command, words, logs / f"{number:02}-{_short(words)}.log")
    if not rows:
        raise SweepError("there is no row: pipe command lines into scripts/launch.py, one per line")
    return list(rows.values())


def _short(words: Sequence[str]) -> str:
    """Return a command as part of a file name: its arguments without the flags' names."""
    given = [word for word in words[1:] if "=" in word or not re.match(r"--?[A-Za-z]", word)]
    if len(given) > 1 and given[0].endswith(".py"):
        del given[0]
    return re.sub(r"[^A-Za-z0-9.=_]+", "_", "_".join(given or words))[:70].strip("_.")


def recorded_rows(rows: Sequence[Row]) -> set[Row]:
    """Return the rows that their results files already have.

    A row is named by a hash of its resolved settings, which only its script can resolve. So the training scripts are
    asked, all rows in one process (recorded.py): one import of torch, some 3 s, instead of one per row. Rows of other
    programs, with --force, or whose --results is not there yet, are not asked about.
    """

    def can_be_asked(words: Sequence[str]) -> bool:
        if len(words) < 2 or not Path(words[0]).name.startswith("python") or "--force" in words:
            return False
        script = Path(words[1]).resolve()
        if script.parent != ROOT / "experiments" or not script.name.startswith(("train_", "finetune_")):
            return False
        given = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--results"]
        return not given or Path(given[-1]).exists()

    asked = [row for row in rows if can_be_asked(row.words)]
    if not asked:
        return set()
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "sweeping" / "recorded.py")],
        input=json.dumps([row.words for row in asked]),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the launcher's, which then ends it
    )
    if done.returncode:
        print("warning: it could not be asked which rows are recorded; each finds out by itself", file=sys.stderr)
        return set()
    return {row for row, recorded in zip(asked, json.loads(done.stdout)) if recorded}


def start_row(row: Row, header: str, settings: Mapping[str, str]) -> subprocess.Popen:
    """Start a row with `settings` in its environment, its output appended to its log. Raises OSError.

    It gets a session of its own, so that Ctrl-C reaches it once, through the launcher. On Linux it gets SIGTERM when
    the thread that started it ends, by kill -9 of the launcher too. Elsewhere it goes on unseen to its end, where it
    records its row; called again meanwhile, its configuration is refused, as "being run by another process".
    """
    row.log.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    launcher = os.getpid()

    def before_the_program() -> None:
        # Under nohup or "&" of a shell script SIGINT comes ignored, and the row could not be stopped.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Where Linux shares its time among sessions, the niceness that a row inherits counts within its own alone.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(os.nice(0)))
        if _PRCTL is not None:
            _PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != launcher:  # it died before the line above
                os.kill(os.getpid(), signal.SIGTERM)

    with open(row.log, "a", encoding="utf-8") as log:
        shown = " ".join(f"{name}={value}" for name, value in settings.items())
        log.write(f"=== {now} {header} {shown}\n$ {row.command}\n")
        log.flush()
        return subprocess.Popen(
            row.words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
            preexec_fn=before_the_program,
        )


_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Progress:
    """Lines on what happens to rows and, on a terminal, a live line below them."""

    def __init__(self, sweep: str, rows: Sequence[Row]) -> None:
        self.sweep, self.done, self.failed = sweep, [], {}  # rows; and how each failed
        self._bar = tqdm(
            desc=sweep,
            total=len(rows),
            unit="row",
            disable=not sys.stderr.isatty(),
            bar_format="{desc} {bar:20} {n_fmt}/{total_fmt} rows{postfix}, {elapsed} passed, {remaining} left",
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line at once, above the live one. A full disk, where that goes to a file, stops no row."""
        with contextlib.suppress(OSError):
            tqdm.write(line)
            sys.stdout.flush()

    def row_done(self, row: Row) -> None:
        self.done.append(row)
        self._ended(row, "done")

    def row_failed(self, row: Row, how: str) -> None:
        self.failed[row] = how
        self._ended(row, f"FAILED ({how})")

    def _ended(self, row: Row, how: str) -> None:
        self._bar.update()
        self.say(f"[{len(self.done) + len(self.failed)}/{self._bar.total}] {how}: {row.name}")

    def refresh(self, running: int) -> None:
        """Bring the live line up to date."""
        self._bar.set_postfix_str(f"{len(self.done)} done, {len(self.failed)} failed, {running} running")

    def summarise(self, num_rows: int, skipped: int) -> int:
        """Print how the sweep ended, each failed row with the last lines of its log; return the exit status."""
        left = self._bar.total - len(self.done) - len(self.failed)
        counts = {"done": len(self.done), "already recorded": skipped, "failed": len(self.failed), "left": left}
        told = ", ".join(f"{number} {name}" for name, number in counts.items() if number) or "nothing to do"
        for row, how in self.failed.items():
            print(f"\nFAILED row {row.number} ({how}): {row.command}\n  log: {row.log}, which ends")
            print("\n".join(f"    {line}" for line in tail(row.log)))
        print(f"{self.sweep}: {told}, of {num_rows} rows", flush=True)
        return 1 if self.failed else 0


def tail(log: Path) -> list[str]:
    """Return the last lines of a log; of a progress bar's line, what was shown last."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            text = file.read(20_000).decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    return lines[-TAIL:] or ["(an empty log)"]
