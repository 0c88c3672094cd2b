"""Figures of the spike rules: median and MAD compared with mean and standard deviation."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np
from matplotlib.figure import Figure

from benchmarks.recorded import RecordedStream, constant, load, with_spikes
from figures.replay import Step, norms_only, replay
from figures.style import AFTER, LIMIT, finish, mark, panels, raw
from stablenum import GuardConfig, MeanStdSpikeGuard, SpikeGuard
from stablenum.rules.windows import count

__all__ = ["constant_loss", "spike_guard"]

_RULES = (("SpikeGuard", SpikeGuard, AFTER, "v"), ("MeanStdSpikeGuard", MeanStdSpikeGuard, LIMIT, "^"))


def _limits(done: list[Step], signal: str, rule: SpikeGuard | MeanStdSpikeGuard) -> list[float]:
    """The limit that the signal of each step was compared with; NaN before ``min_samples``."""
    limits = []
    for step in done:
        window = getattr(step.before.spike, signal)
        known = count(window, xp=xp) >= rule.min_samples
        limits.append(float(rule._limit(window, xp=xp)) if known else np.nan)
    return limits


def spike_guard() -> tuple[Figure, str]:
    """Planted spikes, some of them shortly after larger ones."""
    bad = with_spikes(load("transformer-adamw"), seed=11, on=("norm",), nonfinite=0)
    stream, shown = bad.stream, slice(100, 1500)
    steps = np.arange(len(stream.loss))[shown]
    figure, (ax,) = panels(height=3.9)
    raw(ax, steps, stream.norm[shown], "norm as measured")
    counts = []
    for place, (label, kind, colour, marker) in enumerate(_RULES):
        rule = kind(watch="grad_norm")
        done = replay(GuardConfig(spike=rule), norms_only(stream), range(len(stream.loss)))
        ax.plot(
            steps, _limits(done, "grad_norm", rule)[shown], color=colour, lw=1.3, label=f"limit of {label}"
        )
        skipped = np.array([not step.applied for step in done])
        where = np.flatnonzero(skipped)
        mark(ax, where, [900.0 * 1.8**place] * len(where), f"{label} skips", color=colour, marker=marker)
        masked = [p.step for p in bad.planted if p.kind == "masked"]
        counts.append(
            f"`{label}` skipped {int((skipped & bad.labels).sum())} of {int(bad.labels.sum())} planted "
            f"spikes ({int(skipped[masked].sum())} of the {len(masked)} that come ten steps after a larger "
            f"one) and {int((skipped & ~bad.labels).sum())} other steps"
        )
    finish(ax, y="L2 norm, all", log=10, columns=3)
    return figure, f"`transformer-adamw` with planted spikes of the norm. {counts[0]}; {counts[1]}."


def constant_loss() -> tuple[Figure, str]:
    """A loss that is constant except for rises of a hundredth."""
    stream = _nearly_constant()
    steps = np.arange(len(stream.loss))
    figure, (ax,) = panels(height=3.1)
    raw(ax, steps, stream.loss, "loss")
    counts = []
    for place, (label, kind, colour, marker) in enumerate(_RULES):
        rule = kind(watch="loss")
        done = replay(GuardConfig(spike=rule), norms_only(stream), steps)
        ax.plot(steps, _limits(done, "loss", rule), color=colour, lw=1.3, label=f"limit of {label}")
        where = np.flatnonzero([not step.applied for step in done])
        mark(ax, where, [1.075 + 0.008 * place] * len(where), f"{label} skips", color=colour, marker=marker)
        counts.append(f"`{label}` skipped {len(where)} steps")
    finish(ax, y="loss", columns=3)
    ax.set_ylim(0.995, 1.095)
    return figure, (
        "A stream made for this figure: a constant loss of 1 that rises by a hundredth at six steps, "
        f"100 apart. {counts[0]}, {counts[1]}."
    )


def _nearly_constant() -> RecordedStream:
    stream = constant(steps=800)
    loss = stream.loss.copy()
    loss[150:750:100] += 0.01
    return stream._replace(loss=loss)
