"""Run a study, show how far it is, and print its table at the end: your runs beside this repository's.

    scripts/quickstart.sh                                   # four losses on digits
    scripts/table1.sh --short --jobs 2                      # 16 epochs instead of 200; flags of scripts/launch.py, too
    scripts/table1.sh --short --status                      # what is done, what runs, and the time left
    scripts/table1.sh --dry-run                             # the commands that would run
    scripts/table1.sh --commands                            # the table as it is now, with the command of each line
    scripts/heads.sh heads.pt --methods all                 # data first, where a study takes some
    scripts/noise.sh heads.pt --human CIFAR-100_human.pt --labels human

Other flags go to every run, but a study with trials takes no settings of runs beside its own. A run whose row is in
results/ is skipped, and one that was stopped continues: the same call again runs what is left. This repository's rows
in results/repository/ are not written, and skip nothing.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from experiments.common import door
from experiments.common.paths import RESULTS, ROOT, user_path
from experiments.common.settings import BY_FLAG, CALL, MACHINE
from reporting import reproduction
from reporting.status import Status, embeddings_id, repository_file, status_text
from scripts.launch import launch, runs_of
from scripts.launch import parse_arguments as parse_launcher_flags
from studies import noise, own_features, tiny_imagenet
from studies.catalog import DESIGNS, STUDIES
from studies.runs import DATASETS, Study, expected_runs, is_of_one_loss, split_flags
from studies.tuning import Stage, Tuned, tune


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "study.py", usage="%(prog)s study [data ...] [options]", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"Studies: {', '.join(STUDIES)}.",
    )  # fmt: skip
    shows = parser.add_mutually_exclusive_group()
    shows.add_argument("--dry-run", action="store_true", help="start nothing: print the commands and their number")
    shows.add_argument("--status", action="store_true", help="start nothing: print the states of runs, the time left")
    shows.add_argument(
        "--commands", action="store_true", help="start nothing: print the table of finished runs with their commands"
    )
    parser.add_argument("--short", action="store_true", help="fewer epochs: table1, table4, beam_search, knn")
    parser.add_argument(
        "--name", help="heads*, own_features: name of the files in results/ (default: heads, or FILE's)"
    )
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="heads*: methods, or all (default: four of them)"
    )
    parser.add_argument(
        "--num_valid",
        type=int,
        help="heads*, own_features: rows that validate, 0 for the data's own (default: 5000, or a fifth)",
    )
    parser.add_argument("--human", type=user_path, metavar="FILE", help="noise*: CIFAR-100_human.pt of CIFAR-100N")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="noise*, few_labels: kinds (default: all)")
    parser.add_argument(
        "--losses",
        nargs="+",
        metavar="NAME",
        help="noise*, few_labels, own_features: losses by name (default: all, or six)",
    )
    parser.add_argument(
        "--folder", type=user_path, help=f"noise*: folder for files of labels (default: {noise.FOLDER})"
    )
    parser.add_argument("--choice", choices=("noisy", "clean"), help="noise: which labels choose (default: noisy)")
    return parser


def parse_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The study, its data and its flags; then the flags for the launcher and for every run.

    Raises:
        ValueError: no such study, or data or a flag that it does not take.
    """
    head = list(takewhile(lambda word: not word.startswith("-"), words))
    args, extra = make_parser().parse_known_args(words[len(head) :])
    if not head or head[0] not in STUDIES:
        raise ValueError(f"name a study first, one of {', '.join(STUDIES)}")
    args.study = head[0]
    args.data = head[1:]
    entry = STUDIES[args.study]
    for name in sorted(set().union(*(known.options for known in STUDIES.values()))):
        value = getattr(args, name)
        is_given = value is not None and value is not False  # 0 is given
        if is_given and name not in entry.options:
            raise ValueError(f"{args.study} takes no --{name}")
    if entry.data != ("DATA...",) and len(args.data) != len(entry.data):
        raise ValueError(f"{args.study} takes {' '.join(entry.data) or 'no data'}, got {' '.join(args.data) or 'none'}")
    if args.commands and extra:
        raise ValueError(f"--commands shows the table of runs that are there, and takes no {' '.join(extra)}")
    check_flags_of_runs(args.study, extra)
    args.starts_nothing = args.dry_run or args.status or args.commands
    return args, extra


def check_flags_of_runs(study: str, extra: Sequence[str]) -> None:
    """Raise ValueError for a flag that no run has, that the study would not find, or that only some runs would have."""
    entry = STUDIES[study]
    _, flags = parse_launcher_flags(extra)
    for flag, _ in split_flags(flags):
        setting = BY_FLAG.get(flag)
        if setting is None:
            raise ValueError(f"{study} takes no {flag}: no script has such a flag")
        if setting.name in ("results", "also", "method"):
            raise ValueError(f"{study} takes no {flag}: its files and its losses are those of the study")
        if entry.has_trials and setting.role not in (MACHINE, CALL):
            raise ValueError(f"{study} finds its trials by their settings, and takes no {flag} beside its own")
        if entry.trains_together and is_of_one_loss(setting):
            raise ValueError(f"{study} trains several losses at once, and {flag} would reach the first alone")


