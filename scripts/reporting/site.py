"""What the documentation takes from the repository when it is built (mkdocs.yml, hooks): no number is typed twice.

A line `<!-- results: table1 -->` becomes the table of results/table1.csv as scripts/report.py writes it, beside the
published values, with its figures; without the file every row of it is "not run". A line `<!-- include: FILE -->`
becomes a Markdown file of the repository without its title. The figures are drawn anew; formulas become MathML, which
browsers show without a script or a font from elsewhere.
"""

import functools
import re
import tempfile
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

from experiments.shared.environment import ROOT
from experiments.shared.run_record import read_rows
from scripts import report
from scripts.reporting.formats import markdown
from topk_losses import METHODS

MARK = re.compile(r"^<!-- (results|include): (\S+) -->$", re.MULTILINE)
IMAGE = re.compile(r"(!\[[^]]*\])\((?!https?:)([^)]+)\)")
CAPTIONS = {
    "top1_top5": "Test top-1 against top-5 accuracy of every row: ours filled, published values hollow",
    "accuracy_over_p_k": "Test accuracy of each method over P_K",
    "accuracy_over_epochs": "Test accuracy over the training, with a band of one standard deviation over seeds",
}
P_K = re.compile(r"\[[^]|]*\]")  # which no narrow column shall break
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def expand(text: str, has_figure: Callable[[str], bool], up: str = "", results: Path = ROOT / "results") -> str:
    """Return a page's Markdown with its marks replaced. has_figure: of a file name; up: from the page to figures/."""

    def replaced(mark: re.Match[str]) -> str:
        kind, name = mark.groups()
        if kind == "include":
            body = (ROOT / name).read_text(encoding="utf-8").partition("\n")[2]
            return IMAGE.sub(lambda image: f"{image[1]}({up}figures/{Path(image[2]).stem}.svg)", body)
        table, _ = table_of(results / f"{name}.csv")
        if not table.lines:
            return f"`results/{name}.csv`: not run."
        images = []
        for kind, caption in CAPTIONS.items():
            if has_figure(file := f"{name}_{kind}.svg"):
                images += [f"![{caption}]({up}figures/{file})", f"*{caption}.*"]
        text = P_K.sub(lambda p_k: p_k[0].replace(" ", "\N{NO-BREAK SPACE}"), markdown(table))
        return "\n\n".join([text, *images])

    return MARK.sub(replaced, text)


def table_of(path: Path) -> tuple[report.Table, report.Row]:
    """Return the table of a results file, which need not be there, and its protocol."""
    return report.table_of(path, read_rows(path) if path.is_file() else [])


def mathml(html: str) -> str:
    """Return a page's HTML with its formulas as MathML."""
    from latex2mathml.converter import convert

    def converted(formula: re.Match[str]) -> str:
        tag, opening, latex = formula.groups()
        display = "block" if opening == "[" else "inline"
        return f'<{tag} class="formula">{convert(unescape(latex).strip(), display=display)}</{tag}>'

    return FORMULA.sub(converted, html)


@functools.cache  # once, however often `mkdocs serve` builds
def figures(names: frozenset[str]) -> dict[str, bytes]:
    """Return every figure of the documentation by its file name; names: the results files that pages show."""
    from scripts.reporting.cost_figure import draw_cost
    from scripts.reporting.figures import draw_figures_of_table, draw_times
    from scripts.reporting.permutation_figure import draw_method, draw_permutations

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draw_permutations(folder)
        draw_times(ROOT / "results" / "benchmarks", folder)
        draw_cost(folder)
        for method in METHODS:
            draw_method(method, folder)
        for table, protocol in (table_of(ROOT / "results" / f"{name}.csv") for name in names):
            if table.run_lines:
                draw_figures_of_table(table, protocol, ROOT / "results" / "runs", folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the figures to the files of the site."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    names = frozenset(name for page in pages for kind, name in MARK.findall(page) if kind == "results")
    for name, content in figures(names).items():
        files.append(File.generated(config, f"figures/{name}", content=content))
    return files


def on_page_markdown(text: str, page: Any, files: Any, **_: Any) -> str:
    """mkdocs: draw tables and included files into a page."""
    up = "../" * page.file.src_uri.count("/")
    return expand(text, lambda name: files.get_file_from_path(f"figures/{name}") is not None, up)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs: formulas become MathML."""
    return mathml(html)
