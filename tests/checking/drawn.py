"""Random numbers of a seed."""

import torch


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
