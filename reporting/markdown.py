"""Numbers and tables as text."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from experiments.common.settings import BY_NAME
from reporting.compare import Agreement, Interval, mean

MINUS = "−"
HEADINGS = {
    "p_k": "P_K",
    "lr": "learning rate",
    "n_epochs": "epochs",
    "inverse_temperature": "inverse temperature",
    "weight_decay": "weight decay",
    "label_smoothing": "label smoothing",
}
NUMBER = re.compile(
    r"(\*\*)?[+−≈]?[\d.,]+(e-\d+)?( ± [\d.]+(\\\*)?| / [\d.]+)?( \(\d+\))?(\*\*)?†?|not run|the same trial|"
)
LATEX = {
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "β": r"$\beta$",
    "±": r"$\pm$",
    "−": "$-$",
    "≈": r"$\approx$",
    "†": r"$^\dagger$",
    "Δ": r"$\Delta$",
}


def heading(name: str) -> str:
    return HEADINGS.get(name, name)


def fixed(value: float, digits: int = 2) -> str:
    """A number with so many decimals; "" for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    if math.isnan(value):
        return ""
    return f"{value:+.{digits}f}".replace("-", MINUS)


def number(value: float) -> str:
    """A number with the digits that it needs; "" for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:g}"


def mean_std(values: pd.Series, digits: int = 2) -> str:
    """The mean and, of several values, the sample standard deviation."""
    values = values.dropna()
    if values.empty:
        return ""
    text = fixed(mean(values), digits)
    if len(values) > 1:
        text += f" ± {fixed(values.std(), digits)}"
    return text


def mean_std_seeds(values: pd.Series, digits: int = 2) -> str:
    """Mean ± standard deviation and the number of seeds: "61.64 ± 0.46 (3)"; "not run" without values."""
    values = values.dropna()
    if values.empty:
        return "not run"
    return f"{mean_std(values, digits)} ({len(values)})"


def interval(value: Interval, digits: int = 2) -> str:
    """A difference with its interval: "+0.12 ± 1.98"."""
    text = signed(value.mean, digits)
    if text and not math.isnan(value.half):
        text += f" ± {fixed(value.half, digits)}"
    return text


def agreement(value: Agreement) -> str:
    """A verdict with its difference: "agrees (+0.12 ± 1.98)"."""
    if value.verdict == "":
        return ""
    return f"{value.verdict} ({interval(value.difference)})"


def p_k(text: str) -> str:
    """A P_K as a list: [0.5, 0, 0, 0, 0.5]."""
    if not text:
        return ""
    return f"[{', '.join(map(short, text.split()))}]"


def short(text: str) -> str:
    """A number with six digits at most; any other text as it is."""
    try:
        return number(float(text))
    except ValueError:
        return text


def setting(name: str, value: object) -> str:
    """A value of a setting in a table."""
    if name == "p_k":
        return p_k(str(value))
    if isinstance(value, float):
        return number(value)
    return short(str(value))


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


def without_empty_columns(cells: pd.DataFrame) -> pd.DataFrame:
    is_used = (cells.fillna("") != "").any()
    return cells.loc[:, is_used]


def table(cells: pd.DataFrame | Sequence[dict[str, str]]) -> str:
    """A Markdown table of text, numbers to the right."""
    frame = pd.DataFrame(cells).fillna("")
    sides = []
    for name in frame:
        is_number = frame[name].map(lambda cell: NUMBER.fullmatch(cell) is not None)
        side = "right" if is_number.all() else "left"
        sides.append(side)
    return frame.to_markdown(index=False, tablefmt="pipe", colalign=sides, disable_numparse=True)


def plain_table(cells: pd.DataFrame | Sequence[dict[str, str]]) -> str:
    """A Markdown table of text, all to the left."""
    return pd.DataFrame(cells).to_markdown(index=False, tablefmt="pipe", disable_numparse=True)


def details(summary: str, content: str) -> str:
    """Content that stays folded below its summary until a reader opens it."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{content}\n\n</details>'


