"""Healthy trainings with batch norm, and the same with one batch on another scale: what ``Recovery`` sees.

    python -m benchmarks.recovery.running_statistics

Small networks on scikit-learn's digits, over optimizers, rates, schedules, momenta, batch sizes and scales of
the data. A rewind of a healthy run is a false alarm. A planted batch is found if a rewind has its step as the
origin. All settings of ``Recovery`` are the defaults. It takes half an hour.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stablenum_torch
from stablenum import RecoveryStopped
from stablenum.recovery.symptoms import SymptomCode

__all__ = ["main"]

STEPS = 300
FIRST, LAST = 30, 290  # where a batch is planted
PLANTED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "scale 1e3": lambda x, unit: 1e3 * x,
    "scale 1e6": lambda x, unit: 1e6 * x,
    "offset of 1e3 standard deviations": lambda x, unit: x + 1e3 * unit,
}


class Setting(NamedTuple):
    """What is varied."""

    network: str
    optimizer: str
    rate: float
    schedule: str
    momentum: float | None
    batch: int
    unit: float


def settings() -> list[Setting]:
    """Return 60 settings, drawn from all with a fixed seed."""
    parts: tuple[Any, ...] = (
        ("mlp", "conv", "residual"),
        (("adamw", 1e-3), ("adamw", 1e-2), ("adamw", 1e-1), ("sgd", 1e-3), ("sgd", 1e-2), ("sgd", 1e-1)),
        ("constant", "warm-up and cosine", "warm restarts"),
        (None, 0.5, 0.1, 0.01, 0.001),
        (8, 32, 128),
        (1.0, 100.0, 0.01),
    )
    drawn = random.Random(0).sample(list(itertools.product(*parts)), 60)
    return [Setting(net, *optimizer, *others) for net, optimizer, *others in drawn]


def network(kind: str, momentum: float | None) -> nn.Module:
    """Return a small network for images of 8 x 8."""

    def norm(channels: int, dims: int = 1) -> nn.Module:
        return (nn.BatchNorm1d if dims == 1 else nn.BatchNorm2d)(channels, momentum=momentum)

    if kind == "mlp":
        layers = [nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 64), norm(64), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 10))
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), norm(8, 2), nn.ReLU()]
    middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8, 2))
    if kind == "residual":  # the branch gives 0 at first, as is usual
        nn.init.zeros_(middle[1].weight)  # type: ignore[arg-type]
        middle = _Residual(middle)  # type: ignore[assignment]
    return nn.Sequential(*first, middle, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


class _Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def rate_at(schedule: str, step: int) -> float:
    """Return the factor on the rate."""
    if schedule == "constant":
        return 1.0
    if schedule == "warm restarts":
        return 0.01 + 0.99 * (1 - (step % 100) / 100)
    return min(1.0, (step + 1) / 50) * max(0.01, 1 - step / STEPS)


def run(setting: Setting, seed: int, planted: str | None = None, at: int = 0) -> list[tuple[str, int]]:
    """Train; return the codes and origins of the rewinds."""
    torch.manual_seed(seed)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32)
    x = setting.unit * (x - x.mean()) / x.std()
    y = torch.tensor(digits.target)

    def batch_at(n: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(
            len(x), (setting.batch,), generator=torch.Generator().manual_seed(1000 * seed + n)
        )
        inputs = x[rows]
        if planted is not None and n == at - 1:
            inputs = PLANTED[planted](inputs, setting.unit)
        return inputs, y[rows]

    model = network(setting.network, setting.momentum)
    make: Any = torch.optim.AdamW if setting.optimizer == "adamw" else torch.optim.SGD
    more = {} if setting.optimizer == "adamw" else {"momentum": 0.9}
    inner = make(model.parameters(), lr=setting.rate, **more)
    opt = stablenum_torch.wrap(inner, names=model, buffers=model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: rate_at(setting.schedule, step))
    recovery = stablenum_torch.Recovery(model, opt, data=batch_at, scheduler=scheduler)
    try:
        for inputs, labels in recovery.batches(STEPS):
            opt.zero_grad()
            opt.backward(nn.functional.cross_entropy(model(inputs), labels))
            opt.step()
            scheduler.step()
    except RecoveryStopped:
        pass
    return [(str(event.symptom.code), event.symptom.origin) for event in recovery.events]


def measured() -> Iterator[dict[str, Any]]:
    """Yield a row for each run."""
    for seed, setting in enumerate(settings()):
        yield {"planted": None, **setting._asdict(), "events": run(setting, seed)}
        for planted in PLANTED:
            at = random.Random(f"{seed} {planted}").randint(FIRST, LAST)
            events = run(setting, seed, planted, at)
            yield {"planted": planted, "at": at, **setting._asdict(), "events": events}


def main() -> None:
    """Print each run as a line of JSON, and a summary."""
    started, rows = time.time(), []
    for row in measured():
        rows.append(row)
        print(json.dumps(row), flush=True)
    ours = str(SymptomCode.RUNAWAY_BUFFER)
    healthy = [row for row in rows if row["planted"] is None]
    alarms = sum(any(code == ours for code, _ in row["events"]) for row in healthy)
    others = sum(any(code != ours for code, _ in row["events"]) for row in healthy)
    print(f"{len(healthy)} healthy runs: {alarms} false alarms of buffers, {others} of other kinds")
    found: Counter[tuple[str, Any]] = Counter()
    for row in rows:
        if row["planted"]:
            found[row["planted"], row["momentum"]] += (ours, row["at"]) in map(tuple, row["events"])
    of = Counter((row["planted"], row["momentum"]) for row in rows if row["planted"])
    for key, total in sorted(of.items(), key=str):
        print(f"{key[0]}, momentum {key[1]}: found {found[key]} of {total}")
    print(f"{time.time() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
