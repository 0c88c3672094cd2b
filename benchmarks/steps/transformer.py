"""A whole training step of a small transformer under bfloat16 autocast, with and without a guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import stablenum_torch
from benchmarks.steps.devices import timer_of
from benchmarks.steps.errors import NoisyError, WrongResultError
from benchmarks.steps.reference import distance
from benchmarks.timing import interleaved

__all__ = ["LARGE", "Sizes", "transformer"]

BOUND = 0.05
# The order of sums of bfloat16 products may differ; the parameters are float32.
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the model and the batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    rounds: int


LARGE = Sizes(layers=8, width=1024, heads=16, vocabulary=16_384, length=512, batch=16, rounds=41)


class _Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        layer = nn.TransformerEncoderLayer(
            sizes.width,
            sizes.heads,
            4 * sizes.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length, vocabulary) logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def transformer(sizes: Sizes, *, device: str, turn: int = 0, bound: float = BOUND) -> dict[str, Any]:
    """Medians and spreads of the bare, the clipped and the guarded step, in one interleaved run.

    Raises:
        WrongResultError: guarded and clipped parameters differ, or a step was skipped.
        NoisyError: a spread is above ``bound``.
    """
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=draw).to(device)
    models, steps, guards = {}, {}, {}
    for name in ("bare", "clip", "guarded"):
        torch.manual_seed(0)
        model = models[name] = _Transformer(sizes).to(device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if name == "guarded":
            optimizer = guards[name] = stablenum_torch.wrap(optimizer, clip=1.0, names=model)
        steps[name] = _step(name, model, optimizer, tokens)
    times = interleaved(steps, rounds=sizes.rounds * min(turn + 1, 3), warmup=5, timer=timer_of(device))
    last = guards["guarded"].last
    if not last["applied"] or last["skipped_total"]:
        raise WrongResultError(f"transformer: a guarded step was skipped: {last}.")
    torch.manual_seed(0)
    start = _flat(_Transformer(sizes))
    off = distance(_flat(models["guarded"]), _flat(models["clip"]), start)
    if not off <= TOLERANCE:
        raise WrongResultError(
            f"transformer: guarded and clipped parameters differ by {off:.2g} of their movement; at most "
            f"{TOLERANCE} is allowed."
        )
    restless = {name: f"{t.spread:.0%}" for name, t in times.items() if not t.spread <= bound}
    if restless:
        raise NoisyError(f"transformer: the spreads {restless} are above {bound:.0%}.")
    bare = times["bare"].median
    return {
        "parameters": sum(p.numel() for p in models["bare"].parameters()),
        "tensors": len(list(models["bare"].parameters())),
        "batch": sizes.batch,
        "length": sizes.length,
        "spread_bound": bound,
        "distance": float(f"{off:.3g}"),
        "variants": {
            name: t.as_dict() | {"ratio_to_bare": round(t.median / bare, 4)} for name, t in times.items()
        },
    }


def _flat(model: nn.Module) -> Any:
    return torch.cat([p.detach().double().cpu().reshape(-1) for p in model.parameters()]).numpy()


def _step(name: str, model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> Any:
    def step() -> None:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        if name == "guarded":
            optimizer.backward(loss)
        else:
            loss.backward()
        if name == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
