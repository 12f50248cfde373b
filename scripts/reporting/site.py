"""What the documentation takes from the repository when it is built (mkdocs.yml, hooks): no number is typed twice.

A line `[results](../results/table1.csv)` becomes the table of that file as scripts/report.py writes it, beside the
published values, with its figures; without the file every row of it is "not run". `[results of dataset=digits](...)`
takes these rows alone. Likewise `paired` (the rows minus softmax cross-entropy's by seed), `epochs` (what an epochs
file says, with its curves), `temperatures of [0,0,0,0,1]` (the lines of that P_K of report.py --temperatures),
`beam_search` (the tables of its arms), `benchmark` (a file of results/benchmarks/) and `include` (Markdown of
the repository without its title). Where pages are read without being built, such a line is a link to the file. The
figures are drawn anew; formulas become MathML, which browsers show without a script or a font from elsewhere.
"""

import functools
import re
import tempfile
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.flags import ROOT
from scripts import report
from scripts.reporting import beam_search, epochs_figure, temperatures
from scripts.reporting.formats import markdown
from scripts.reporting.paired import paired
from scripts.reporting.results import as_markdown
from scripts.shared.run_record import chosen_rows
from topk_losses import METHODS

MARK = re.compile(
    r"^\[(results|paired|epochs|temperatures|beam_search|benchmark|include)(?: of (.*))?\]\((?:\.\./)*(\S+)\)$",
    re.MULTILINE,
)
IMAGE = re.compile(r"(!\[[^]]*\])\((?!https?:)([^)]+)\)")
CAPTIONS = {
    "accuracy": "Test accuracy of every row with 95 % intervals over seeds; published values hollow",
    "accuracy_over_epochs": "Test accuracy over the training, with the band of a 95 % interval over seeds",
}
P_K = re.compile(r"\[[^]|]*\]")  # which no narrow column shall break
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def expand(text: str, has_figure: Callable[[str], bool], up: str = "", root: Path = ROOT) -> str:
    """Return a page's Markdown with its marks replaced. has_figure: of a file name; up: from the page to figures/."""

    def replaced(mark: re.Match[str]) -> str:
        kind, part, path = mark[1], mark[2], root / mark[3]
        if kind == "include":
            body = path.read_text(encoding="utf-8").partition("\n")[2]
            body = IMAGE.sub(lambda image: f"{image[1]}({up}figures/{Path(image[2]).stem}.svg)", body)
            return MARK.sub(replaced, body)
        if kind == "temperatures":
            lines = temperatures.lines_of(temperatures.ordered(path, chosen_rows(path)))
            return as_markdown(lines[lines.pop("P_K").str.replace(" ", "") == part])
        if kind == "beam_search":
            return beam_search.text_of(path, chosen_rows(path))
        if kind == "benchmark":
            return _measured(path)
        if kind == "epochs":
            curves = f"![Test accuracy over the epochs, published end points hollow]({up}figures/{path.stem}.svg)"
            return f"{epochs_figure.text_of(path, chosen_rows(path))}\n\n{curves}"
        if kind == "paired":
            return paired(path.stem, chosen_rows(path), "softmax_cross_entropy")
        table = report.table_of(path, chosen_rows(path, [part]) if part else None)
        if not table.lines:
            return f"`{mark[3]}`: not run."
        text = P_K.sub(lambda p_k: p_k[0].replace(" ", "\N{NO-BREAK SPACE}"), markdown(table))
        for kind, caption in CAPTIONS.items():
            if has_figure(file := f"{path.stem}_{kind}.svg"):
                text += f"\n\n![{caption}]({up}figures/{file})\n\n*{caption}.*"
        return text

    return MARK.sub(replaced, text)


def _measured(path: Path) -> str:
    """What a benchmark's file holds, under what all its rows share; where and by what it was made, but not when."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns=["python", "git_commit"], errors="ignore")
    shared = [column for column in rows if rows[column].nunique() == 1]
    told = ", ".join(f"{column} {rows[column][0]}" for column in shared if rows[column][0])
    return f"`{path.name}`: {told}.\n\n{as_markdown(rows.drop(columns=shared))}"


def mathml(html: str) -> str:
    """Return a page's HTML with its formulas as MathML. Raises ValueError for a command that the converter leaves."""
    from latex2mathml.converter import convert

    def converted(found: re.Match[str]) -> str:
        tag, opening, latex = found.groups()
        formula = convert(unescape(latex).strip(), display="block" if opening == "[" else "inline")
        if "\\" in formula:
            raise ValueError(f"latex2mathml does not know a command of this formula: {latex.strip()}")
        return f'<{tag} class="formula">{formula}</{tag}>'

    return FORMULA.sub(converted, html)


@functools.cache  # once, however often `mkdocs serve` builds
def figures(marks: frozenset[tuple[str, str, str]]) -> dict[str, bytes]:
    """Return every figure of the documentation by its file name; marks: what pages show, (kind, part, path).

    A part of a file has no figure.
    """
    from scripts.reporting.benchmark_figures import draw_benchmarks
    from scripts.reporting.figures import draw_figures_of_table
    from scripts.reporting.permutation_figure import draw_method, draw_permutations

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draw_permutations(folder)
        draw_benchmarks(folder)
        for method in METHODS:
            draw_method(method, folder)
        for kind, path in {(kind, ROOT / name) for kind, part, name in marks if not part}:
            if kind == "epochs":
                epochs_figure.draw(path, chosen_rows(path), folder)
            elif kind == "results" and (table := report.table_of(path)).run_lines:
                draw_figures_of_table(table, ROOT / "results" / "runs", folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the figures to the files of the site."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    marks = frozenset(mark for page in pages for mark in MARK.findall(page))
    for name, content in figures(marks).items():
        files.append(File.generated(config, f"figures/{name}", content=content))
    return files


def on_page_markdown(text: str, page: Any, files: Any, **_: Any) -> str:
    """mkdocs: draw tables and included files into a page."""
    up = "../" * page.file.src_uri.count("/")
    return expand(text, lambda name: files.get_file_from_path(f"figures/{name}") is not None, up)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs: formulas become MathML."""
    return mathml(html)
