"""A table as Markdown, LaTeX (booktabs), HTML or CSV, in percent; CSV in fractions with all digits.

HTML is one page that needs nothing else: the figures are in it, a click on a heading sorts, dark where the reader's
system is. The other formats are of the table alone.
"""

import base64
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import pandas as pd

from scripts.reporting.results import Row, as_markdown, mean_std
from scripts.reporting.tables import METRICS, Line, Table, digits, shown_p_k

LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"±": r"$\pm$", "−": "$-$", "—": "---", "≈": r"$\approx$", "†": r"$^\dagger$"},
    }
)
OF_EPOCHS = re.compile("n_epochs ").match  # whether a reason is about them
PAGE = Path(__file__).with_name("page.html")
WORDS = ("method", "P_K", "public")  # columns that are no numbers


def markdown(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return the caption and a table for README files."""
    cells = _cells(table, "**{}**".format, lambda text: text.replace("|", "\\|"))
    return f"{table.caption}\n\n{as_markdown(_flat(cells), words=_words(cells))}\n"


def latex(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return a table environment; it needs the package booktabs."""

    def escaped(text: str) -> str:
        return "$P_K$".join(part.translate(LATEX) for part in text.split("P_K"))

    cells = _cells(table, r"\textbf{{{}}}".format, escaped)
    words, groups = _words(cells), [group for group, _ in cells]
    cells = cells.rename(columns=escaped) if any(groups) else _flat(cells).rename(columns=escaped)
    text = cells.style.hide(axis="index").to_latex(
        hrules=True,
        caption=escaped(table.caption),
        label=f"tab:{re.sub('[^A-Za-z0-9]', '-', table.name)}",
        position_float="centering",
        column_format="l" * words + "r" * (len(groups) - words),
        multicol_align="c",
    )
    for group in dict.fromkeys(filter(None, groups)):  # a rule below each heading of several
        first, number = groups.index(group) + 1, groups.count(group)
        rule = rf"\cmidrule(lr){{{first}-{first + number - 1}}}" if number > 1 else ""
        text = re.sub(r"(\\toprule\n.*)\n", lambda found, rule=rule: f"{found[1]} {rule}\n", text, count=1)
    return f"% needs \\usepackage{{booktabs}}\n{text}"


def as_csv(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return a row per line of the table, fractions in [0, 1] with all digits, and in each what its runs were."""
    rows = []
    for line in table.lines:
        name = line.published.get("published_name", line.method)
        row: dict[str, object] = {"name": name, "method": line.method, "p_k": line.own_p_k}
        for metric in table.decimals:
            row[f"published_{metric}"] = line.published.get(metric, "")
            row[f"rerun_{metric}"] = line.rerun.get(metric, "")
            row[f"{metric}_mean"] = line.mean(metric) if line.runs else None
            row[f"{metric}_std"] = line.std(metric) if line.runs else None
            row[f"{metric}_difference"] = line.difference(metric)
        row["n_seeds"], row["n_seeds_asked"] = len(line.runs), table.num_seeds
        row["not_comparable"] = "; ".join(line.reasons)
        for name in ("n_epochs", "limit_train", "limit_test", "precision", "implementation", "device_name"):
            row[name] = " + ".join(dict.fromkeys(run.get(name, "") for run in line.runs))
        row["source"], row["second_hand"] = line.published.get("source", ""), line.published.get("second_hand", "")
        rows.append(row)
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")


def html(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return a page with the table and those of the figures that are SVG."""
    images = "\n".join(
        f'<img alt="{escape(path.stem.replace("_", " "))}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for path in figures
        if path.suffix == ".svg"
    )
    title, _, caption = escape(table.caption).partition(". ")
    cells = _flat(_cells(table, "<b>{}</b>".format, escape)).to_html(index=False, escape=False, border=0)
    page = PAGE.read_text(encoding="utf-8")
    for name, content in {"title": title, "caption": caption, "table": cells, "images": images}.items():
        page = page.replace(f"<!-- {name} -->", content)
    return page


FORMATS = {"markdown": markdown, "latex": latex, "csv": as_csv, "html": html}


def _flat(cells: pd.DataFrame) -> pd.DataFrame:
    """With one line of headings."""
    return cells.set_axis([f"{group} {heading}".strip() for group, heading in cells], axis=1)


def _words(cells: pd.DataFrame) -> int:
    """The number of columns, the first ones, that are no numbers."""
    return sum(heading in WORDS for _, heading in cells)


def _cells(table: Table, bold: Callable[[str], str], escaped: Callable[[str], str]) -> pd.DataFrame:
    """Return the cells as text, under the heading of each column and, where it is one of several, their group's.

    bold: applied to the best of a column. escaped: to every cell before that.
    """
    lines, columns = table.lines, {}

    def add(group: str, heading: str, cells: Sequence[str], values: Sequence[float] = ()) -> None:
        """values: the largest is bold where there are two or more; -1 is none."""
        best = max(values) if sum(value >= 0 for value in values) > 1 else None
        cells = list(map(escaped, cells))
        for place, value in enumerate(values):
            cells[place] = bold(cells[place]) if value == best else cells[place]
        columns[group, heading] = cells

    add("", "method", [line.name + "†" * (line.published.get("second_hand") == "true") for line in lines])
    if any(line.own_p_k for line in lines):
        add("", "P_K", [shown_p_k(line.own_p_k) for line in lines])
    if any(line.published.get("public") for line in lines):
        public = {"true": "yes", "false": "no"}
        add("", "public", [public.get(line.published.get("public"), "") for line in lines])
    have_run = [line for line in lines if line.runs]
    others = have_run and all(any(map(OF_EPOCHS, line.reasons)) for line in have_run)
    epochs = {run.get("n_epochs") for line in have_run for run in line.runs} - {None} if others else set()
    ours = table.implementation + (f", {epochs.pop()} epochs" if len(epochs) == 1 else "")
    for metric, decimals in table.decimals.items():
        shown = METRICS[metric]
        for heading in ("published", "rerun"):
            rows = [getattr(line, heading) for line in lines]
            if any(rows):  # second-hand values are apart
                values = [float(row.get(metric) or -1) if row.get("second_hand") == "false" else -1 for row in rows]
                add(shown, heading, [_published(row, metric) for row in rows], values)
        means = [round(100 * line.mean(metric), decimals) if line.runs else -1 for line in lines]
        add(shown, ours, [_ours(line, metric, decimals) for line in lines], means)
        if any(line.published for line in lines) and not (have_run and all(line.reasons for line in have_run)):
            add(shown, "difference", [_difference(line, metric, decimals) for line in lines])
    seeds = [(len(line.runs), table.num_seeds) for line in lines]
    add("", "seeds", [f"{n}" + f" of {asked}" * (n < asked) if n else "" for n, asked in seeds])
    return pd.DataFrame(columns)


def _published(row: Row, metric: str) -> str:
    """A published value with the digits of its source."""
    if not row.get(metric):
        return "—" if row else ""
    return "≈" * (row["approximate"] == metric) + f"{100 * float(row[metric]):.{digits(row[metric])}f}"


def _ours(line: Line, metric: str, decimals: int) -> str:
    if line.runs:
        return mean_std([100 * float(run[metric]) for run in line.runs], decimals)
    return "not run" if line.method else ""


def _difference(line: Line, metric: str, decimals: int) -> str:
    """Percentage points with their sign; empty for a line that was not run, a dash where there is none to show."""
    difference = line.difference(metric)
    if difference is not None:
        return f"{100 * difference:+.{decimals}f}".replace("-", "−")
    return "—" if line.runs else ""
