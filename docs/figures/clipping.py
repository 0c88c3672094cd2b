"""Figures of the clip rules."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np
from matplotlib.figure import Figure

from benchmarks.recorded import RecordedStream, SpikedStream, load, with_spikes
from figures.replay import Drawn, Step, norms_only, replay, with_elements
from figures.style import AFTER, LIMIT, finish, how_many, mark, panels, raw
from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipUpdateRMS,
    GuardConfig,
    ZClip,
)
from stablenum.reference.guarded import Adam, Guarded
from stablenum.rules.windows import quantile

__all__ = ["MLP_SHAPES", "adagc", "agc", "autoclip", "global_norm", "update_rms", "zclip"]

# The layers of mlp-sgd and mlp-edge, inputs x outputs.
MLP_SHAPES = ((64, 128), (128,), (128, 64), (64,), (64, 10), (10,))


def spiked(name: str, *, seed: int, **planted: Any) -> SpikedStream:
    """A recorded stream with spikes of the norm planted."""
    return with_spikes(load(name), seed=seed, on=("norm",), **planted)


def cut(stream: RecordedStream, steps: int) -> RecordedStream:
    """The first steps of a stream."""
    return stream._replace(loss=stream.loss[:steps], norms=stream.norms[:steps])


def skips(ax: Any, done: list[Step], height: float) -> int:
    """Mark the skipped steps at the top, and return their number."""
    steps = [i for i, step in enumerate(done) if not step.applied]
    mark(ax, steps, [height] * len(steps), "skipped: not finite")
    return len(steps)


def clipped(done: list[Step]) -> int:
    """How many applied steps were clipped."""
    return sum(step.applied and float(step.decision.clip_coefficient) < 0.9999 for step in done)


def global_norm() -> tuple[Figure, str]:
    """The joint norm bounded by a constant, and the norm of one tensor."""
    stream = load("mlp-edge")
    joint = replay(GuardConfig(clip=ClipByGlobalNorm(2.0)), norms_only(stream), range(1500))
    own = replay(GuardConfig(clip=ClipByNorm(1.0)), norms_only(stream), range(1500))
    which = stream.names.index("3.weight")
    figure, (top, bottom) = panels(2, height=2.7)
    steps = np.arange(1500)
    raw(top, steps, stream.norm, "joint norm as measured")
    top.plot(steps, [s.norm_after for s in joint], color=AFTER, lw=1.1, label="after ClipByGlobalNorm(2.0)")
    top.axhline(2.0, color=LIMIT, lw=0.9, ls="--", label="max_norm")
    finish(top, y="L2 norm, all", log=10, x=False)
    raw(bottom, steps, stream.norms[:, which], "norm of 3.weight as measured")
    bottom.plot(
        steps,
        [s.norms[which] * s.factor[which] for s in own],
        color=AFTER,
        lw=1.1,
        label="after ClipByNorm(1.0)",
    )
    bottom.axhline(1.0, color=LIMIT, lw=0.9, ls="--", label="max_norm")
    finish(bottom, y="L2 norm, 3.weight", log=10)
    return figure, (
        f"`mlp-edge`, a training run with natural spikes: `ClipByGlobalNorm(2.0)` clipped "
        f"{clipped(joint)} of 1,500 steps (the largest norm was {stream.norm.max():.1f}), "
        f"`ClipByNorm(1.0)` clipped at least one tensor in {clipped(own)}."
    )


def agc() -> tuple[Figure, str]:
    """The largest ratio of gradient norm to weight norm among the units of a layer."""
    bad = spiked("mlp-sgd", seed=2, singles=6, pairs=2, nonfinite=2)
    stream = cut(bad.stream, 1000)
    rule = AdaptiveGradClip(clipping=0.5)
    drawn = Drawn(stream, MLP_SHAPES)
    done = replay(GuardConfig(clip=rule), with_elements(GuardConfig(clip=rule), drawn), range(1000))
    which = stream.names.index("3.weight")

    def ratio(step: Step, *, after: bool) -> float:
        units = step.seen.units
        if units is None or not step.applied:
            return float("nan")
        shrink = step.decision.unit_multipliers[which] if after else 1.0
        return float(np.max(units.norms[which] * shrink / np.maximum(units.weights[which], rule.eps)))

    figure, (ax,) = panels()
    steps = np.arange(1000)
    before = [ratio(step, after=False) for step in done]
    raw(ax, steps, before, "largest |g| / |w| of the 64 units")
    ax.plot(steps, [ratio(s, after=True) for s in done], color=AFTER, lw=1.1, label="after AGC")
    ax.axhline(rule.clipping, color=LIMIT, lw=0.9, ls="--", label="clipping = 0.5")
    skipped = skips(ax, done, float(np.nanmax(before)) * 1.5)
    finish(ax, y="|g| / |w|, 3.weight", log=10)
    return figure, (
        "`mlp-sgd` with planted spikes of the norm. `AdaptiveGradClip(clipping=0.5)` clipped at least "
        f"one unit in {clipped(done)} of 1,000 steps and skipped {how_many(skipped, 'step')} "
        f"with NaN or inf. The norms are recorded; the elements and weights, which the recordings do "
        f"not hold, are random."
    )


def autoclip() -> tuple[Figure, str]:
    """Two quantiles as thresholds."""
    bad = spiked("transformer-adamw", seed=1)
    observe, steps = norms_only(bad.stream), np.arange(1500)
    done = {q: replay(GuardConfig(clip=AutoClip(quantile=q)), observe, steps) for q in (0.1, 0.9)}
    figure, (ax,) = panels(height=3.5)
    raw(ax, steps, np.where(np.isfinite(bad.stream.norm), bad.stream.norm, np.nan), "norm as measured")
    for q, colour in ((0.9, LIMIT), (0.1, AFTER)):
        limit = [float(quantile(step.after.clip[0].norms, q, xp=xp)) for step in done[q]]
        ax.plot(steps, limit, color=colour, lw=1.4, label=f"threshold, quantile {q}")
    skipped = skips(ax, done[0.1], 700.0)
    finish(ax, y="L2 norm, all", log=10)
    shares = {q: clipped(run) / (1500 - skipped) for q, run in done.items()}
    return figure, (
        f"`transformer-adamw` with planted spikes, NaN and inf. With `quantile=0.1` {shares[0.1]:.0%} of "
        f"the applied steps were clipped, with 0.9 {shares[0.9]:.0%}. The {skipped} steps that were not "
        f"finite were skipped and did not affect the thresholds."
    )


def zclip() -> tuple[Figure, str]:
    """The moving limit, and norms clipped to it."""
    bad = spiked("pixels-schedule", seed=3)
    rule = ZClip(max_norm=None)
    done = replay(GuardConfig(clip=rule), norms_only(bad.stream), range(1500))
    limit = [
        float(s.before.clip[0].mean + rule.z_threshold * s.before.clip[0].std)
        if int(s.before.clip[0].seen) >= rule.warmup_steps
        else np.nan
        for s in done
    ]
    figure, (ax,) = panels(height=3.5)
    steps = np.arange(1500)
    raw(ax, steps, np.where(np.isfinite(bad.stream.norm), bad.stream.norm, np.nan), "norm as measured")
    ax.plot(steps, [s.norm_after for s in done], color=AFTER, lw=1.0, label="after ZClip")
    ax.plot(steps, limit, color=LIMIT, lw=0.9, label="mean + 2.5 standard deviations")
    skipped = skips(ax, done, 60.0)
    finish(ax, y="L2 norm, all", log=10)
    largest = max(s.norm_after / float(s.before.clip[0].mean) for s in done[25:] if s.applied)
    return figure, (
        f"`pixels-schedule` with planted spikes of 5 to 100 times the norm, and the learning rate cut to a "
        f"twentieth at step 1000. `ZClip(max_norm=None)` clipped {clipped(done)} of 1,500 steps; after "
        f"the warm-up no step was longer than {largest:.1f} times the moving mean. "
        f"{how_many(skipped, 'step')} with NaN or inf were skipped."
    )


def adagc() -> tuple[Figure, str]:
    """Two tensors, one of which starts late."""
    bad = spiked("pixels-schedule", seed=5)
    norms, late, usual = bad.stream.norms.copy(), 6, 2
    norms[:400, late] = np.where(np.isfinite(norms[:400, late]), 0.0, norms[:400, late])
    stream = bad.stream._replace(norms=norms)
    rule = AdaGC()
    done = replay(GuardConfig(clip=rule), norms_only(stream), range(1500))
    figure, axes = panels(2, height=2.8)
    steps = np.arange(1500)
    for ax, which in zip(axes, (usual, late), strict=True):
        shown = np.where(np.isfinite(norms[:, which]) & (norms[:, which] > 0), norms[:, which], np.nan)
        gamma = np.array([float(s.before.clip[0].gamma[which]) for s in done])
        raw(ax, steps, shown, "norm as measured")
        after = np.array([s.norms[which] * s.factor[which] for s in done])
        ax.plot(steps, np.where(after > 0, after, np.nan), color=AFTER, lw=1.0, label="after AdaGC", zorder=3)
        ax.plot(
            steps,
            np.where(gamma > 0, rule.clip_ratio * gamma, np.nan),
            color=LIMIT,
            lw=1.3,
            ls="--",
            label="limit",
            zorder=4,
        )
        skips(ax, done, float(np.nanmax(shown)) * 1.5)
        finish(ax, y=f"L2 norm,\n{stream.names[which]}", log=10, x=ax is axes[-1])
    share = np.mean([s.factor[usual] < 0.9999 for s in done[100:] if s.applied])
    began = {
        w: next(i for i, s in enumerate(done) if int(s.after.clip[0].seen[w]) >= 100) for w in (usual, late)
    }
    return figure, (
        f"`pixels-schedule` with planted spikes; the gradients of `{stream.names[late]}` are zero until "
        f"step 400. Its limit begins at step {began[late]}, after its own warm-up. The limit of "
        f"`{stream.names[usual]}` begins at step {began[usual]} at the lowest norm of its warm-up and then "
        f"rises by a thousandth per step: {share:.0%} of the later steps are clipped in that tensor."
    )


def update_rms() -> tuple[Figure, str]:
    """The root mean square of Adam's updates with and without the rule."""
    stream = cut(
        spiked("mlp-sgd", seed=4, singles=6, pairs=2, nonfinite=0, factors=(20.0, 100.0)).stream, 1000
    )
    drawn, lr, which = Drawn(stream, MLP_SHAPES), 1e-3, 2

    def run(config: GuardConfig) -> list[float]:
        train = Guarded(dict(zip(stream.names, drawn.weights(), strict=True)), Adam(lr=lr), config)
        rms = []
        for t in range(1000):
            before = train.params[stream.names[which]].astype(np.float64)
            train.step(dict(zip(stream.names, drawn.gradients(t), strict=True)))
            rms.append(float(np.sqrt(np.mean((train.params[stream.names[which]] - before) ** 2))) / lr)
        return rms

    bare, bounded = run(GuardConfig()), run(GuardConfig(clip=ClipUpdateRMS(1.0)))
    figure, (ax,) = panels()
    raw(ax, np.arange(1000), bare, "Adam alone")
    ax.plot(bounded, color=AFTER, lw=1.0, label="with ClipUpdateRMS(1.0)")
    ax.axhline(1.0, color=LIMIT, lw=0.9, ls="--", label="max_rms = 1 learning rate")
    finish(ax, y="RMS of the update / lr,\n3.weight")
    ax.set_ylim(bottom=0.0)
    over = sum(value > 1.001 for value in bare)
    return figure, (
        f"Adam on gradients with the norms of `mlp-sgd` and planted spikes (the elements are random). "
        f"Without the rule, {over} of 1,000 updates of `3.weight` had a root mean square above the learning "
        f"rate, up to {max(bare):.1f} times as large; with the rule, none had (at most {max(bounded):.2f})."
    )
