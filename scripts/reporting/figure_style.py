"""What the figures share: one colour, marker and line style per method, sizes for print, and files that are the same
bytes whenever they are drawn from the same numbers.

The colours are those of Okabe and Ito, told apart by colour-blind readers; marker and line style tell the methods apart
in grey.
"""

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from scripts.shared.atomic_file import atomic_write

COLUMN, PAGE = 3.35, 6.9  # inches: a column, and both with the gap between
GREY = "#767676"
pyplot.rcParams.update(
    {
        **{"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7.5},
        **{"xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "lines.linewidth": 1.2, "lines.markersize": 4.5},
        **{
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.6,
            "axes.titlelocation": "left",
            "legend.frameon": False,
        },
        **{"axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.5, "axes.axisbelow": True},
        **{"figure.dpi": 100, "savefig.dpi": 300, "svg.hashsalt": "topk", "figure.constrained_layout.use": True},
    }
)


class Style(NamedTuple):
    """How a method looks in every figure."""

    label: str
    color: str
    marker: str | tuple
    line: str | tuple


STYLES = {
    "softmax_cross_entropy": Style("softmax CE", "#000000", "s", "-"),
    "ldr_kl": Style("LDR-KL", "#4D4D4D", (8, 1, 0), (0, (3, 2))),
    "smooth_topk": Style("smooth top-k", "#999999", "h", (0, (1, 1))),
    "smooth_hard_topk": Style("smooth top-k (hard)", "#666666", "p", (0, (1, 2))),
    "truncated_entropy": Style("truncated entropy", "#661100", (4, 1, 0), (0, (4, 2))),
    "noised_topk": Style("noised top-k", "#A56EFF", "$\\clubsuit$", (0, (1, 3))),
    "imbalanced_noised_topk": Style("noised top-k (imbalanced)", "#FA4D56", "$\\spadesuit$", (0, (1, 1, 1, 3))),
    "neuralsort": Style("NeuralSort", "#E69F00", "o", "--"),
    "softsort": Style("SoftSort", "#56B4E9", "^", "-."),
    "sinkhorn_sort": Style("SinkhornSort", "#009E73", "D", (0, (5, 1))),
    "soft_topk": Style("SOFT top-k", "#CC79A7", "v", (0, (3, 1, 1, 1, 1, 1))),
    "lml": Style("LML", "#882255", "P", (0, (4, 1, 1, 1))),
    "lapsum": Style("LapSum", "#332288", "*", (0, (2, 1))),
    "sparse_topk": Style("sparse top-k", "#44AA99", "d", (0, (6, 1, 1, 1))),
    "capped_softmax": Style("capped softmax", "#AA4499", "H", (0, (1, 1, 3, 1))),
    "subset_topk": Style("subset top-k", "#117733", "8", (0, (5, 1, 2, 1))),
    "df_topk": Style("DFTopK", "#AAAA00", (6, 1, 0), (0, (8, 2))),
    "recall_surrogate": Style("recall surrogate", "#EE8866", (4, 1, 45), (0, (7, 1, 1, 1, 1, 1))),
    "perturbed_topk": Style("perturbed top-k", "#B30000", "$\\infty$", (0, (2, 2))),
    "odd_even": Style("odd-even network", "#8C6D1F", "<", (0, (5, 3))),
    "bitonic": Style("bitonic network", "#0072B2", ">", (0, (3, 1, 1, 1))),
    "splitter_selection": Style("splitter selection", "#D55E00", "X", "-"),
}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg into a folder, close the figure, and return the two paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        with atomic_write(path, "wb") as file:
            figure.savefig(file, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else {})
    pyplot.close(figure)
    return paths


def look(method: str, filled: bool = True, line: bool = True) -> dict[str, Any]:
    """How a method is plotted: colour, marker (hollow unless filled) and, with `line`, its line."""
    style = STYLES[method]
    face = {} if filled else {"markerfacecolor": "none"}
    return {"color": style.color, "marker": style.marker, "linestyle": style.line if line else "", **face}


def key(label: str, **how: Any) -> Line2D:
    """An entry of a legend that is no method's."""
    return Line2D([], [], **{"color": GREY, "linestyle": "", "label": label, **how})


def points_of(filled: bool) -> Line2D:
    """A legend's entry for what filled points are, ours, or hollow ones, published."""
    return key("ours" if filled else "published", marker="o", markerfacecolor=GREY if filled else "none")


def legend(
    figure: Figure,
    methods: Iterable[str],
    more: Sequence[Line2D] = (),
    *,
    lines: bool = True,
    columns: int | None = None,
) -> None:
    """Put a legend below a figure: the methods (after a comma may follow more) in the order of STYLES, then `more`."""
    handles = []
    for name in sorted(dict.fromkeys(methods), key=lambda name: list(STYLES).index(name.partition(",")[0])):
        method, comma, rest = name.partition(",")
        handles.append(key(STYLES[method].label + comma + rest, **look(method, line=lines)))
    columns = columns or (2 if figure.get_figwidth() <= COLUMN else 4)
    figure.legend(handles=[*handles, *more], loc="outside lower center", ncols=columns, handlelength=3)


def leave_out(sentence: str) -> list[Any]:
    """Say why a figure is not drawn."""
    print(f"left out: {sentence}", file=sys.stderr)
    return []


def note(figure: Figure, text: str) -> None:
    """Say above a figure what it shows."""
    wrapped = textwrap.wrap(text, int(figure.get_figwidth() * 18))
    figure.suptitle("\n".join(wrapped), fontsize=7, x=0.01, ha="left")
