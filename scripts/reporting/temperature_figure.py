"""Accuracy over the inverse temperature, of heads times the spread of their logits, a figure for each P_K."""

from pathlib import Path

from matplotlib.lines import Line2D

from scripts.reporting.figure_style import GREY, PAGE, STYLES, pyplot, save
from scripts.reporting.tables import shown_p_k
from scripts.temperature_report import grid_of, mean, rows_in

FLOOR_OF_HEADS, FLOOR = 5, 35  # points below the best that a panel still shows


def draw_temperatures(results: Path, folder: Path) -> list[Path]:
    """Draw <name of the file>_P_K.png and .svg for each P_K of a file, and return their paths."""
    drawn, grid = [], grid_of(results)
    of_heads = "last_test_logit_std" in rows_in(grid)[0]
    trained, times_spread, floor = "Networks", "", FLOOR
    if of_heads:
        trained, times_spread, floor = "Heads", " times the spread of a row's logits at the end", FLOOR_OF_HEADS
    baseline = grid.get("1", {}).get("softmax_cross_entropy", {}).get(None, [])
    for p_k, methods in grid.items():
        curves = {method: heads for method, heads in methods.items() if len(heads) > 1}
        if not curves:
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(PAGE, 3.6))
        for axis, k in zip(axes, (1, 5)):
            best = 0.0
            for method, heads in curves.items():
                style = STYLES[method.partition(",")[0]]
                tried = {float(beta or 0): rows for beta, rows in heads.items() if not isinstance(beta, str)}
                x = [beta * (mean(rows, "last_test_logit_std") if of_heads else 1) for beta, rows in tried.items()]
                y = [100 * mean(rows, f"test_top{k}") for rows in tried.values()]
                axis.plot(x, y, color=style.color, marker=style.marker, linestyle=style.line, markersize=3)
                best = max(best, *y)
            if baseline:
                axis.axhline(100 * mean(baseline, f"test_top{k}"), color=GREY, linewidth=0.8)
            axis.set_xscale("log")
            axis.set_ylim(best - floor, best + floor / 10)
            axis.set_xlabel(f"inverse temperature{' × standard deviation of the logits' if of_heads else ''}")
            axis.set_title(f"test top-{k}, %", loc="left")
        keys = []
        for method in curves:
            name, _, m = method.partition(",")
            s = STYLES[name]
            keys.append(Line2D([], [], color=s.color, marker=s.marker, linestyle=s.line, label=s.label + m))
        figure.legend(handles=keys, loc="outside lower center", ncols=5)
        figure.suptitle(
            f"{trained} trained with $P_K$ = {shown_p_k(p_k)}: accuracy, mean over the seeds, over β{times_spread}.\n"
            f"Points are β by factors of 2 to 2.5; what lies more than {floor} points below the best is cut off.\n"
            "Grey line: softmax cross-entropy. Smooth losses: their τ in place of β.",
            fontsize=7.5,
            x=0.01,
            ha="left",
        )
        drawn += save(figure, folder, f"{results.stem}_{p_k.replace(' ', '_').replace('0.', '.')}")
    return drawn
