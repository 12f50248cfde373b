"""Files of torch.save, which are replaced whole and never edited."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common.files import replacing


def save_torch_file(path: Path, content: dict[str, Any] | Tensor) -> None:
    """Write a dictionary or a tensor as a torch file, whole or not at all. Raises OSError."""
    with replacing(path) as file:
        torch.save(content, file)
