"""Records how the loss scales of apex and DeepSpeed move, into recorded_scales.json.

Neither is needed to run the tests. To record: install one of them without its CUDA extensions (apex: the
sources of release 25.04), and run `python -m tests.partners.record_scales` with the name and the version,
such as `deepspeed 0.19.8`.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("recorded_scales.json")
WINDOW, STEPS, TAKEN_OVER = 4, 140, 91


def events(least: int) -> str:
    """A climb to the ceiling, then overflows ``o`` with at least ``least`` good steps ``.`` between them."""
    rng = random.Random(0)
    made = "." * 40 + "o"
    while len(made) < STEPS:
        made += "." * rng.randint(least, 9) + "o"
    return made[:STEPS]


def record(
    stream: str, step: Callable[[bool], float], fields: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Log2 of the scale after each step, and the scaler's fields after some of them."""
    exponents, saved = [], {}
    for i, event in enumerate(stream):
        exponents.append(int(math.log2(step(event == "o"))))
        if i + 1 == TAKEN_OVER:
            saved = fields()
    return {"events": stream, "exponents": exponents, "taken_over": TAKEN_OVER, "fields": saved}


def apex() -> dict[str, Any]:
    import torch

    torch.cuda.IntTensor = torch.IntTensor  # a buffer of the CUDA extension, which is not used here
    from apex.amp.scaler import LossScaler

    scaler = LossScaler("dynamic", scale_window=WINDOW)

    def step(overflow: bool) -> float:
        scaler._has_overflow = overflow  # what unscaling would find; no argument sets it
        scaler.update_scale()
        return float(scaler.loss_scale())

    # as in amp.state_dict()
    return {
        "apex": record(
            events(0) + "o" * 30,
            step,
            lambda: {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped},
        )
    }


def deepspeed() -> dict[str, Any]:
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist.get_rank = lambda: 0  # it logs on the first rank
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    found = {}
    for consecutive in (False, True):
        scaler = loss_scaler.DynamicLossScaler(2.0**16, WINDOW, 1.0, 2, consecutive)

        def step(overflow: bool, scaler: Any = scaler) -> float:
            scaler.update_scale(overflow)
            return float(scaler.cur_scale)

        def fields(scaler: Any = scaler) -> dict[str, Any]:
            return {name: getattr(scaler, name) for name in names}

        name = "deepspeed, consecutive" if consecutive else "deepspeed"
        found[name] = record(events(2), step, fields)
        found[name]["at_the_floor"] = _at_the_floor(step)
    return found


def _at_the_floor(step: Callable[[bool], float]) -> str:
    """What comes of overflows without end."""
    try:
        while True:
            step(True)
    except Exception as error:  # noqa: BLE001 - DeepSpeed raises a bare Exception
        return str(error)


def main(name: str, version: str) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for key, row in {"apex": apex, "deepspeed": deepspeed}[name]().items():
        known[key] = {"version": version, "window": WINDOW, **row}
    lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
