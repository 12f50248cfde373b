"""What the documentation takes from the repository when it is built (hooks of mkdocs.yml).

A line `[results](../results/table1.csv)` becomes the table of that file as scripts/report.py prints it, and its figure;
`[results of dataset=digits](...)` takes these runs alone. Likewise `paired` (minus softmax cross-entropy by seed),
`epochs`, `temperatures of [0,0,0,0,1]` (the lines of that P_K), `beam_search`, `benchmark` (a file of
results/benchmarks/) and `include` (Markdown of the repository without its title). Where pages are read without being
built, such a line is a link to the file. Formulas become MathML.
"""

import functools
import re
import tempfile
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.reporting import studies, tables
from scripts.reporting.runs import read_runs
from topk_losses import METHODS

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(
    r"^\[(results|paired|epochs|temperatures|beam_search|benchmark|include)(?: of (.*))?\]\((?:\.\./)*(\S+)\)$",
    re.MULTILINE,
)
IMAGE = re.compile(r"(!\[[^]]*\])\((?!https?:)([^)]+)\)")
CAPTION = "Test accuracy of every line with 95 % intervals over seeds; published values hollow"
P_K = re.compile(r"\[[^]|]*\]")  # which no narrow column shall break
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def results_table(path: Path, part: str | None = None) -> tables.Table:
    """Return the table of a results file beside the published values; without the file every row is not run."""
    runs = read_runs(path, [part] if part else []) if path.exists() else pd.DataFrame()
    return tables.beside_published(path.stem, runs, tables.published_table(path, runs))


def expand(text: str, has_figure: Callable[[str], bool], up: str = "", root: Path = ROOT) -> str:
    """Return a page's Markdown with its marks replaced. has_figure: of a file name; up: from the page to figures/."""

    def replaced(mark: re.Match[str]) -> str:
        kind, part, path = mark[1], mark[2], root / mark[3]
        if kind == "include":
            body = path.read_text(encoding="utf-8").partition("\n")[2]
            body = IMAGE.sub(lambda image: f"{image[1]}({up}figures/{Path(image[2]).stem}.svg)", body)
            return MARK.sub(replaced, body)
        if kind == "temperatures":
            lines = tables.shown(studies.temperatures(path.stem, read_runs(path)))
            return tables.as_markdown(lines[lines.pop("P_K").str.replace(" ", "") == part])
        if kind == "beam_search":
            return studies.beam_search(path.stem, read_runs(path))
        if kind == "benchmark":
            return measured(path)
        if kind == "epochs":
            curves = f"![Test accuracy over the epochs, published end points hollow]({up}figures/{path.stem}.svg)"
            return f"{studies.epochs_text(path, read_runs(path))}\n\n{curves}"
        if kind == "paired":
            return tables.FORMATS["markdown"](tables.paired(path.stem, read_runs(path), "softmax_cross_entropy"))
        text = P_K.sub(
            lambda p_k: p_k[0].replace(" ", "\N{NO-BREAK SPACE}"), tables.FORMATS["markdown"](results_table(path, part))
        )
        if has_figure(file := f"{path.stem}_accuracy.svg"):
            text += f"\n\n![{CAPTION}]({up}figures/{file})\n\n*{CAPTION}.*"
        return text

    return MARK.sub(replaced, text)


def measured(path: Path) -> str:
    """Return what a benchmark's file holds, under what all its rows share, but for when it was made."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns=["python", "git_commit"], errors="ignore")
    shared = [column for column in rows if rows[column].nunique() == 1]
    told = ", ".join(f"{column} {rows[column][0]}" for column in shared if rows[column][0])
    return f"`{path.name}`: {told}.\n\n{tables.as_markdown(rows.drop(columns=shared))}"


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
    """Return every figure of the documentation by its file name; marks: what pages show, (kind, part, path)."""
    from scripts.reporting.figures import draw_accuracy, draw_benchmarks, draw_epochs
    from scripts.reporting.permutation_figure import draw_method, draw_permutations

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draw_permutations(folder)
        draw_benchmarks(folder)
        for method in METHODS:
            draw_method(method, folder)
        for kind, path in {(kind, ROOT / name) for kind, part, name in marks if not part}:
            if kind == "epochs":
                draw_epochs(path, read_runs(path), folder)
            elif kind == "results" and path.exists():
                draw_accuracy(results_table(path), folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the figures to the files of the site."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    for name, content in figures(frozenset(mark for page in pages for mark in MARK.findall(page))).items():
        files.append(File.generated(config, f"figures/{name}", content=content))
    return files


def on_page_markdown(text: str, page: Any, files: Any, **_: Any) -> str:
    """mkdocs: draw tables and included files into a page."""
    up = "../" * page.file.src_uri.count("/")
    return expand(text, lambda name: files.get_file_from_path(f"figures/{name}") is not None, up)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs: formulas become MathML."""
    return mathml(html)
