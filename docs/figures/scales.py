"""Figures of the loss-scale rules: gradients with recorded norms, rounded to float16 after scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.recorded import load, with_spikes
from figures.replay import Drawn, Step, norms_only, replay, with_elements
from figures.style import AFTER, ALSO, BAD, LIMIT, RAW, finish, how_many, mark, panels
from stablenum import DynamicLossScale, GuardConfig, LogMaxLossScale, UnderflowAwareLossScale

__all__ = ["PIXEL_SHAPES", "log_max", "static_dynamic", "underflow_aware"]

# Fewer elements than the recorded network has, so that the pages build in seconds.
PIXEL_SHAPES = ((17, 24), (24, 72), (24, 72), (72,), (72,), (24, 17), (17,))
_STEPS = 1500


def _scales(done: list[Step]) -> list[float]:
    return [step.scale for step in done]


def _skipped(done: list[Step]) -> list[int]:
    return [i for i, step in enumerate(done) if not step.applied]


def _stairs(ax: Any, done: list[Step], colour: str, label: str, **line: Any) -> None:
    ax.plot(range(len(done)), _scales(done), color=colour, drawstyle="steps-post", label=label, **line)


def static_dynamic() -> tuple[Figure, str]:
    """Single overflows with three kinds of hysteresis."""
    bad = with_spikes(load("pixels-schedule"), seed=7, singles=0, pairs=0, nonfinite=10, on=("norm",))
    kinds = {
        "hysteresis=1": (LIMIT, "-", {"hysteresis": 1}),
        'hysteresis=2, refill "good_step"': (AFTER, "--", {"hysteresis": 2}),
        'hysteresis=2, refill "growth"': (ALSO, "-.", {"hysteresis": 2, "hysteresis_refill": "growth"}),
    }
    figure, (ax,) = panels(height=3.3)
    ends, overflows = {}, []
    for label, (colour, line, settings) in kinds.items():
        rule = DynamicLossScale(growth_interval=300, **settings)
        done = replay(GuardConfig(loss_scale=rule), norms_only(bad.stream), range(_STEPS))
        _stairs(ax, done, colour, label, lw=1.5, ls=line)
        ends[label], overflows = float(done[-1].after.loss_scale.scale), _skipped(done)
    mark(ax, overflows, [2.0**19] * len(overflows), "overflow: skipped")
    finish(ax, y="loss scale S", log=2, columns=2)
    final_scales = ", ".join(f"2^{np.log2(end):.0f} with `{label}`" for label, end in ends.items())
    return figure, (
        f"`pixels-schedule` with {len(overflows)} single steps of NaN or inf, `growth_interval=300`. At "
        f"the end S is {final_scales}. All three skip the same {len(overflows)} steps."
    )


def log_max() -> tuple[Figure, str]:
    """LogMax and the dynamic scale on gradients whose level falls."""
    stream = load("pixels-schedule")
    drawn = Drawn(stream, PIXEL_SHAPES, spread=1.5)
    rules = {
        "LogMaxLossScale()": (AFTER, LogMaxLossScale()),
        "DynamicLossScale(growth_interval=200)": (LIMIT, DynamicLossScale(growth_interval=200)),
    }
    figure, (top, bottom) = panels(2, height=2.6)
    counts = []
    for place, (label, (colour, rule)) in enumerate(rules.items()):
        config = GuardConfig(loss_scale=rule)
        done = replay(config, with_elements(config, drawn, half=True), range(_STEPS))
        _stairs(top, done, colour, label, lw=1.4)
        bottom.plot(
            [float(s.seen.amax) if s.applied else np.nan for s in done], color=colour, lw=0.7, alpha=0.9
        )
        over = _skipped(done)
        mark(
            bottom,
            over,
            [65504 * 3.0 ** (place + 1)] * len(over),
            f"overflow, {label.split('(')[0]}",
            color=colour,
        )
        counts.append(
            f"`{label}` overflowed {how_many(len(over), 'time')} and ended at 2^{np.log2(done[-1].scale):.0f}"
        )
    finish(top, y="loss scale S", log=2, x=False)
    bottom.axhline(65504, color=BAD, lw=0.9, ls="--", label="largest float16")
    finish(bottom, y="largest scaled\nelement", log=2)
    return figure, (
        "Gradients with the norms of `pixels-schedule` (the elements are random), rounded to float16; the "
        f"learning rate falls at step 1000. {counts[0]}; {counts[1]}."
    )


def underflow_aware() -> tuple[Figure, str]:
    """The scale, and the fraction of elements lost."""
    drawn = Drawn(load("pixels-schedule"), PIXEL_SHAPES, spread=3.5, seed=1)
    rule = UnderflowAwareLossScale(init_scale=1.0)
    config = GuardConfig(loss_scale=rule)
    done = replay(config, with_elements(config, drawn, half=True), range(_STEPS))
    figure, (top, bottom) = panels(2, height=2.6)
    _stairs(top, done, AFTER, "UnderflowAwareLossScale(init_scale=1)", lw=1.4)
    over = _skipped(done)
    mark(top, over, [2.0 * max(_scales(done))] * len(over), "overflow: skipped")
    finish(top, y="loss scale S", log=2, x=False)
    tiny = np.array([float(s.seen.tiny) for s in done])
    at = np.flatnonzero(tiny)
    mark(
        bottom,
        at,
        tiny[at],
        "u, fraction of elements at float16's last bit (0 not shown)",
        color=RAW,
        marker=".",
    )
    bottom.axhline(rule.max_tiny, color=LIMIT, lw=0.9, ls="--", label="max_tiny")
    finish(bottom, y="fraction u", log=10)
    return figure, (
        "Gradients with the norms of `pixels-schedule`, spread over many decades (the elements are random), "
        f"rounded to float16. From S = 1 the rule raised it to 2^{np.log2(done[20].scale):.0f} within 20 "
        f"steps and to 2^{np.log2(done[-1].scale):.0f} by the end; {how_many(len(over), 'step')} overflowed. "
        f"u was {tiny[0]:.2%} at first; its median over the last 200 steps was {np.median(tiny[-200:]):.2%}."
    )
