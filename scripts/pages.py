"""Write the generated parts of the Markdown pages again: tables made from results/*.csv.

    python scripts/pages.py              # rewrite them
    python scripts/pages.py --check      # change nothing; name the pages that would change, exit status 1
    python scripts/pages.py --figures    # also draw docs/figures again

A generated part stands between two comments, which GitHub and the built documentation hide:

    <!-- begin paired results/heads.csv -->
    <!-- end -->

The first word is a key of KINDS, whose function returns Markdown. The others are its arguments: words as in a shell,
and .csv files relative to the repository root.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from experiments.common import columns, door
from experiments.common.files import replace_file
from experiments.common.paths import REPOSITORY, ROOT
from experiments.common.settings import CROSS_ENTROPY
from reporting import (
    draws,
    findings,
    hours,
    markdown,
    noise,
    reference,
    reproduction,
    scratch,
    speed,
    tables,
    temperatures,
)
from reporting.frames import METRICS, read_protocol, read_published, read_runs
from reporting.tables import percent_digits
from scripts import report
from studies.catalog import study_of
from topk_losses import METHODS

WHOLE = re.compile(r"\[[\d., ]+\]|\d ± \d|Δ top")  # a P_K, a number with its interval: no narrow column shall break it
# The line below a table that names its runs, and what a reader unfolds.
RUNS = re.compile(
    r"^Runs: ([\w.]+\.csv)(.*?)(?: Settings: (.*?)\.)?((?: (?:Published|Rerun|Not as published|[†≈]):.*)?)$",
    re.MULTILINE,
)
FIGURES = ROOT / "docs" / "figures"
PART = re.compile(r"(^<!-- begin (\S+)((?: [^\n]*?)?) -->\n).*?(^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def results(file: Path, *conditions: str, flags: Sequence[str] = ()) -> str:
    """What scripts/report.py shows with these flags. conditions: COLUMN=VALUE, as of --where."""
    words = [str(file), *flags, *(f"--where={condition}" for condition in conditions)]
    return report.report(report.parse_arguments(words)).text


def published(table: str) -> str:
    """The accuracies of a table of results/paper/ in percent, without ours."""
    rows = read_published(table).to_dict("records")
    cells = []
    for row in rows:
        values = {label: published_value(row, metric) for metric, label in METRICS.items() if row[metric]}
        if not values:
            continue
        name = row["published_name"]
        if row["second_hand"] == "true":
            name += "†"
        cells.append({"Row": name, "P_K": markdown.p_k(row["p_k"]), **values})
    protocol = read_protocol(table)
    caption = f"{protocol['title']}: published test accuracy in percent. {tables.about_published(rows, protocol)}"
    return f"{caption}\n\n{markdown.table(markdown.without_empty_columns(pd.DataFrame(cells)))}"


def beside(file: Path, yours: Path) -> str:
    """What scripts/report.py shows where the rows of another file are yours."""
    study = study_of(file.name, REPOSITORY)
    return reproduction.report_runs(file.name, read_runs(file), read_runs(yours), study, with_commands=False)


def published_value(row: dict[str, str], metric: str) -> str:
    """A published percentage with the digits of its source."""
    text = f"{100 * float(row[metric]):.{percent_digits(row[metric])}f}"
    if row["approximate"] == metric:
        return f"≈{text}"
    return text


def front_door_table() -> str:
    """The README's table of answers."""
    from reporting import front_door  # matplotlib takes a second

    return front_door.table()


KINDS: dict[str, Callable[..., str]] = {
    "results": results,
    "published": published,
    "beside": beside,
    "hours": hours.hours,
    "paired": partial(results, flags=["--paired", CROSS_ENTROPY]),
    "temperatures": partial(results, flags=["--temperatures"]),
    "auto_gains": temperatures.auto_gains,
    "benchmark": speed.benchmark,
    "official": speed.official,
    "training_steps": speed.training_steps,
    "noise_table": noise.noise_table,
    "noise_answer": noise.noise_answer,
    "noise_draws_answer": draws.noise_draws_answer,
    "few_labels_answer": draws.few_labels_answer,
    "scratch_answer": scratch.scratch_answer,
    "edges": draws.edges,
    "columns": columns.as_markdown,
    "parameters": reference.parameters,
    "methods": reference.methods,
    "sorted_scores": partial(temperatures.sorted_scores, REPOSITORY),
    "flags": reference.flags,
    "exports": reference.exports,
    "front_door": front_door_table,
    "api": reference.api,
    "findings": findings.as_markdown,
    "evidence": findings.evidence,
    "speed": speed.summary,
}


