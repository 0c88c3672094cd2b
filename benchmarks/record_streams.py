"""``python -m benchmarks.record_streams [name ...]``: train, and write losses and gradient norms.

Four small, seeded training runs on the handwritten digits of scikit-learn take about a minute on the CPU.
They give the streams in ``benchmarks/recorded``, on which spike and clip rules are compared. Another version
of PyTorch gives different last digits and, after a few hundred steps, a different stream of the same kind, so
the files are kept and the benchmarks do not record them again.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "recorded"
STEPS = 1500
BATCH = 64
SETTINGS = ("lr", "momentum", "betas", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One training run.

    Args:
        about: what is trained and what its stream shows.
        model: creates the model.
        optimizer: creates the optimizer, at its full learning rate.
        batches: yields pairs of inputs and targets without end, for a seed.
        rate: the fraction of the full learning rate at a step.
        seed: the seed of weights and batches.
    """

    about: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    rate: Callable[[int], float] = lambda step: 1.0
    seed: int = 0


# ------------------------------------------------------------------------------------- data


def _images(seed: int, noise: float = 0.5) -> Iterator[tuple[Tensor, Tensor]]:
    """Digits shifted by up to a pixel, with noise so that the loss stays above 0: (64, 8, 8) and (64,)."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(len(digits.target), size=BATCH)
        images = digits.images[chosen] / 8.0 - 1.0
        moved = np.stack([np.roll(x, rng.integers(-1, 2, size=2), axis=(0, 1)) for x in images])
        noisy = moved + noise * rng.normal(size=moved.shape)
        yield torch.tensor(noisy, dtype=torch.float32), torch.tensor(digits.target[chosen])


def _pixels(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Digits as sequences of 64 tokens from 0 to 16, and the token after each: twice (64, 63)."""
    tokens = torch.tensor(load_digits().data, dtype=torch.int64)
    rng = np.random.default_rng(seed)
    while True:
        chosen = tokens[rng.integers(len(tokens), size=BATCH)]
        yield chosen[:, :-1], chosen[:, 1:]


# ----------------------------------------------------------------------------------- models


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


class Transformer(nn.Module):
    """One encoder block over the eight rows of an image."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, width, bias=False)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images) + self.position
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(dim=1))


class PixelModel(nn.Module):
    """A recurrent network that predicts an image pixel by pixel."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0]).flatten(0, 1)


def _warm_up_then_drop(step: int) -> float:
    return min(1.0, (step + 1) / 150) * (0.05 if step >= 1000 else 1.0)


RECORDINGS = {
    "mlp-sgd": Recording(
        about="A net of three layers, SGD with momentum: an ordinary training.",
        model=_mlp,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        batches=_images,
    ),
    "transformer-adamw": Recording(
        about="One encoder block over the rows of the images, AdamW: an ordinary training.",
        model=Transformer,
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.01),
        batches=_images,
    ),
    "mlp-edge": Recording(
        about="The net of mlp-sgd, plain SGD near the edge of stability: spikes of its own.",
        model=_mlp,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.2),
        batches=partial(_images, noise=0.1),
    ),
    "pixels-schedule": Recording(
        about="A recurrent net that predicts the next pixel, AdamW; warm-up over 150 steps, and from step "
        "1000 on a twentieth of the learning rate: levels shift.",
        model=PixelModel,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.01),
        batches=_pixels,
        rate=_warm_up_then_drop,
    ),
}


# ---------------------------------------------------------------------------------- training


def record(name: str, recording: Recording) -> dict[str, Any]:
    """Train for :data:`STEPS` steps, and return the content of the file."""
    torch.manual_seed(recording.seed)
    model = recording.model()
    optimizer = recording.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recording.rate)
    losses, norms = [], []
    batches = recording.batches(recording.seed)
    for _ in range(STEPS):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets.flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append([p.grad.double().norm().item() for p in model.parameters()])
        optimizer.step()
        schedule.step()
    by_tensor = np.array(norms)
    settings = {k: optimizer.defaults[k] for k in SETTINGS if k in optimizer.defaults}
    return {
        "name": name,
        "about": recording.about,
        "model": " ".join(str(model).split()),
        "optimizer": {"name": type(optimizer).__name__} | settings,
        "batch": BATCH,
        "seed": recording.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "names": [name for name, _ in model.named_parameters()],
        "loss": _rounded(losses),
        "norm": _rounded(np.sqrt((by_tensor**2).sum(axis=1))),
        "norms": [_rounded(column) for column in by_tensor.T],
    }


def _rounded(values: Any) -> list[float]:
    """The values rounded to 6 significant digits, more than any rule's decision depends on."""
    rounded = [float(f"{v:.6g}") for v in values]
    if not all(map(math.isfinite, rounded)):
        raise ValueError("the training became non-finite; lower its learning rate.")
    return rounded


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write the document with one field, and of the norms one tensor, per line."""
    columns = ",\n".join(json.dumps(column, separators=(",", ":")) for column in document["norms"])
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':') if isinstance(value, list) else None)}"
        for key, value in document.items()
        if key != "norms"
    ]
    text = "{\n" + ",\n".join([*lines, f'"norms": [\n{columns}\n]']) + "\n}\n"
    path.write_text(text, encoding="utf-8")


def main(names: list[str]) -> None:
    """Record the named streams, or all of them."""
    torch.set_num_threads(1)  # the order of the sums, and with it the stream, depends on this number
    for name in names or RECORDINGS:
        start = time.perf_counter()
        document = record(name, RECORDINGS[name])
        path = FOLDER / f"{name}.json"
        _write(path, document)
        seconds = time.perf_counter() - start
        size = path.stat().st_size / 1e3
        print(f"{path.name}: {size:.0f} kB, {len(document['names'])} tensors, {seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
