"""Random prompts, and the same with another token at one position."""

import torch


def pair(*, n=2, length=7, at=2):
    clean = torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, at] = 3 + (clean[:, at] + 50) % 297
    return clean, corrupted
