"""Tables of the reference pages: a method's parameters, all methods beside one another, the flags of a script."""

import argparse
import contextlib
import functools
import inspect
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

import topk_losses
from experiments.common.paths import PAPER, REPOSITORY, ROOT
from experiments.common.settings import CROSS_ENTROPY
from reporting import markdown, tables
from reporting.frames import METRICS, plain_number, read_runs, read_text
from topk_losses import METHODS
from topk_losses.methods import SINGLE_K

PAGES = ROOT / "docs" / "methods"
TUTORIAL = ROOT / "docs" / "tutorial.md"
KINDS = {
    "losses": "no sort",
    "robust": "wrong labels",
    "sorts": "relaxed sort",
    "transports": "optimal transport",
    "thresholds": "threshold",
    "subsets": "random subset",
    "ranks": "ranks",
    "networks": "sorting network",
}
SIZES = {"time, 100 classes": (128, 100, ""), "time, 1,000 classes": (500, 1000, "16")}  # batch, classes, m


def default_of(method: str, parameter: str) -> str:
    """A parameter's default as the code has it."""
    spec = METHODS[method]
    if parameter == "inverse_temperature":
        return f"{spec.inverse_temperature:g}"
    if parameter == "k":
        return "required"
    built: Any = spec.operator
    if spec.loss and method in SINGLE_K:
        built = spec.loss(k=5)
    elif spec.loss:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LDR-KL with its defaults is cross-entropy, and warns
            built = spec.loss()
    if parameter == "art_lambda":
        parameter = "art_exponent"
    value = getattr(built, parameter)
    if value is None:
        return "none"
    return plain_number(str(value))


def parameters(method: str) -> str:
    """The table of a method's own parameters: its default and the published value."""
    rows = read_text(PAPER / "parameters.csv").query("method == @method")
    names = [f"`{row.parameter}` {row.symbol}".strip() for row in rows.itertuples()]
    defaults = [default_of(method, parameter) for parameter in rows["parameter"]]
    table = pd.DataFrame({"parameter": names, "default": defaults, "published": rows["published"].replace("", "—")})
    return markdown.plain_table(table)


def exports(*names: str) -> str:
    """What each name of the library is, by the first sentence of its docstring."""
    rows = []
    for name in names:
        first = re.split(r"(?<=\.)\n", str(inspect.getdoc(getattr(topk_losses, name))), maxsplit=1)[0]
        rows.append({"name": f"`{name}`", "what it is": escaped(first)})
    return markdown.plain_table(rows)


def escaped(text: str) -> str:
    """Return plain text as Markdown that shows it; code between backticks stays."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for number in range(0, len(parts), 2):
        part = parts[number].replace("<", "&lt;").replace(">", "&gt;")
        parts[number] = re.sub(r"([*_|\[\]])", r"\\\1", part)
    return "".join(parts)


def described(docstring: str) -> dict[str, str]:
    """Return the sections of a docstring by their heading; what stands before the first one has the heading ""."""
    found = {"": ""}
    heading = ""
    for line in docstring.splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Example):", line):
            heading = line.removesuffix(":")
            found[heading] = ""
        elif line and heading and not line.startswith(" "):  # prose behind a section
            heading = ""
            found[""] += f"\n{line}\n"
        else:
            found[heading] += f"{line}\n"
    return found


def items(section: str) -> dict[str, str]:
    """Return the descriptions of a section by the names that stand before them."""
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r" {4}(\w[\w, ]*): (.*)", line)  # what goes on is indented further
        if start:
            name = start[1]
            found[name] = start[2]
        elif name and line:
            found[name] += f" {line.strip()}"
    return found


def default_in_signature(value: Any, names: str) -> str:
    """Return the defaults of parameters; "" for those that are required, or that the signature does not name."""
    parameters = inspect.signature(value).parameters
    defaults = []
    for name in names.split(", "):
        if name in parameters and parameters[name].default is not inspect.Parameter.empty:
            defaults.append(f"`{parameters[name].default!r}`")
    return ", ".join(defaults)


def api(*names: str) -> str:
    """Return a section for each name of the library: its description, and the table of its parameters."""
    found = []
    for name in names:
        value = functools.reduce(getattr, name.split("."), topk_losses)
        parts = described(str(inspect.getdoc(value)))
        found.append(f"### `{name.rpartition('.')[2]}`")
        found += [escaped(paragraph) for paragraph in parts[""].split("\n\n") if paragraph.strip()]
        for heading, title in (("Args", "parameter"), ("Attributes", "attribute")):
            rows = []
            for item, meaning in items(parts.get(heading, "")).items():
                rows.append(
                    {title: f"`{item}`", "default": default_in_signature(value, item), "meaning": escaped(meaning)}
                )
            if rows:
                found.append(markdown.plain_table(rows))
        for heading in ("Returns", "Raises"):
            if heading in parts:
                found.append(f"{heading}: {escaped(parts[heading])}")
        if "Example" in parts:
            found.append(f"```text\n{inspect.cleandoc(parts['Example'])}\n```")
    return "\n\n".join(found)


def sections() -> dict[str, str]:
    """The address of each method's section, from docs/."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        for method in re.findall(r"^## (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found[method] = f"methods/{page.name}#{method}"
    return found


