"""Wrong labels: drawn at random within blocks of classes, or given by people."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.torch_file import load_torch_file


def noisy_labels(labels: Tensor, block: int, probability: float, generator: torch.Generator) -> Tensor:
    """Replace each label (N,), with this probability, by a random one of its block of consecutive class ids."""
    replaced = torch.rand(len(labels), generator=generator) < probability  # (N,)
    member = torch.randint(block, (len(labels),), generator=generator)  # (N,)
    return torch.where(replaced, labels // block * block + member, labels)


def human_labels(path: Path, clean: Tensor) -> Tensor:
    """Read the labels (N,) that people gave the training images, in their order (CIFAR-100N, Wei et al. 2022).

    Args:
        path: CIFAR-100_human.pt, a pickle of NumPy arrays; no other code in it is run.
        clean: the right labels (N,) of the images.

    Raises:
        SystemExit: the file does not hold these labels, or is about other images.
    """
    reconstruct = np.empty(0).__reduce__()[0]  # the published file has its name in NumPy 1
    allowed = [reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [np.ndarray, np.dtype, type(np.dtype(np.int64))]
    with torch.serialization.safe_globals(allowed):
        content = load_torch_file(path, "a file of labels by people")
    noisy, right = (torch.from_numpy(content[name]).long() for name in ("noisy_label", "clean_label"))
    if not torch.equal(right, clean.long()):
        raise SystemExit(
            f"error: the {len(right)} clean labels in {path} are not those of the {len(clean)} training images: they "
            "must be CIFAR-100's, all of them, in torchvision's order"
        )
    return noisy