def check_files(names: Sequence[str], others: Sequence[str] = ()) -> None:
    """Raise FileNotFoundError for a name that is neither a file nor one of others."""
    for name in names:
        if name not in others and not Path(name).exists():
            raise FileNotFoundError(f"there is no file {name}")


def studies_of(args: argparse.Namespace) -> Iterator[Study | Tuned]:
    """The studies that a call runs, one after another; a later one may need what an earlier one gave."""
    make = STUDIES[args.study].make
    earlier = earlier_trials(args)
    if args.starts_nothing and earlier is not None and not earlier.is_file():
        print(f"# {args.study}: known when {earlier.name} is there")
    elif args.study in noise.DESIGNS_OF_LABELS:
        yield from noise_studies(args)
    elif args.study in DESIGNS:
        yield from studies_of_draws(args)
    elif args.study == own_features.NAME:
        yield study_of_own_features(args)
    elif args.study.startswith("heads"):
        yield make(args.data[0], **heads_options(args))
    elif args.study.startswith("tiny_imagenet"):
        yield make(embeddings=embeddings_id(tiny_imagenet.DATA))
    else:
        check_files(args.data, DATASETS)
        options = {}
        if args.short:
            options["short"] = True
        yield make(*args.data, **options)


def earlier_trials(args: argparse.Namespace) -> Path | None:
    """The trials of another study around which a study has its own; None if it has no such."""
    if args.study == "heads_more":
        return RESULTS / f"{args.name or 'heads'}_trials.csv"
    if args.study == "tiny_imagenet_more":
        return ROOT / tiny_imagenet.TRIALS
    return None


