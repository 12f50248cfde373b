"""The nearest neighbours of some test images before and after training, of a run of experiments/train_knn.py on images.

Before: the network that the run's seed initialises. After: that of its last epoch, from its checkpoint. A frame tells
neighbours of another label.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from data.points import Points, load_points
from experiments.common.flags import ROOT
from experiments.common.neighbours import nearest
from experiments.common.run import load_checkpoint
from models.embedders import embedder
from scripts.reporting.figure_style import PAGE, note, pyplot, save

QUERIES = 6
WRONG = "#D55E00"


def has_images(folder: Path) -> bool:
    """Return whether a run folder is of neighbours that were trained on images, and still has its checkpoint."""
    config = _config(folder)
    return bool(config.get("dataset") and config.get("loss") and (folder / "checkpoint.pt").exists())


def before_and_after(folder: Path) -> tuple[Points, list[Tensor]]:
    """Return the points of a run folder, and the rows (Q, k) of the nearest ones of its network, new and trained."""
    config = _config(folder)
    data_dir, limit = ROOT / config["data_dir"], config["limit_train"]
    points = load_points(config["dataset"], data_dir, seed=config["seed"], limit_train=limit)
    torch.manual_seed(config["seed"])
    network = embedder(config["model"], points.input_shape, config["dim"], config["hidden_dims"] or ())
    found = [neighbours_of(points, network, config["k"])]  # (Q, k) each
    weights = load_checkpoint(folder)["model"]
    network.load_state_dict({key.removeprefix("embed."): each for key, each in weights.items() if "embed." in key})
    return points, [*found, neighbours_of(points, network, config["k"])]


def draw_neighbours(folder: Path, method: str, figures: Path, name: str) -> list[Path]:
    """Draw NAME.png and NAME.svg of a run folder, by a method as tables call it, and return their paths."""
    config, (points, found) = _config(folder), before_and_after(folder)
    right = [points.train.labels[rows] == points.test.labels.unsqueeze(1) for rows in found]  # (Q, k) each
    # Those that are hardest before training; of equals the first.
    queries = right[0].sum(1).sort(stable=True).indices[:QUERIES].tolist()

    asked, known = (each.inputs.float() / 255 for each in (points.test, points.train))
    height = PAGE / 2 * len(queries) / (config["k"] + 1) + 0.6
    figure, axes = pyplot.subplots(len(queries), 2, figsize=(PAGE, height), squeeze=False)
    for column, (when, rows, is_right) in enumerate(zip(("before", "after"), found, right)):
        for line, query in enumerate(queries):
            _strip(axes[line][column], torch.cat([asked[[query]], known[rows[query]]]), is_right[query].tolist())
        share = 100 * is_right.float().mean().item()
        axes[0][column].set_title(f"{when} training: {share:.1f}% of all neighbours are right")
    epochs = f"{config['n_epochs']} epoch{'s' * (config['n_epochs'] != 1)}"
    note(
        figure,
        f"{config['dataset']}, {config['model']}, {method}, {epochs}, seed {config['seed']}: the test images "
        f"(left of the line) whose {config['k']} nearest training images are most often wrong before training; "
        "nearest first, of another label in a frame.",
    )
    return save(figure, figures, name)


@torch.no_grad()
def neighbours_of(points: Points, network: nn.Module, k: int) -> Tensor:
    """Return the rows of the k nearest training points of all test points, (Q, k), as the script finds them."""
    network.eval()
    test, train = (
        (network(points.inputs(part)) for part in each.inputs.split(1000)) for each in (points.test, points.train)
    )
    return nearest(torch.cat(list(test)), train, k)


def _strip(axis: pyplot.Axes, images: Tensor, right: list[bool]) -> None:
    """Show the query, then its neighbours: images (1 + k, C, H, W) in [0, 1]."""
    _, channels, height, width = images.shape
    side = torch.cat(list(images), dim=2).permute(1, 2, 0)  # (H, (1 + k) W, C)
    shown = (side.squeeze(2) if channels == 1 else side).numpy()
    axis.imshow(shown, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    look = {"fill": False, "edgecolor": WRONG, "linewidth": 1.2}
    for place, is_right in enumerate(right, start=1):
        if not is_right:
            axis.add_patch(pyplot.Rectangle((place * width, 0), width - 1, height - 1, **look))
    axis.axvline(width - 0.5, color="#000000", linewidth=1)
    axis.set_axis_off()


def _config(folder: Path) -> dict:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