def pages() -> list[Path]:
    """The pages that may have generated parts."""
    single = [ROOT / name for name in ("README.md", "benchmarks/README.md", "results/README.md")]
    return single + sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("results/tables/*.md"))


def rewritten(text: str, folder: Path = ROOT) -> str:
    """A page's text with its generated parts made again. folder: of the page.

    Raises:
        ValueError: if a kind is unknown, a comment has no partner, or a results file cannot be read.
    """

    def linked(runs: re.Match[str]) -> str:
        file, origin, settings, notes = runs.groups()
        line = f"Runs: [{file}]({os.path.relpath(REPOSITORY / file, folder)}){origin}{notes}"
        if not settings:
            return line
        listed = "\n".join(f"- {setting}" for setting in settings.split("; "))
        return f"{line}\n\n{markdown.details('Settings', listed)}"

    def made(part: re.Match[str]) -> str:
        begin, kind, arguments, end = part.groups()
        if kind not in KINDS:
            raise ValueError(f"begin must be followed by one of {', '.join(KINDS)}, got {kind!r}")
        words = []
        for word in shlex.split(arguments):
            if word.startswith("results/"):
                word = ROOT / word
            words.append(word)
        content = WHOLE.sub(lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), KINDS[kind](*words))
        return f"{begin}\n{RUNS.sub(linked, content.strip())}\n\n{end}"

    text, number = PART.subn(made, text)
    num_begins = len(re.findall(r"^<!-- begin\b", text, re.MULTILINE))
    num_ends = len(re.findall(r"^<!-- end\b", text, re.MULTILINE))
    if num_begins != number or num_ends != number:
        raise ValueError("each <!-- begin KIND --> needs an <!-- end --> on a line of its own")
    return text


def draw_method_figures(folder: Path) -> list[Path]:
    """Draw a figure for each method, one of all matrices and the README's; return their paths."""
    from reporting import permutation_figure  # matplotlib takes a second, and tables need none

    drawn = permutation_figure.draw_permutations(folder) + permutation_figure.draw_one_sample(folder)
    for method in METHODS:
        drawn += permutation_figure.draw_method(method, folder)
    return drawn


def draw_result_figures(folder: Path) -> list[Path]:
    """Draw the figures that are made from results/*.csv, and return their paths."""
    from reporting import figures, front_door

    drawn = front_door.draw_hero(folder) + front_door.draw_pull(folder)
    drawn += figures.draw_speed(folder)
    for name in ("temperature", "temperature_training", "table1_short", "table4_short", "table1_epochs", "knn"):
        flags = []
        if name.startswith("temperature"):
            flags = ["--temperatures"]
        if name == "knn":
            flags = ["--where", "dataset=mnist"]
        words = [f"{REPOSITORY}/{name}.csv", f"--figures={folder}", *flags]
        drawn += report.report(report.parse_arguments(words)).figures
    drawn += figures.draw_noise(REPOSITORY / "noise", folder)
    drawn += figures.draw_few_labels(REPOSITORY / "few_labels", REPOSITORY / "few_labels_scratch.csv", folder)
    drawn += figures.draw_beam_search(REPOSITORY / "beam_search.csv", folder)
    return drawn + figures.draw_findings(folder)


def rewrite(page: Path, only_check: bool) -> bool:
    """Write a page again, if it changes; return whether it does."""
    name = page.relative_to(ROOT)
    old = page.read_text(encoding="utf-8")
    try:
        new = rewritten(old, page.parent)
    except (ValueError, OSError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    if new == old:
        return False
    if only_check:
        print(f"{name} would change: run scripts/pages.py", file=sys.stderr)
    else:
        replace_file(page, new.encode())
        print(f"{name} rewritten", file=sys.stderr)
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(
        "pages.py", allow_abbrev=False, description="Write the generated parts of the pages."
    )
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page would change")
    does.add_argument("--figures", action="store_true", help="also draw the figures of docs/figures")
    args = parser.parse_args(argv)
    status = 0
    for page in pages():
        if rewrite(page, only_check=args.check) and args.check:
            status = 1
    if args.figures:
        for draw in (draw_method_figures, draw_result_figures, reference.draw_tutorial):
            draw(FIGURES)
    return status


if __name__ == "__main__":
    sys.exit(door.call(main))