def heads_options(args: argparse.Namespace) -> dict:
    """The options of a study of linear classifiers. Raises FileNotFoundError if the embeddings look like a file."""
    data = args.data[0]
    if "/" in data or Path(data).suffix:
        check_files([data])
    options = {"embeddings": embeddings_id(data)}
    if args.num_valid == 0 and Path(data).is_file():
        check_has_valid_split(Path(data))
    if args.methods:
        from studies.heads import KNOWN

        unknown = [method for method in args.methods if method not in (*KNOWN, "all")]
        if unknown:
            raise ValueError(f"--methods: there is no {unknown[0]}; choose among all, {', '.join(KNOWN)}")
        options["methods"] = args.methods
        if "all" in args.methods:
            options["methods"] = KNOWN
    for name in ("name", "num_valid"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    return options


def check_has_valid_split(path: Path) -> None:
    """Raise ValueError if a file has no rows of its own that validate."""
    from data.embeddings import load_embeddings  # loads PyTorch

    if "valid" not in load_embeddings(path).splits:
        raise ValueError(f"--num_valid 0: {path} has no rows of its own that validate; give a number")


def study_of_own_features(args: argparse.Namespace) -> Tuned:
    """The study of a file of embeddings.

    Raises:
        FileNotFoundError, ValueError: it is absent, has too few classes or rows, or no split for the test.
    """
    from data.embeddings import load_embeddings  # loads PyTorch

    check_files(args.data)
    losses = args.losses or own_features.LOSSES
    check_names("--losses", losses, own_features.KNOWN)
    path = Path(args.data[0])
    data = load_embeddings(path)
    if "test" not in data.splits:
        raise ValueError(
            f"{path} has no test_embeddings: validation chooses here, and other rows must measure; hold a fifth out"
        )
    if data.num_classes < own_features.LEAST_CLASSES:
        raise ValueError(f"{path} has {data.num_classes} classes: a top-k loss needs at least 3")
    num_rows = len(data["train"])
    num_valid = args.num_valid
    if num_valid is None:
        num_valid = own_features.num_valid_of(num_rows)
    if "valid" in data.splits:
        if args.num_valid:
            raise ValueError(f"--num_valid: {path} has {len(data['valid'])} rows that validate")
        num_valid = 0
    elif not 0 < num_valid < num_rows:
        raise ValueError(f"--num_valid {num_valid} must be at least 1 and leave some of {num_rows} rows to train")
    size = own_features.Size(num_rows - num_valid, num_valid, data.num_classes)
    name = args.name or path.stem
    return own_features.own_features(str(path), size, name, losses, embeddings_id(path))


def noise_studies(args: argparse.Namespace) -> Iterator[Tuned]:
    """The study of each kind of labels; its file of labels is written first."""
    check_files(args.data)
    design = DESIGNS[args.study]
    folder = args.folder or noise.FOLDER
    kinds = kinds_of(args)
    if "human" in kinds and (args.human is None or not args.human.is_file()):
        raise ValueError("--human must name CIFAR-100_human.pt; or leave human out by --labels")
    for labels in kinds:
        path = folder / f"{labels}.pt"
        write_labels(design.kinds[labels], path, args)
        yield design.study(labels, args.losses or (), folder, embeddings_id(path))


def studies_of_draws(args: argparse.Namespace) -> Iterator[Tuned]:
    """The study of each draw of a file of embeddings."""
    check_files(args.data)
    path = Path(args.data[0])
    name = embeddings_id(path)
    for kind in kinds_of(args):
        yield DESIGNS[args.study].study(kind, args.losses or (), path, name)


def kinds_of(args: argparse.Namespace) -> list[str]:
    """The kinds of labels, or draws, of a call. Raises ValueError for a kind or a loss that the study does not have."""
    design = DESIGNS[args.study]
    kinds = args.labels or list(design.kinds)
    losses = args.losses or []
    check_names("--losses", losses, design.losses)
    check_names("--labels", kinds, tuple(design.kinds))
    return kinds


def check_names(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for a name that a flag does not take."""
    for name in names:
        if name not in known:
            raise ValueError(f"{flag}: there is no {name}; choose among {', '.join(known)}")


def write_labels(labels: noise.Labels, path: Path, args: argparse.Namespace) -> None:
    """Write the embeddings with a kind of labels to a file, unless it is there; or show the command that does."""
    from scripts import relabel

    words = [args.data[0], *labels.flags.split(), "--noisy_valid", "--output", str(path)]
    if not labels.flags:
        words[1:1] = ["--human", str(args.human)]
    written = relabel.parse_arguments(words)
    if relabel.is_written(written):
        return
    if args.starts_nothing:
        print(shlex.join([".venv/bin/python", "scripts/relabel.py", *words]))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    relabel.write(written, replaces=True)


class Launching:
    """Launches the commands of a stage, or shows them or their state.

    Args:
        args, extra: of `parse_arguments`.
        run_per_core: whether a run per core fits into memory.
    """

    def __init__(self, args: argparse.Namespace, extra: Sequence[str], run_per_core: bool) -> None:
        self.args = args
        self.extra = list(extra)
        self.run_per_core = run_per_core

    def __call__(self, stage: Stage) -> int:
        if self.args.status:
            self.show_status(stage)
            return 0
        flags = ["--name", stage.name]
        if self.run_per_core:
            flags.append("--run-per-core")
        if self.args.dry_run:
            flags.append("--dry-run")
        else:
            self.note_if_slow(stage)
        return launch(stage.commands, [*flags, *self.extra])

    def note_if_slow(self, stage: Stage) -> None:
        """Print a note where this machine would take long in the precision of the runs."""
        _, flags = parse_launcher_flags(self.extra)
        runs = [run for command in stage.commands for run in expected_runs(f"{command} {shlex.join(flags)}")]
        devices = {run.get("device", "auto") for run in runs if run.get("precision") == "bf16"}
        if devices:
            from experiments.common.processes import choose_device, note_if_slow  # loads PyTorch

            for device in devices:
                note_if_slow(choose_device(device), "bf16")

    def show_status(self, stage: Stage) -> None:
        launching, flags = parse_launcher_flags(["--name", stage.name, *self.extra])
        by_file: dict[Path, list] = {}
        for run in runs_of(stage.commands, flags, launching.logs):
            by_file.setdefault(results_of(run.command), []).append(run)
        for path, runs in by_file.items():
            status = Status(path, launching.logs)
            commands = [run.command for run in runs]
            print(status_text(commands, [run.log.stem for run in runs], stage.name, status))


def results_of(command: str) -> Path:
    """The results file of a command."""
    return ROOT / expected_runs(command)[0]["results"]


def files_of(study: Study | Tuned) -> list[Path]:
    """The files whose tables a study prints at its end."""
    if isinstance(study, Tuned):
        return [ROOT / study.finals.commands.results]
    return [ROOT / file for file in study.files]


def run(study: Study | Tuned, args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Run a study and print its tables, or show what was asked for; return the exit status."""
    if args.commands:
        print_tables(study, args)
        return 0
    if isinstance(study, Tuned):
        launching = Launching(args, extra, run_per_core=True)
        status = tune(study, launching, args.starts_nothing)
    else:
        launching = Launching(args, extra, study.run_per_core)
        status = launching(Stage(study.name, distinct(study.commands(), extra)))
    if not args.starts_nothing and status < 128:
        print_tables(study, args)
    return status


def distinct(commands: Sequence[str], extra: Sequence[str]) -> list[str]:
    """The commands that still train different runs when flags go to each, such as one seed for all."""
    _, flags = parse_launcher_flags(extra)
    by_runs: dict[str, str] = {}
    for command in commands:
        runs = expected_runs(f"{command} {shlex.join(flags)}")
        by_runs.setdefault(repr(runs), command)
    return list(by_runs.values())


def print_tables(study: Study | Tuned, args: argparse.Namespace) -> None:
    """Print the table of each file of a study that has runs, yours or this repository's."""
    for path in files_of(study):
        if path.is_file() or (args.commands and repository_file(path).is_file()):
            print(f"\n{reproduction.report(path, args.choice or 'noisy', args.commands, study)}", end="")
        elif args.commands:
            print(f"# {study.name}: no runs yet; --dry-run prints its commands")


def main(argv: Sequence[str] | None = None) -> int:
    words = argv
    if words is None:
        words = sys.argv[1:]
    args, extra = parse_arguments(words)
    for study in studies_of(args):
        status = run(study, args, extra)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(door.call(main))
