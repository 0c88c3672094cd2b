"""Checkpoints of small PyTorch trainings in every format, good ones and such with poison planted in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

import stablenum
import stablenum_torch

__all__ = ["OPTIMIZERS", "POISONS", "WRITERS", "arrays_in", "plant", "trained"]

RULES: dict[str, Any] = {"clip": [stablenum.AutoClip(), 1.0], "loss_scale": "dynamic", "spike": "skip"}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2),
    "amsgrad": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True),
    "guarded": lambda named: stablenum_torch.wrap(torch.optim.AdamW(named, lr=1e-2), **RULES),
    "momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-2, centered=True, momentum=0.5),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2),
    "adafactor": lambda named: torch.optim.Adafactor(named, lr=1e-2),
    "nadam": lambda named: torch.optim.NAdam(named, lr=1e-2),
}


class Net(torch.nn.Module):
    """A net with running statistics, a mask of -inf, a parameter without dimensions and 16-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 1)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.narrow = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.last(self.norm(self.first(x)).relu()) + self.narrow.float().sum()


def trained(kind: str) -> dict[str, Any]:
    """The state of a training, with values beside it that are inf on purpose."""
    torch.manual_seed(0)
    model = Net()
    opt = OPTIMIZERS[kind](model.named_parameters())
    for _ in range(3):
        opt.zero_grad()
        loss = model(torch.randn(16, 6)).square().mean()
        opt.backward(loss) if kind == "guarded" else loss.backward()
        opt.step()
    state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    beside = {"best": float("inf"), "best_array": torch.tensor(float("inf")), "epoch": 3}
    return copy.deepcopy(state | {"extra": beside})


def arrays_in(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The tensors in a state, by name."""
    if isinstance(tree, torch.Tensor):
        yield ".".join(path), tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from arrays_in(value, (*path, str(key)))


# What is planted, and in which entries.
POISONS: dict[str, tuple[float, Callable[[str], bool]]] = {
    "NaN in a matrix": (np.nan, lambda name: name == "model.last.weight"),
    "inf in a bias": (np.inf, lambda name: name == "model.first.bias"),
    "-inf in a bias": (-np.inf, lambda name: name == "model.first.bias"),
    "NaN in a scalar": (np.nan, lambda name: name == "model.gain"),
    "NaN in 16 bits": (np.nan, lambda name: name == "model.narrow"),
    "NaN in statistics": (np.nan, lambda name: name == "model.norm.running_mean"),
    "inf in statistics": (np.inf, lambda name: name == "model.norm.running_var"),
    "NaN in a mask": (np.nan, lambda name: name == "model.mask"),
    "inf in a moment": (np.inf, lambda name: name.startswith("optimizer.state.4.") and "step" not in name),
    "NaN in a moment": (np.nan, lambda name: name.startswith("optimizer.state.0.") and "step" not in name),
    "inf in a count": (np.inf, lambda name: name == "optimizer.state.2.step"),
    "negative": (
        -1e-3,
        lambda name: name.endswith(("exp_avg_sq", "square_avg", ".sum")) and ".state.4." in name,
    ),
}


def plant(state: dict[str, Any], poison: str) -> set[str]:
    """Plant poison in one element of each entry that it is for, and return the names of these."""
    value, chosen = POISONS[poison]
    found = {name: x for name, x in arrays_in(state) if chosen(name) and x.numel() and x.is_floating_point()}
    for x in found.values():
        x.view(-1)[-1] = value
    return set(found)


def _as_torch(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def _as_legacy(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    return folder / "old.pth"


def _as_safetensors(state: dict[str, Any], folder: Path) -> Path:
    save_file({name: x.contiguous() for name, x in arrays_in(state)}, folder / "state.safetensors")
    return folder / "state.safetensors"


def _as_npz(state: dict[str, Any], folder: Path) -> Path:
    arrays = {name: x.float().numpy() if x.is_floating_point() else x for name, x in arrays_in(state)}
    np.savez(folder / "state.npz", **arrays)
    return folder / "state.npz"


def _as_dcp(state: dict[str, Any], folder: Path) -> Path:
    checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def _ours(kind: str) -> Callable[[dict[str, Any], Path], Path]:
    def write(state: dict[str, Any], folder: Path) -> Path:
        allow = ("extra.best_array",) if state["model"]["mask"].isnan().any() else ("extra.*", "*.mask")
        ours = stablenum_torch.Checkpoints(folder, format=kind, on_poisoned="set aside", allow=allow)
        found = ours.save(3, state)
        assert found is not None
        return found

    return write


WRITERS: dict[str, Callable[[dict[str, Any], Path], Path]] = {
    "torch": _as_torch,
    "legacy": _as_legacy,
    "safetensors": _as_safetensors,
    "npz": _as_npz,
    "dcp": _as_dcp,
    "ours, torch": _ours("torch"),
    "ours, safetensors": _ours("safetensors"),
    "ours, dcp": _ours("dcp"),
}
