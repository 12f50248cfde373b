"""Write the generated parts of the Markdown pages again: tables made from results/*.csv.

    python scripts/pages.py              # rewrite them
    python scripts/pages.py --check      # change nothing; name the pages that would change, exit status 1
    python scripts/pages.py --figures    # also draw docs/figures again

A generated part stands between two comments, which GitHub and the built documentation hide:

    <!-- begin paired results/heads.csv -->
    <!-- end -->

The first word is a key of KINDS, and the others are the arguments of its function. Paths are relative to the repository
root. The functions return Markdown.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from scripts.reporting import columns, findings, noise, reference, speed, studies, tables
from scripts.reporting.runs import METRICS, ReportError, read_runs, shown_p_k
from topk_losses import METHODS

P_K = re.compile(r"\[[\d., ]+\]")  # which no narrow column shall break
ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "results", ROOT / "docs" / "figures"
PART = re.compile(r"(^<!-- begin (\S+)((?: [^\n]*?)?) -->\n).*?(^<!-- end -->$)", re.MULTILINE | re.DOTALL)
BASELINE = "softmax_cross_entropy"


def results(file: str, *conditions: str) -> str:
    """Return the runs beside the published ones. conditions: COLUMN=VALUE. Without the file no row has run."""
    path = ROOT / file
    runs = read_runs(path, conditions) if path.exists() else pd.DataFrame()
    return tables.FORMATS["markdown"](tables.beside_published(path.stem, runs, tables.published_table(path, runs)))


def published(table: str) -> str:
    """Return the accuracies of a table of results/paper/ in percent, without ours."""
    rows, protocol = tables.read_published(table)
    cells = []
    for row in rows:
        name = row["published_name"] + "†" * (row["second_hand"] == "true")
        values = {
            label: f"{'≈' * (row['approximate'] == metric)}{100 * float(row[metric]):.{len(row[metric]) - 4}f}"
            for metric, label in METRICS.items()
            if row[metric]
        }
        cells += [{"Row": name, "P_K": shown_p_k(row["p_k"]), **values}] if values else []
    notes = " †: second-hand, read in a note about a paper." * any(row["second_hand"] == "true" for row in rows)
    caption = f"{protocol['title']}: published test accuracy in percent.{notes}"
    return f"{caption}\n\n{tables.as_markdown(pd.DataFrame(cells).fillna(''))}"


def paired(file: str, *conditions: str) -> str:
    """Return each setting minus cross-entropy, by seed. conditions: COLUMN=VALUE."""
    return tables.FORMATS["markdown"](tables.paired(Path(file).stem, read_runs(ROOT / file, conditions), BASELINE))


def temperatures(file: str, *p_k: str) -> str:
    """Return each method's best inverse temperature for one P_K, such as: 0.5 0 0 0 0.5."""
    runs = read_runs(ROOT / file, [f"p_k={' '.join(p_k)}"] if p_k else [])
    return tables.FORMATS["markdown"](studies.temperatures(Path(file).stem, runs))


def auto_gains(file: str, *methods: str) -> str:
    """Return what the temperature "auto" gains on the default, in the trials of these methods for 5 epochs."""
    return studies.auto_gains(Path(file).stem, read_runs(ROOT / file, ["n_epochs=5"]), methods)


def epochs(file: str) -> str:
    """Return what the runs reached after some of their epochs, and their differences to cross-entropy."""
    return studies.epochs_text(ROOT / file, read_runs(ROOT / file))


def beam_search(file: str) -> str:
    """Return the error rates of each arm of the beam search."""
    return studies.beam_search(Path(file).stem, read_runs(ROOT / file))


def noise_table(file: str, *labels: str) -> str:
    """Return the losses compared on one kind of labels, such as: 0.4 among 100, draw 0."""
    return noise.noise_table(ROOT / file, " ".join(labels))


def noise_answer(file: str) -> str:
    """Return the best top-k loss minus the best robust loss, for each kind of labels."""
    return noise.noise_answer(ROOT / file)


