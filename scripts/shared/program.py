"""The edge of every program here: from its first import on, whatever goes wrong is a sentence and an exit status.

    if __name__ == "__main__":  # above the other imports
        from scripts.shared import program

        program.begin()
    ...
    def main(argv: list[str] | None = None) -> int:
        return program.finish(lambda: work(parse_arguments(argv)))

    if __name__ == "__main__":
        program.end(main())

Status 0: done, or already recorded. 2: the command line is wrong. 1: the run failed. 130: Ctrl-C. 143: SIGTERM. 141,
and not a word: nobody reads what it prints any longer (`| head`). The flag --debug, which every Parser has, shows the
traceback as well. Imports nothing slow.
"""

import argparse
import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from scripts.shared.atomic_file import is_special

DEBUG = "--debug"


class ProgramError(Exception):
    """The program cannot go on; the message is a sentence on what was wrong, what was received and how to mend it."""

    status = 1


class CommandLineError(ProgramError):
    """The command line, or the environment, is wrong."""

    status = 2


class Terminated(KeyboardInterrupt):
    """SIGTERM: leave as for Ctrl-C, with another exit status."""


def begin() -> None:
    """Make this process one whose start and end show no traceback; to be called before anything slow is imported.

    Ctrl-C and SIGTERM end it at once, outside of `finish`: nothing has begun, or all is done. What cannot be printed,
    such as a path that is no UTF-8, is printed escaped; a standard stream that is closed reads and writes nothing.
    """
    # OpenMP's threads wait in a loop for milliseconds by default, and so keep cores from our kernels' threads; asleep
    # at once (OMP_WAIT_POLICY=passive), waking them costs a training step a third of its time. So they wait for
    # microseconds, then sleep.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop_at_once)
    sys.excepthook = _excepthook
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="surrogateescape" if name == "stdin" else "backslashreplace")


def _stop_at_once(number: int, _: object) -> NoReturn:
    os.write(2, b"\nstopped\n")
    os._exit(128 + number)


def _excepthook(_: type[BaseException], error: BaseException, __: object) -> NoReturn:
    status = _fail(1, f"error: {sentence(error)}", error)
    sys.stdout.flush()
    os._exit(status)


def end(status: int) -> NoReturn:
    """Leave the program with an exit status: 1 where what it printed cannot be written, to a full disk, say."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python tries again at the end
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            status = _fail(status or 1, f"error: standard output: {error.strerror}", error)
    sys.exit(status)


def _nobody_reads() -> bool:
    """Whether standard output or standard error is a pipe whose reader has left, `| head`, say."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in streams.poll(0))


def finish(
    run: Callable[[], int],
    stopped: str = "",
    *,
    speaks: Callable[[int], bool] = lambda status: True,
    name: str = "",
) -> int:
    """Run a program's work and return its exit status, with a sentence on stderr where that is not 0.

    stopped: what Ctrl-C and SIGTERM leave, said after "stopped: "; nothing is said where it is empty. speaks: asked
    with the status whether this process says it. name: what an error is of, said before it.
    """

    def terminate(*_: object) -> NoReturn:
        raise Terminated

    handlers: dict[int, Any] = {signal.SIGTERM: terminate}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        handlers[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return run()
    except KeyboardInterrupt as error:
        status = 143 if isinstance(error, Terminated) else 130
        return _fail(status, f"\nstopped: {stopped}" if stopped else "", error) if speaks(status) else status
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141  # as of a program that SIGPIPE ends
        status = getattr(error, "status", 1)
        return _fail(status, f"error: {name}{sentence(error)}", error) if speaks(status) else status
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handlers[number]:  # not where `speaks` has it ignored
                signal.signal(number, handler)


def _fail(status: int, said: str, error: BaseException) -> int:
    if DEBUG in sys.argv:
        traceback.print_exception(error)
    if said:
        with contextlib.suppress(BrokenPipeError):  # `2>&1 | head`
            print(said, file=sys.stderr)
    return status


def sentence(error: BaseException) -> str:
    """Return what is said of an error: its own words where it was foreseen, else what it is and where it arose."""
    if isinstance(error, ProgramError):
        return str(error)
    first = str(error).strip().partition("\n")[0][:1000]
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in first:
        return f"{first or 'out of memory'} Try a smaller --batch_size or --precision bf16"
    if isinstance(error, ModuleNotFoundError):
        return f"{first}; install what requirements.txt lists"
    where = ""
    if frames := traceback.extract_tb(error.__traceback__, -1):
        where = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})"
    if isinstance(error, OSError):
        return f"{first}{where if error.filename is None else ''}; mend that and give the same command again"
    return f"{type(error).__name__}: {first}{where}. This was not foreseen; {DEBUG} shows how it came about"


class _Debug(argparse.Action):
    """Known, and no setting: `_fail` finds it among the words of the command line."""

    def __call__(self, *_: object) -> None:
        pass


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviated flags and answers a mistake with one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        suppressed = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        self.add_argument(DEBUG, action=_Debug, nargs=0, help="show the traceback of what goes wrong", **suppressed)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As its parent's, which parse_args calls. Raises CommandLineError."""
        args = sys.argv[1:] if args is None else args
        for word in args:
            if not is_text(word):  # no row could hold it
                self.error(f"arguments must be UTF-8 text without NUL, got {word!r}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message} (see --help)")


def is_text(word: str) -> bool:
    """Whether a word can be written as UTF-8 and given to a program: no bytes of another encoding, no NUL."""
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False


# Argument types that rooms share: text -> value, or ArgumentTypeError with a sentence.


def whole_number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Return an argument type for whole numbers in [lowest, highest]."""
    rule = f"of at least {lowest}" if highest is None else f"between {lowest} and {highest}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also for more digits than Python reads
            value = lowest - 1
        if value < lowest or (highest is not None and value > highest):
            raise argparse.ArgumentTypeError(f"must be a whole number {rule}, got {text!r}")
        return value

    return convert


def output(text: str) -> Path:
    """Argument type: a path, ~ and ~user expanded."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"names the home of a user that is not known here, got {text!r}") from None


def path(text: str) -> Path:
    """Argument type: an `output` that, if it is there, is a file or a folder: a FIFO blocks, a device is no place."""
    found = output(text)
    if is_special(found):
        raise argparse.ArgumentTypeError(f"must be a file or a folder, and {text} is a device, a FIFO or a socket")
    return found


def check(right: object, sentence: str) -> None:
    """Raise CommandLineError, with a sentence on what is wrong, unless that is right."""
    if not right:
        raise CommandLineError(sentence)