def latex(cells: pd.DataFrame, caption: str, name: str) -> str:
    """A table environment of LaTeX; it needs the package booktabs."""
    escapes = str.maketrans(LATEX)
    escaped = cells.fillna("").map(lambda cell: cell.translate(escapes))
    escaped = escaped.rename(columns=lambda column: column.translate(escapes))
    text = escaped.style.hide(axis="index").to_latex(
        hrules=True, position_float="centering", caption=caption.translate(escapes), label=f"tab:{name}"
    )
    return "% needs \\usepackage{booktabs}\n" + text.replace("P\\_K", "$P_K$")


@dataclass
class Shared:
    """Settings that need no column.

    Attributes:
        by_name: what all configurations have, by the name of the setting.
        by_methods: what all configurations of some methods have, by their names: {"softsort, neuralsort": "m 16"}.
    """

    by_name: dict[str, str] = field(default_factory=dict)
    by_methods: dict[str, str] = field(default_factory=dict)


def origin(name: str, runs: pd.DataFrame, shared: Shared) -> str:
    """Where the runs of a table come from: file, seeds, machines, versions, and the settings that they share."""
    parts = [f"{name}.csv", *features(runs), *seeds(runs), *machines(runs)]
    versions = set()
    if "torch_version" in runs:
        for cell in runs["torch_version"]:
            for version in filter(None, cell.split(", then ")):  # of a run that was resumed
                versions.add(version.partition("+")[0])
    if versions:
        parts.append(f"PyTorch {', '.join(sorted(versions))}")
    common = [f"{label} {text}" for label, text in shared.by_name.items() if text not in ("false", "ours")]
    of_methods = [f"{methods}: {text}" for methods, text in shared.by_methods.items()]
    stated = "; ".join(filter(None, [", ".join(common), *of_methods]))
    line = f"Runs: {', '.join(parts)}."
    if stated:
        line += f" Settings: {stated}."
    return line


def features(runs: pd.DataFrame) -> list[str]:
    """The networks that made the embeddings."""
    if "backbone" not in runs:
        return []
    found = []
    for row in runs[["backbone", "resolution"]].drop_duplicates().itertuples():
        if row.backbone:
            found.append(f"features of {row.backbone} at {number(row.resolution)} pixels")
    return found


def seeds(runs: pd.DataFrame) -> list[str]:
    if "seed" not in runs:
        return []
    found = sorted(set(runs["seed"].astype(int)))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return [f"seeds {found[0]} to {found[-1]}"]
    return [f"seed {', '.join(map(str, found))}"]


def machines(runs: pd.DataFrame) -> list[str]:
    if "device_name" not in runs:
        return []
    counts = runs["device_name"].value_counts()
    if len(counts) == 1:
        return [counts.index[0]]
    found = []
    for machine, count in counts.items():
        plural = "" if count == 1 else "s"
        found.append(f"{count} run{plural} on {machine}")
    return found


def settings_of(firsts: pd.DataFrame, identity: pd.DataFrame) -> tuple[list[str], Shared]:
    """The settings that need a column, and those that need none.

    A setting that differs between configurations of one method, or is one of HEADINGS or m or margin, has a column.

    Args:
        firsts: the first run of each configuration.
        identity: its settings as text, without method and P_K, with all digits.
    """
    columns = []
    shared = Shared()
    between_methods = []
    for name in identity:
        cells = identity[name]
        if cells.nunique() <= 1:
            is_off = cells.iloc[0] == "0" and BY_NAME[name].kind is float
            if cells.iloc[0] and not is_off:
                shared.by_name[name] = setting(name, firsts[name].iloc[0])
            continue
        differs_within = (cells.groupby(firsts["method"]).nunique() > 1).any()
        if name in HEADINGS or name in ("m", "margin") or differs_within:
            columns.append(name)
        else:
            between_methods.append(name)
    by_method: dict[str, list[str]] = {}
    for number_, method in firsts["method"].drop_duplicates().items():
        parts = []
        for name in between_methods:
            if identity.loc[number_, name]:
                parts.append(f"{name} {setting(name, firsts.loc[number_, name])}")
        by_method.setdefault(", ".join(parts), []).append(str(method))
    for stated, methods in by_method.items():
        if stated:
            shared.by_methods[", ".join(methods)] = stated
    return columns, shared
