"""What one bad value does to each rule, compared with a run in which that step did not happen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures.clipping import MLP_SHAPES
from figures.replay import Drawn, Observe, Step, norms_only, replay, with_elements
from figures.scales import PIXEL_SHAPES

from benchmarks.recorded import RecordedStream, load, with_spikes
from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    DynamicLossScale,
    GuardConfig,
    GuardState,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
)
from stablenum.arrays import leaves

__all__ = ["CASES", "aftermaths", "write_poison"]

POISONS = {"NaN": float("nan"), "inf": float("inf"), "all gradients 0": 0.0, "1e30": 1e30}
WHEN = (10, 600)
HORIZON = 500
_NEAR = 0.01  # factors this close count as the same decision

Watch = Callable[[GuardConfig, RecordedStream], Observe]


def _norms(config: GuardConfig, stream: RecordedStream) -> Observe:
    return norms_only(stream)


def _elements(config: GuardConfig, stream: RecordedStream) -> Observe:
    return with_elements(config, Drawn(stream, MLP_SHAPES))


def _half(config: GuardConfig, stream: RecordedStream) -> Observe:
    return with_elements(config, Drawn(stream, PIXEL_SHAPES, spread=2.5), half=True)


# Page -> rule as written on the page, settings, stream, what is observed of it.
CASES: dict[str, tuple[tuple[str, GuardConfig, str, Watch], ...]] = {
    "global-norm": (
        ("ClipByGlobalNorm(2.0)", GuardConfig(clip=ClipByGlobalNorm(2.0)), "transformer-adamw", _norms),
    ),
    "agc": (
        (
            "AdaptiveGradClip(clipping=0.2)",
            GuardConfig(clip=AdaptiveGradClip(clipping=0.2)),
            "mlp-sgd",
            _elements,
        ),
    ),
    "autoclip": (("AutoClip()", GuardConfig(clip=AutoClip()), "transformer-adamw", _norms),),
    "zclip": (("ZClip(max_norm=None)", GuardConfig(clip=ZClip(max_norm=None)), "transformer-adamw", _norms),),
    "adagc": (("AdaGC()", GuardConfig(clip=AdaGC()), "transformer-adamw", _norms),),
    "static-dynamic": (
        (
            "DynamicLossScale(growth_interval=200)",
            GuardConfig(loss_scale=DynamicLossScale(growth_interval=200)),
            "pixels-schedule",
            _half,
        ),
    ),
    "log-max": (("LogMaxLossScale()", GuardConfig(loss_scale=LogMaxLossScale()), "pixels-schedule", _half),),
    "underflow-aware": (
        (
            "UnderflowAwareLossScale()",
            GuardConfig(loss_scale=UnderflowAwareLossScale()),
            "pixels-schedule",
            _half,
        ),
    ),
    "spike-guard": (
        ("SpikeGuard()", GuardConfig(spike=SpikeGuard()), "planted", _norms),
        ("MeanStdSpikeGuard()", GuardConfig(spike=MeanStdSpikeGuard()), "planted", _norms),
    ),
}


def write_poison(directory: Path) -> None:
    """Write one table per page: each bad value at two steps of a stream."""
    head = [
        f"| bad value | at step {WHEN[1]} | afterwards | afterwards, if at step {WHEN[0]} |",
        "| --- | --- | --- | --- |",
    ]
    for page, cases in CASES.items():
        lines: list[str] = []
        for label, config, name, watch in cases:
            where = f"`{name}`" if name != "planted" else "`transformer-adamw` with planted spikes"
            lines += [f"`{label}` on {where}:", "", *head]
            effects = [aftermaths(config, watch, _stream(name), when) for when in WHEN]
            for poison, early, late in zip(POISONS, *effects, strict=True):
                lines.append(f"| {poison} | {late[0]} | {late[1]} | {early[1]} |")
            lines.append("")
        lines.append(
            f'"Afterwards" compares the next {HORIZON} decisions with those of a run in which the bad '
            f"step did not happen; factors within {_NEAR:.0%} count as the same."
        )
        (directory / f"poison-{page}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _stream(name: str) -> RecordedStream:
    if name != "planted":
        return load(name)
    return with_spikes(load("transformer-adamw"), seed=11, on=("norm",), nonfinite=0).stream


def aftermaths(config: GuardConfig, watch: Watch, stream: RecordedStream, when: int) -> list[tuple[str, str]]:
    """For each bad value: the decision on the bad step, and its effect on the steps after it."""
    observe, rest = watch(config, stream), range(when + 1, when + 1 + HORIZON)
    state = replay(config, observe, range(when))[-1].after
    without = replay(config, observe, rest, state=state)
    effects = []
    for value in POISONS.values():
        norms = stream.norms.copy()
        if value:
            norms[when, 0] = value
        else:
            norms[when] = 0.0
        bad = replay(config, watch(config, stream._replace(norms=norms)), [when], state=state)[0]
        verdict = f"applied, `{bad.reason.name}`" if bad.applied else f"skipped, `{bad.reason.name}`"
        if _remembered(bad.after) == _remembered(state):
            effects.append((verdict, "no trace in the state"))
        else:
            effects.append((verdict, _difference(without, replay(config, observe, rest, state=bad.after))))
    return effects


def _remembered(state: GuardState) -> list[list[float]]:
    """Everything that a rule's later decisions can depend on."""
    return [leaf.tolist() for leaf in leaves((state.clip, state.spike, state.loss_scale))]


def _difference(without: list[Step], after: list[Step]) -> str:
    pairs = list(zip(without, after, strict=True))
    scales = [a.scale != b.scale for a, b in pairs]
    verdicts = [a.applied != b.applied for a, b in pairs]
    if any(scales):
        last = _last(scales)
        return "a different scale " + (f"for {last} steps" if last < HORIZON else "throughout")
    if any(verdicts):
        n = sum(verdicts)
        return f"{n} different verdict{'' if n == 1 else 's'}, the last {_last(verdicts)} steps later"
    off = [float(np.max(np.abs(b.factor / a.factor - 1.0))) if a.applied else 0.0 for a, b in pairs]
    if max(off) <= _NEAR:
        return "the same decisions" + ("" if max(off) < 1e-5 else f" (factors within {max(off):.2%})")
    far = [value > _NEAR for value in off]
    n = sum(far)
    return f"{n} step{'' if n == 1 else 's'} with different factors, the last {_last(far)} steps later"


def _last(flags: list[bool]) -> int:
    return max(i + 1 for i, flag in enumerate(flags) if flag)
