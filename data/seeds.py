"""Random numbers that are a pure function of a seed, an epoch and a purpose, whatever else a program draws."""

import numpy as np
import torch


def seeded(stream: int, seed: int, epoch: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device`. stream: the number of the purpose; streams are independent of each other.

    CPU and CUDA generators draw different numbers from the same seed. Raises ValueError for a negative seed or epoch.
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed and epoch must be at least 0, got seed {seed} and epoch {epoch}")
    state = np.random.SeedSequence(seed, spawn_key=(stream, epoch)).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0]))
