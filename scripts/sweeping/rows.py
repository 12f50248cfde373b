"""The rows of a sweep: read from lines, asked for in their results files, started; and the end of a row's log."""

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
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from data.program import CommandLineError, is_text

ROOT = Path(__file__).resolve().parents[2]
TAIL = 12  # lines of a failed row's log in the summary
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class SweepError(CommandLineError):
    """The sweep cannot be run as asked, and nothing was started."""


class Row(NamedTuple):
    """One line of a sweep: its place among all, from 1, and its log, which is named after it."""

    number: int
    command: str
    words: tuple[str, ...]
    log: Path


def read_rows(lines: Iterable[str], extra: Sequence[str], logs: Path) -> list[Row]:
    """Return one row per line that is neither empty nor a comment, with `extra` words at its end. Raises SweepError."""
    rows: dict[str, Row] = {}
    for line in map(str.strip, lines):
        if not line or line.startswith("#"):
            continue
        number, command = len(rows) + 1, " ".join([line, *map(shlex.quote, extra)])
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
        # Its arguments, without the script's name and those of the flags.
        told = [word for word in words[1:] if not re.match(r"--?[A-Za-z][^=]*$", word)]
        told = told[1:] if len(told) > 1 and told[0].endswith(".py") else told
        name = re.sub(r"[^A-Za-z0-9.=_]+", "_", "_".join(told or words))[:70].strip("_.")
        rows[command] = Row(number, command, words, logs / f"{number:02}-{name}.log")
    if not rows:
        raise SweepError("there is no row: pipe command lines into scripts/launch.py, one per line")
    return list(rows.values())


def recorded_rows(rows: Sequence[Row]) -> set[Row]:
    """Return the rows that their results files already have.

    Only its script can resolve the settings of a row. So the training scripts are asked, all rows in one process
    (recorded.py): one import of torch, some 3 s, instead of one per row. Not asked are rows of other programs, rows
    with --force, and those whose --results is not there yet.
    """

    def can_be_asked(words: Sequence[str]) -> bool:
        script = Path(*words[1:2]).resolve()
        is_training = script.parent == ROOT / "experiments" and script.name.startswith(("train_", "finetune_"))
        if not is_training or not Path(words[0]).name.startswith("python") or "--force" in words:
            return False
        results = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--results"]
        return not results or Path(results[-1]).exists()

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
    return {asked[int(number)] for number in done.stdout.split() if not done.returncode}


def start_row(row: Row, header: str, settings: Mapping[str, str]) -> subprocess.Popen:
    """Start a row with `settings` in its environment, its output appended to its log. Raises OSError.

    It gets a session of its own, so that Ctrl-C reaches it once, through the launcher. On Linux it gets SIGTERM when
    the thread that started it ends, by kill -9 of the launcher too. Elsewhere it goes on unseen to its end, where it
    records its row; called again meanwhile, its configuration is refused, as "being run by another process".
    """
    row.log.parent.mkdir(parents=True, exist_ok=True)
    launcher = os.getpid()

    def before_the_program() -> None:
        # Under nohup or "&" of a shell script SIGINT comes ignored, and the row could not be stopped.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Where Linux shares its time among sessions, the niceness that a row inherits counts within its own alone.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(os.nice(0)))
        if PRCTL is not None:
            PRCTL(DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != launcher:  # it died before the line above
                os.kill(os.getpid(), signal.SIGTERM)

    with open(row.log, "a", encoding="utf-8") as log:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        print(f"=== {now} {header}", *map("=".join, settings.items()), file=log)
        print(f"$ {row.command}", file=log, flush=True)
        return subprocess.Popen(
            row.words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
            preexec_fn=before_the_program,
        )


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
