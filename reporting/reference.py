"""Tables of the reference pages: a method's parameters, all methods beside one another, the flags of a script."""

import argparse
import contextlib
import inspect
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pandas as pd

import topk_losses
from experiments.common.paths import PAPER, REPOSITORY, ROOT
from reporting import markdown, tables
from reporting.compare import Interval
from reporting.frames import METRICS, read_runs, read_text, short_number
from topk_losses import METHODS, make_operator
from topk_losses.methods import SINGLE_K, TOP1

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
    if spec.loss and method in SINGLE_K:
        built = spec.loss(k=5)
    elif spec.loss:
        built = spec.loss()
    else:
        built = make_operator(method, None, 5)
    value = getattr(built, parameter)
    if value is None:
        return "none"
    return short_number(str(value))


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
        parts = re.split(r"(`[^`]*`)", first.replace("\n", " "))
        parts[::2] = [re.sub(r"([*_<|\[\]])", r"\\\1", part) for part in parts[::2]]
        rows.append({"name": f"`{name}`", "what it is": "".join(parts)})
    return markdown.plain_table(rows)


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
        lines = tables.gains(name, read_runs(REPOSITORY / f"{name}.csv"), "softmax_cross_entropy").lines
        for row in lines.dropna(subset="test_top1_gain").to_dict("records"):
            gains = [Interval(row[f"{metric}_gain"], row[f"{metric}_half"]) for metric in METRICS]
            found[row["method"]] = [markdown.interval(gain) for gain in gains]
    return found


def weights_of(method: str) -> str:
    """Which P_K a method takes."""
    takes = "any"
    operator = METHODS[method].operator
    if operator and operator.has_zeros:
        takes = "with top-1"
    if method in TOP1:
        takes = "top-1"
    if method in SINGLE_K:
        takes = "one k"
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
