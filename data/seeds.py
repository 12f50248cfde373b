"""Random numbers that are a pure function of a seed, an epoch and a purpose, whatever else a program draws."""

import numpy as np
import torch


def seeded(stream: int, seed: int, epoch: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device`. stream: the number of the purpose; streams are independent of each other.

    CPU and CUDA generators draw different numbers from the same seed.
    """
    state = np.random.SeedSequence(seed, spawn_key=(stream, epoch)).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0]))