def gains_of_heads() -> dict[str, list[str]]:
    """Each method's differences to cross-entropy in top-1 and top-5, linear classifiers, with intervals."""
    found = {}
    for name in ("heads", "heads_truncated_entropy"):  # each with its own runs of cross-entropy
        table = tables.gains(name, read_runs(REPOSITORY / f"{name}.csv"), CROSS_ENTROPY)
        for line in table.lines:
            gains = [markdown.interval(line.numbers[metric].gain) for metric in METRICS]
            if all(gains):
                found[line.method] = gains
    return found


def weights_of(method: str) -> str:
    """Which P_K a method takes."""
    takes = METHODS[method].takes
    operator = METHODS[method].operator
    if operator and operator.has_zeros:
        takes = "with top-1"
    return takes.replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{NON-BREAKING HYPHEN}")


def short_time(text: str) -> str:
    """A ratio with one decimal below 10."""
    time = float(text)
    if math.isnan(time):
        return ""
    if time < 9.95:
        return f"{time:.1f}"
    return f"{time:.0f}"


def methods() -> str:
    """All methods beside one another: what they take, their default, their accuracy and their time."""
    times = read_text(REPOSITORY / "benchmarks" / "losses_all.csv").set_index(["method", "batch", "n", "m"])
    ratios = times["ours_over_cross_entropy"]
    where = sections()
    gains = gains_of_heads()
    rows = []
    for method, spec in METHODS.items():
        row = {"method": f"[`{method}`]({where[method]})", "kind": KINDS[spec.family], "P_K": weights_of(method)}
        row["inverse temperature"] = ""
        if spec.inverse_temperature is not None:
            row["inverse temperature"] = f"{spec.inverse_temperature:g}"
        row["Δ top-1"], row["Δ top-5"] = gains.get(method, ["", ""])
        for name, size in SIZES.items():
            row[name] = short_time(ratios.get((method, *map(str, size)), "nan"))
        rows.append(row)
    return markdown.table(rows)


def draw_tutorial(folder: Path) -> list[Path]:
    """Run the code of the tutorial, and keep the figure that it saves."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    style = Path(__file__).with_name("report.mplstyle")
    made = {**os.environ, "MATPLOTLIBRC": str(style), "MPLBACKEND": "Agg", "SOURCE_DATE_EPOCH": "0"}
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-c", "".join(blocks)], cwd=scratch, env=made, check=True, capture_output=True)
        return [Path(shutil.copy(Path(scratch) / "top_k_accuracy.svg", folder / "tutorial.svg"))]


def parser_of(script: str) -> argparse.ArgumentParser:
    """The parser that a script prints for --help."""
    found: list[argparse.ArgumentParser] = []
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self)),
        mock.patch.object(sys, "argv", [script, "--help"]),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return found[0]


def flags(script: str, *groups: str) -> str:
    """The flags of a script as a table. groups: titles of groups of flags; without them all are shown."""
    rows = []
    for group in parser_of(script)._action_groups:
        if groups and group.title not in groups:
            continue
        for flag in group._group_actions:
            if flag.dest != "help":
                rows.append(flag_row(flag))
    return markdown.plain_table(rows)


def flag_row(flag: argparse.Action) -> dict[str, str]:
    """What a flag's line shows: its names, and its help after its choices."""
    choices = ""
    if not flag.metavar:
        choices = ", ".join(f"`{choice}`" for choice in flag.choices or [])
    meaning = (flag.help or "") % vars(flag)
    if choices and meaning.startswith("default"):
        meaning = f"{choices} ({meaning})"
    elif choices:
        meaning = f"{meaning}: {choices}"
    meaning = re.sub(r" (\(default: .*\)): (.*)", r": \2 \1", meaning).replace("|", "\\|").replace("<", "&lt;")
    names = [f"`{name}`" for name in flag.option_strings or [flag.dest]]
    return {"flag": ", ".join(names), "meaning": meaning}
