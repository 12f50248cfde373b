"""Embeddings of one origin, whose runs are compared: a backbone gives other bits on another processor."""

from collections.abc import Mapping

import pandas as pd

from reporting.frames import as_text

COLUMNS = ("backbone", "resolution", "labels", "num_classes", "test_images")
COUNTS = ("train_images", "valid_images")  # of runs with all of their images
PRETRAINED = "timm:"  # how the names of backbones begin whose weights do not come from a run
NOTE = (
    "Your embeddings, {yours}, have other bits than the repository's, {repository}, and are compared: both are of "
    "{backbone} at {resolution} pixels, and their bits depend on the processor and the precision. Whether the images "
    "and the weights are the same is not recorded."
)


def origins(runs: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """What embeddings of pretrained backbones are of, by their name: the cells of COLUMNS, and classes x dimensions."""
    cells = runs.reindex(columns=["embeddings", *COLUMNS]).drop_duplicates()
    cells = pd.DataFrame({name: as_text(cells[name]) for name in cells})
    found = {}
    for name, *origin in cells.itertuples(index=False):
        if origin[0].startswith(PRETRAINED):
            found[name] = (*origin, name.partition("-")[0])
    return found


def counts_of(runs: pd.DataFrame) -> dict[str, set[tuple[str, ...]]]:
    """The numbers of images that train and validate, by the name of embeddings, of runs that are not limited."""
    cells = runs.reindex(columns=["embeddings", "limit_train", *COUNTS]).drop_duplicates()
    cells = pd.DataFrame({name: as_text(cells[name]) for name in cells})
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, limit, *counts in cells.itertuples(index=False):
        if limit == "":
            found.setdefault(name, set()).add(tuple(counts))
    return found


def counterparts(yours: pd.DataFrame, repository: pd.DataFrame) -> dict[str, str]:
    """The repository's embeddings of the same origin as yours, by the names of yours that it does not have."""
    known = origins(repository)
    counts = counts_of(repository)
    your_counts = counts_of(yours)
    found = {}
    for name, origin in origins(yours).items():
        same = [other for other in known if known[other] == origin]
        if name in known or len(same) != 1:
            continue
        if your_counts.get(name, set()) <= counts.get(same[0], set()):
            found[name] = same[0]
    return found


def note(found: Mapping[str, str], repository: pd.DataFrame) -> str:
    """The sentences about `counterparts`; "" without any."""
    known = origins(repository)
    notes = []
    for name, other in found.items():
        backbone, resolution, *_ = known[other]
        notes.append(NOTE.format(yours=name, repository=other, backbone=backbone, resolution=resolution))
    return " ".join(notes)
