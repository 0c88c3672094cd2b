"""Random streams: nothing that the guard keeps becomes non-finite, and all backends agree.

NumPy and eager PyTorch always run; backends that compile, and eager JAX, only under ``make test-all``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stablenum import ClipByGlobalNorm, ClipByNorm, DynamicLossScale, GuardConfig, Reason
from tests.backends import BACKENDS, assert_bit_equal, leaves, to_numpy
from tests.oracles import FLOAT32_MAX, LossScaleOracle, clip_factors, global_norm

SCALE = DynamicLossScale(init_scale=256.0, growth_interval=3, hysteresis=2, min_scale=0.25, max_scale=2.0**12)
RULES = {
    "plain": (),
    "global": (ClipByGlobalNorm(1.0),),
    "composed": (ClipByNorm(0.7), ClipByGlobalNorm(1.0)),
}
CONFIGS = [
    GuardConfig(),
    *(GuardConfig(clip=rules, loss_scale=SCALE) for rules in RULES.values()),
    GuardConfig(clip=RULES["composed"], loss_scale=SCALE, max_skips_in_a_row=5),
]
# XLA on a CPU flushes subnormal results to zero; avoid them, also after division by the scale (2**12).
ordinary = st.floats(min_value=2.0**-100, max_value=FLOAT32_MAX, width=32)
norms = st.one_of(
    ordinary,
    st.sampled_from([0.0, 1e-25, 1e20, 6e4, FLOAT32_MAX]),
    st.sampled_from([1.0, math.inf, math.nan]),
)
losses = st.one_of(
    st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([0.0, math.nan, math.inf, -math.inf])
)


class GuardedRun(RuleBasedStateMachine):
    """One stream of observations, decided on several backends."""

    names = ("numpy", "torch")

    @initialize(config=st.sampled_from(CONFIGS), n_tensors=st.sampled_from([0, 3]))
    def begin(self, config, n_tensors):
        self.config, self.n_tensors = config, n_tensors
        self.states = {name: BACKENDS[name].init(config, n_tensors) for name in self.names}
        self.before = to_numpy(self.states["numpy"])
        self.oracle = LossScaleOracle(init=256.0, interval=3, hysteresis=2, floor=0.25, ceiling=2.0**12)
        self.skipped_in_a_row = 0

    @rule(data=st.data(), loss=losses, found_inf=st.booleans() | st.just(False))
    def step(self, data, loss, found_inf):
        seen = data.draw(st.lists(norms, min_size=self.n_tensors, max_size=self.n_tensors))
        self._keep_clear_of_the_threshold(seen)
        self.before = to_numpy(self.states["numpy"])
        decisions = {}
        for name in self.names:
            backend = BACKENDS[name]
            run = backend.prepare(self.config)
            decision, self.states[name] = run(
                self.states[name], backend.observe(seen, loss=loss, found_inf=found_inf)
            )
            decisions[name] = to_numpy(decision)
        self._agree(decisions)
        self._follow_the_oracles(decisions["numpy"], seen, loss, found_inf)

    def _keep_clear_of_the_threshold(self, seen):
        """Close to a clip threshold, rounding in the last bit decides whether a step is clipped."""
        scale = float(self.before.loss_scale.scale)
        for norm in [*seen, global_norm(seen)]:
            for threshold in (0.7, 1.0):
                assume(not abs(norm / scale - threshold) < 1e-5)

    def _agree(self, decisions):
        first = decisions["numpy"]
        for name, decision in decisions.items():
            for field in ("apply", "reason", "worst"):
                assert getattr(decision, field) == getattr(first, field), (name, field)
            for field in ("grad_norm", "multiplier", "clip_coefficient"):
                np.testing.assert_allclose(
                    getattr(decision, field), getattr(first, field), rtol=1e-6, atol=0, err_msg=name
                )
            assert_bit_equal(self.states[name].loss_scale, self.states["numpy"].loss_scale)
            assert_bit_equal(self.states[name].recorder.ints, self.states["numpy"].recorder.ints)

    def _follow_the_oracles(self, decision, seen, loss, found_inf):
        after = to_numpy(self.states["numpy"])
        if self.before.halted:
            assert not decision.apply
            assert_bit_equal(after, self.before)
            return
        good = all(map(math.isfinite, seen)) and math.isfinite(loss) and not found_inf
        assert bool(decision.apply) is good
        assert (Reason(int(decision.reason)) in (Reason.OK, Reason.CLIPPED)) is good
        self.skipped_in_a_row = 0 if good else self.skipped_in_a_row + 1
        assert int(after.skipped_in_a_row) == self.skipped_in_a_row
        if self.config.loss_scale is not None:
            event = "good" if good else "overflow" if math.isfinite(loss) else "bad_loss"
            assert float(after.loss_scale.scale) == self.oracle.step(event)
        if good and self.n_tensors:
            self._check_multiplier(decision, seen)

    def _check_multiplier(self, decision, seen):
        scale = float(self.before.loss_scale.scale)
        unscaled = [min(norm / scale, FLOAT32_MAX) for norm in seen]
        rules = [
            ("global" if isinstance(rule, ClipByGlobalNorm) else "norm", rule.max_norm)
            for rule in self.config.clip
        ]
        expected = [max(factor / scale, 2.0**-126) for factor in clip_factors(unscaled, rules)]
        actual = np.broadcast_to(decision.multiplier, self.n_tensors)
        np.testing.assert_allclose(actual, np.float64(expected), rtol=3e-6, atol=0)

    @invariant()
    def nothing_kept_is_nonfinite(self):
        for name, state in getattr(self, "states", {}).items():
            state = to_numpy(state)
            for path, leaf in leaves(state._replace(recorder=())):
                assert np.isfinite(leaf).all(), (name, path)
            scale = float(state.loss_scale.scale)
            assert math.isfinite(1 / scale)
            if self.config.loss_scale is not None:
                assert SCALE.min_scale <= scale <= SCALE.max_scale
            written = state.recorder.ints[:, 0] >= 0
            rows, applied = state.recorder.floats[written], state.recorder.ints[written, 1] <= Reason.CLIPPED
            assert np.isfinite(rows[:, 2:]).all(), name  # loss scale and clip coefficient
            assert (rows[:, 2:] > 0).all(), name
            assert np.isfinite(rows[applied]).all(), name


class GuardedRunEverywhere(GuardedRun):
    """The same on every backend."""

    names = tuple(BACKENDS)


TestGuardedRun = GuardedRun.TestCase
TestGuardedRunEverywhere = pytest.mark.slow(GuardedRunEverywhere.TestCase)
if settings.get_current_profile_name() == "ci":  # a step runs on five backends
    TestGuardedRunEverywhere.settings = settings(
        max_examples=20, stateful_step_count=20, phases=[Phase.explicit, Phase.generate, Phase.shrink]
    )
