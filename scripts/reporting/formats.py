"""A table as Markdown, LaTeX (booktabs), HTML or CSV, in percent; CSV in fractions with all digits.

HTML is one page that needs nothing else: the figures are in it, a click on a heading sorts, dark where the reader's
system is. The other formats are of the table alone.
"""

import base64
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from pathlib import Path

from scripts.reporting.tables import METRICS, Line, Row, Table, shown_p_k

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "−": "$-$", "—": "---", "≈": r"$\approx$", "†": r"$^\dagger$"},
}
SCHEDULE = ("n_epochs ", "lr_schedule ")  # how a reason begins that is about the schedule
PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, and whether it is the best of its column."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Column:
    """A column: group is the heading above its heading, empty for none; numbers are set to the right."""

    group: str
    heading: str
    cells: list[Cell]
    is_number: bool = False


def markdown(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return the caption and a table for README files."""
    columns = _columns(table)
    lines = [
        [f"{column.group} {column.heading}".strip() for column in columns],
        ["---:" if column.is_number else "---" for column in columns],
        *(
            [f"**{cell.text}**" if cell.bold else cell.text.replace("|", "\\|") for cell in cells]
            for cells in zip(*(column.cells for column in columns))
        ),
    ]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table.caption}\n\n{body}\n"


def latex(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return a table environment; it needs the package booktabs."""
    columns = _columns(table)
    groups: list[tuple[str, int]] = []
    for column in columns:
        if groups and column.group and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    heads, rules, at = [], [], 1
    for group, width in groups:
        heads.append(rf"\multicolumn{{{width}}}{{c}}{{{_escaped(group)}}}" if group and width > 1 else _escaped(group))
        if group and width > 1:
            rules.append(rf"\cmidrule(lr){{{at}-{at + width - 1}}}")
        at += width
    body = []
    for cells in zip(*(column.cells for column in columns)):
        texts = [rf"\textbf{{{_escaped(cell.text)}}}" if cell.bold else _escaped(cell.text) for cell in cells]
        body.append(" & ".join(texts) + r" \\")
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{_escaped(table.caption)}}}",
            rf"\label{{tab:{re.sub('[^A-Za-z0-9]', '-', table.name)}}}",
            rf"\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in columns)}}}",
            r"\toprule",
            *([" & ".join(heads) + r" \\", " ".join(rules)] if rules else []),
            " & ".join(_escaped(column.heading) for column in columns) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def as_csv(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return a row per line of the table, fractions in [0, 1] with all digits, and in each what its runs were."""
    rows = []
    for line in table.lines:
        row = {"name": line.published.get("published_name", line.method), "method": line.method}
        row["p_k"] = _p_k(line)
        for metric in table.decimals:
            row[f"published_{metric}"] = line.published.get(metric, "")
            row[f"rerun_{metric}"] = line.rerun.get(metric, "")
            row[f"{metric}_mean"] = line.mean(metric) if line.runs else ""
            row[f"{metric}_std"] = _or_empty(line.std(metric) if line.runs else None)
            row[f"{metric}_difference"] = _or_empty(line.difference(metric))
        row["n_seeds"], row["n_seeds_asked"] = len(line.runs), table.num_seeds
        row["not_comparable"] = "; ".join(line.reasons)
        for name in ("n_epochs", "limit_train", "limit_test", "precision", "implementation", "device_name"):
            row[name] = " + ".join(dict.fromkeys(run.get(name, "") for run in line.runs))
        row["source"], row["second_hand"] = line.published.get("source", ""), line.published.get("second_hand", "")
        rows.append(row)
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def html(table: Table, figures: Sequence[Path] = ()) -> str:
    """Return a page with the table and those of the figures that are SVG."""
    columns = _columns(table)
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button>{escape(f"{column.group} {column.heading}".strip())}</button></th>'
        for column in columns
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' * column.is_number}>"
            + (f"<b>{escape(cell.text)}</b>" if cell.bold else escape(cell.text))
            + "</td>"
            for column, cell in zip(columns, cells)
        )
        + "</tr>"
        for cells in zip(*(column.cells for column in columns))
    )
    images = "\n".join(
        f'<img alt="{escape(path.stem.replace("_", " "))}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for path in figures
        if path.suffix == ".svg"
    )
    title, _, caption = escape(table.caption).partition(". ")
    page = PAGE.read_text(encoding="utf-8")
    for name, content in {"title": title, "caption": caption, "heads": heads, "body": body, "images": images}.items():
        page = page.replace(f"<!-- {name} -->", content)
    return page


FORMATS = {"markdown": markdown, "latex": latex, "csv": as_csv, "html": html}


def _columns(table: Table) -> list[Column]:
    lines = table.lines
    columns = [
        Column("", "method", [Cell(line.name + "†" * (line.published.get("second_hand") == "true")) for line in lines]),
    ]
    if any(map(_p_k, lines)):
        columns.append(Column("", "P_K", [Cell(shown_p_k(_p_k(line))) for line in lines]))
    if any(line.published.get("public") for line in lines):
        public = {"true": "yes", "false": "no"}
        columns.append(Column("", "public", [Cell(public.get(line.published.get("public"), "")) for line in lines]))
    is_published = any(line.published for line in lines)
    for metric, decimals in table.decimals.items():
        shown = METRICS[metric]
        if is_published:
            columns.append(Column(shown, "published", _published([line.published for line in lines], metric), True))
        if any(line.rerun for line in lines):
            columns.append(Column(shown, "rerun", _published([line.rerun for line in lines], metric), True))
        columns.append(Column(shown, table.implementation, _ours(lines, metric, decimals), True))
        if is_published:
            cells = [Cell(_difference(line, metric, decimals)) for line in lines]
            columns.append(Column(shown, "difference", cells, True))
    columns.append(Column("", "seeds", [Cell(_seeds(line, table.num_seeds)) for line in lines], True))
    return columns


def _p_k(line: Line) -> str:
    return line.runs[0].get("p_k", "") if line.runs else line.p_k


def _published(rows: Sequence[Row], metric: str) -> list[Cell]:
    """Published values with the digits of their source; the best is bold, second-hand values apart."""
    values = [Decimal(row[metric]) if row.get(metric) else None for row in rows]
    eligible = [value for row, value in zip(rows, values) if value is not None and row["second_hand"] == "false"]
    best = max(eligible) if len(eligible) > 1 else None
    cells = []
    for row, value in zip(rows, values):
        text = "" if not row else "—" if value is None else f"{value.scaleb(2):f}"
        cells.append(Cell("≈" * (row.get("approximate") == metric) + text, value is not None and value == best))
    return cells


def _ours(lines: Sequence[Line], metric: str, decimals: int) -> list[Cell]:
    """Mean ± std; the best mean, as shown, is bold where there are two or more."""
    means = [f"{100 * line.mean(metric):.{decimals}f}" if line.runs else None for line in lines]
    shown = [float(mean) for mean in means if mean]
    best = max(shown) if len(shown) > 1 else None
    cells = []
    for line, mean in zip(lines, means):
        if mean is None:
            cells.append(Cell("not run" if line.method else ""))
            continue
        std = line.std(metric)
        cells.append(Cell(mean + (f" ± {100 * std:.{decimals}f}" if std is not None else ""), float(mean) == best))
    return cells


def _seeds(line: Line, asked: int) -> str:
    if not line.runs:
        return ""
    return f"{len(line.runs)}" + (f" of {asked}" if len(line.runs) < asked else "")


def _difference(line: Line, metric: str, decimals: int) -> str:
    """Percentage points with their sign, empty for a line that was not run, or why there is no difference to show."""
    difference = line.difference(metric)
    if difference is not None:
        return f"{100 * difference:+.{decimals}f}".replace("-", "−")
    if line.runs and any(reason.startswith(SCHEDULE) for reason in line.reasons):
        return "another schedule"
    return "—" if line.runs else ""


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else value


def _escaped(text: str) -> str:
    parts = ["".join(LATEX.get(character, character) for character in part) for part in text.split("P_K")]
    return "$P_K$".join(parts)
