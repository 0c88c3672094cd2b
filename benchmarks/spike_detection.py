"""How many planted spikes each spike rule finds, and how many ordinary steps it skips.

The streams are recorded training runs with labelled spikes planted into them, including pairs of which the
first spike hides the second, and streams that are constant except for the last digits. The rules run through
``stablenum.decide``; the peer's rule is written here in plain float64, as in its source.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import array_api_compat.numpy as xp
import numpy as np

from benchmarks.recorded import NAMES, RecordedStream, SpikedStream, constant, load, with_spikes
from stablenum import GuardConfig, MeanStdSpikeGuard, Observation, Reason, SpikeGuard, decide, init_guard

__all__ = ["PEER", "run"]

Array: TypeAlias = "np.ndarray[Any, Any]"
Rule: TypeAlias = Callable[[RecordedStream], Array]

SEEDS = range(5)
PEER = "OLMo-core's law"


def run() -> dict[str, dict[str, dict[str, int]]]:
    """For each stream and rule, the counts of spikes planted and detected, and of ordinary and skipped steps.

    Non-finite steps are left out, because every rule skips them.
    """
    rules: dict[str, Rule] = {
        "SpikeGuard": lambda stream: _skips(SpikeGuard(), stream),
        "MeanStdSpikeGuard": lambda stream: _skips(MeanStdSpikeGuard(), stream),
        PEER: _olmo_core,
    }
    report: dict[str, dict[str, dict[str, int]]] = {}
    for name, spiked in _streams():
        rows = report.setdefault(name, {rule: dict.fromkeys(_COUNTS, 0) for rule in rules})
        for rule, skips in rules.items():
            for key, value in _count(spiked, skips(spiked.stream)).items():
                rows[rule][key] += value
    return report


_COUNTS = ("planted", "detected", "masked_planted", "masked_detected", "steps", "false_skips")


def _streams() -> Iterator[tuple[str, SpikedStream]]:
    for name in NAMES:
        for seed in SEEDS:
            yield name, with_spikes(load(name), seed=seed)
    for seed in SEEDS:
        yield "masked pairs", with_spikes(load("mlp-sgd"), seed=seed, singles=0, pairs=20, nonfinite=0)
        # Only the last digits change, as in training that has converged.
        noise = np.random.default_rng(seed).normal(size=(2, 1500)) * 1e-6
        still = constant(loss=2.302585, norm=0.5)
        still = still._replace(loss=still.loss * (1 + noise[0]), norms=still.norms * (1 + noise[1])[:, None])
        jumps = np.random.default_rng(seed + 100).random(1500) < 0.02
        still = still._replace(loss=np.where(jumps, still.loss * 1.001, still.loss))
        yield "constant", with_spikes(still, seed=seed, nonfinite=0)


def _count(spiked: SpikedStream, skipped: Array) -> dict[str, int]:
    finite = np.isfinite(spiked.stream.loss) & np.isfinite(spiked.stream.norm)
    masked = np.zeros_like(finite)
    masked[[spike.step for spike in spiked.planted if spike.kind == "masked"]] = True
    real, ordinary = spiked.labels & finite, ~spiked.labels & finite
    return {
        "planted": int(real.sum()),
        "detected": int((skipped & real).sum()),
        "masked_planted": int(masked.sum()),
        "masked_detected": int((skipped & masked).sum()),
        "steps": int(ordinary.sum()),
        "false_skips": int((skipped & ordinary).sum()),
    }


def _skips(rule: Any, stream: RecordedStream) -> Array:
    """(T,) bool: the steps that a guard with this rule skips as spikes."""
    config = GuardConfig(spike=rule)
    state = init_guard(config, stream.norms.shape[1], xp=xp)
    skipped = []
    for loss, norms in zip(stream.loss, stream.norms, strict=True):
        seen = Observation(norms.astype(np.float32), np.asarray(loss, np.float32))
        with np.errstate(all="ignore"):
            decision, state = decide(config, state, seen, xp=xp)
        skipped.append(int(decision.reason) in (Reason.SPIKE_LOSS, Reason.SPIKE_GRAD_NORM))
    return np.asarray(skipped)


def _olmo_core(stream: RecordedStream) -> Array:
    """The condition of OLMo-core's ``SkipStepOptimizer`` with its defaults: 128 steps, 6 deviations.

    Both signals must satisfy ``x - mean <= 6 std`` (n - 1) over the last 128 values before x, once there are
    64 values including x. Every value enters, including those of skipped and of non-finite steps.
    """
    skipped = []
    for t in range(len(stream.loss)):
        good = True
        for values in (stream.loss, stream.norm):
            past = values[max(0, t - 128) : t]
            if len(past) + 1 >= 64:
                if np.isfinite(past).all():
                    good &= bool(values[t] - past.mean() <= 6 * statistics.stdev(past))
                else:  # mean and std are NaN or inf, and a comparison with NaN is false
                    good &= False
        skipped.append(not good)
    return np.asarray(skipped)
