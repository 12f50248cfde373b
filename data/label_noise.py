"""Wrong labels: drawn at random among a few classes, or given by people."""

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
        clean: the correct labels (N,) of the images.

    Raises:
        ValueError: the file does not hold these labels, or is about other images.
    """
    reconstruct = np.empty(0).__reduce__()[0]  # the published file has its name in NumPy 1
    allowed = [reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [np.ndarray, np.dtype, type(np.dtype(np.int64))]
    with torch.serialization.safe_globals(allowed):
        content = load_torch_file(path, "a file of labels by people")
    names = ("noisy_label", "clean_label")
    if not isinstance(content, dict) or not content.keys() >= {*names}:
        raise ValueError(f"{path} is not a file of labels by people: it must hold {' and '.join(names)}")
    noisy = torch.from_numpy(content["noisy_label"]).long()
    right = torch.from_numpy(content["clean_label"]).long()
    if not torch.equal(right, clean.long()):
        raise ValueError(
            f"the {len(right)} clean labels in {path} are not those of the {len(clean)} training images: they must be "
            "CIFAR-100's, all of them, in torchvision's order"
        )
    if noisy.shape != right.shape or not 0 <= int(noisy.min()) <= int(noisy.max()) <= int(right.max()):
        raise ValueError(
            f"the noisy labels in {path} must be one for each of the {len(right)} images, from 0 to "
            f"{int(right.max())}; they are {tuple(noisy.shape)}, from {int(noisy.min())} to {int(noisy.max())}"
        )
    return noisy