KINDS: dict[str, Callable[..., str]] = {
    "results": results,
    "published": published,
    "paired": paired,
    "temperatures": temperatures,
    "auto_gains": auto_gains,
    "epochs": epochs,
    "beam_search": beam_search,
    "benchmark": speed.benchmark,
    "official": speed.official,
    "training_steps": speed.training_steps,
    "noise_table": noise_table,
    "noise_answer": noise_answer,
    "columns": columns.as_markdown,
    "parameters": reference.parameters,
    "methods": reference.methods,
    "sorted_scores": reference.sorted_scores,
    "flags": reference.flags,
    "exports": reference.exports,
    "main_findings": findings.main_table,
    "findings": findings.full_table,
    "speed": speed.summary,
}


def pages() -> list[Path]:
    """Return the pages that may have generated parts."""
    return [ROOT / name for name in ("README.md", "benchmarks/README.md", "results/README.md")] + sorted(
        ROOT.glob("docs/**/*.md")
    )


def rewritten(text: str) -> str:
    """Return a page's text with its generated parts made again.

    Raises:
        ReportError: if a kind is unknown, a comment has no partner, or a results file cannot be read.
    """

    def made(part: re.Match[str]) -> str:
        begin, kind, arguments, end = part.groups()
        if kind not in KINDS:
            raise ReportError(f"begin must be followed by one of {', '.join(KINDS)}, got {kind!r}")
        content = P_K.sub(lambda p_k: p_k[0].replace(" ", "\N{NO-BREAK SPACE}"), KINDS[kind](*arguments.split()))
        return f"{begin}\n{content.strip()}\n\n{end}"

    text, number = PART.subn(made, text)
    if {number} != {len(re.findall(f"^<!-- {word}\\b", text, re.MULTILINE)) for word in ("begin", "end")}:
        raise ReportError("each <!-- begin KIND --> needs an <!-- end --> on a line of its own")
    return text


def draw_method_figures(folder: Path) -> list[Path]:
    """Draw a figure for each method, and one of all matrices; return their paths."""
    from scripts.reporting import permutation_figure  # matplotlib takes a second, and tables need none

    drawn = permutation_figure.draw_permutations(folder)
    for method in METHODS:
        drawn += permutation_figure.draw_method(method, folder)
    return drawn


def draw_result_figures(folder: Path) -> list[Path]:
    """Draw the figures that are made from results/*.csv, and return their paths."""
    from scripts.reporting import figures

    drawn = figures.draw_benchmarks(folder)
    for name in ("temperature", "temperature_training"):
        drawn += figures.draw_temperatures(name, read_runs(RESULTS / f"{name}.csv"), folder)
    for name in ("table1_short", "table4_short", "strong"):
        runs = read_runs(RESULTS / f"{name}.csv")
        table = tables.published_table(Path(name), runs)
        drawn += figures.draw_accuracy(tables.beside_published(name, runs, table), folder)
    path = RESULTS / "table1_epochs.csv"
    drawn += figures.draw_epochs(path, read_runs(path), folder)
    drawn += figures.draw_noise(RESULTS / "noise.csv", "human", folder)
    return drawn + figures.draw_findings(folder)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(
        "pages.py", allow_abbrev=False, description="Write the generated parts of the pages."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page would change")
    parser.add_argument("--figures", action="store_true", help="also draw the figures of docs/figures")
    args = parser.parse_args(argv)
    status = 0
    for page in pages():
        name, old = page.relative_to(ROOT), page.read_text(encoding="utf-8")
        try:
            new = rewritten(old)
        except (ReportError, OSError, TypeError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 2
        if new != old:
            status = 1 if args.check else 0
            print(f"{name} {'would change: run scripts/pages.py' if args.check else 'rewritten'}", file=sys.stderr)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if args.figures:
        for draw in (draw_method_figures, draw_result_figures, reference.draw_tutorial):
            draw(FIGURES)
    return status


if __name__ == "__main__":
    sys.exit(main())
