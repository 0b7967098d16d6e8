"""Muon and AdamW as one optimizer."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for the matrices within the layers, ``torch.optim.AdamW`` for everything else.

    Muon's steps are scaled to the size of AdamW's (``match_rms_adamw``, arXiv 2502.16982), so that both have the same
    learning rate and weight decay.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        undecayed: Iterable[str],
    ) -> None:
        kept, (matrices, decayed, plain) = frozenset(undecayed), ([], [], [])
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name in kept:
                plain.append(parameter)
            elif (
                parameter.ndim == 2 and ".layers." in name and name.endswith(".weight")
            ):  # a gain a head is none
                matrices.append(parameter)
            else:
                decayed.append(parameter)
        super().__init__([*matrices, *decayed, *plain], {})
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._parts: Sequence[torch.optim.Optimizer] = (
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas),
        )
        self._join_groups()

    def step(self, closure: Any = None) -> Tensor | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
            self.state.update(part.state)
        self._join_groups()

    def _join_groups(self) -> None:
        self.param_groups = [group for part in self._parts for group in part.param_groups]
