"""``decide`` under every tracer: fixed structure, no branch on data, no wait for the host."""

from __future__ import annotations

import math
import random

import array_api_compat.torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    Observation,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
    decide,
    init_guard,
)
from stablenum.rules.clipping import Units
from tests.backends import BACKENDS, assert_bit_equal, leaves, to_numpy, torch_compiled
from tests.selection import REPEATS, only

CONFIGS = {
    "default": GuardConfig(),
    "scaled": GuardConfig(clip=1.0, loss_scale="dynamic"),
    "all": GuardConfig(
        clip=(ClipByNorm(1.0), ClipByGlobalNorm(1.0)), loss_scale="dynamic", max_skips_in_a_row=12
    ),
    "rules": GuardConfig(
        clip=(AdaptiveGradClip(), AutoClip(window=8), AdaGC(warmup_steps=4), ZClip(warmup_steps=4)),
        loss_scale=LogMaxLossScale(),
        spike=SpikeGuard(window=8, min_samples=4),
    ),
    "more rules": GuardConfig(
        clip=(AdaptiveGradClip(), ClipByValue(1.0), ClipUpdateRMS(1.0)),
        loss_scale=UnderflowAwareLossScale(),
        spike=MeanStdSpikeGuard(window=8, min_samples=4, action="clip"),
        max_skips_in_a_row=12,
    ),
}
LOSSES = (1.0, 0.5, -1.0, 0.0, 1e30, math.nan, math.inf)
NORMS = (0.0, 1e-30, 0.5, 7.0, 1e20, 3e38, math.inf, math.nan)

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def stream(backend, n_tensors, n_steps, seed=0):
    draw = random.Random(seed)
    return [
        backend.observe(
            draw.choices(NORMS[:6] if draw.random() < 0.7 else NORMS, k=n_tensors),
            loss=draw.choice(LOSSES),
            found_inf=draw.random() < 0.1,
            units=([draw.choices(NORMS[:6], k=2) for _ in range(n_tensors)], [[1.0, 0.1]] * n_tensors),
            amax=draw.choice(NORMS),
            tiny=draw.choice([0.0, 0.5]),
        )
        for _ in range(n_steps)
    ]


def without_data(n_tensors, device=None):
    """An observation with all fields, as torch tensors."""

    def empty(*shape):
        return torch.empty(shape, device=device)

    return Observation(
        norms=empty(n_tensors),
        loss=empty(),
        found_inf=torch.empty((), dtype=torch.bool, device=device),
        units=Units(*(tuple(empty(2) for _ in range(n_tensors)) for _ in range(2))),
        amax=empty(),
        tiny=empty(),
    )


def signature(tree):
    return [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves(tree)]


@each_config
@pytest.mark.parametrize("n_tensors", [0, 3])
def test_structure_shapes_and_dtypes_never_change(backend, config, n_tensors):
    check_structure(backend, config, n_tensors)


# Rules are traced for seconds by torch, and the scan below carries their states.
@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["all"],
        pytest.param(CONFIGS["rules"], marks=REPEATS),
        pytest.param(CONFIGS["more rules"], marks=REPEATS),
    ],
)
def test_structure_shapes_and_dtypes_never_change_on_any_backend(every_backend, config):
    check_structure(every_backend, config, 3)


def check_structure(backend, config, n_tensors):
    state = backend.init(config, n_tensors)
    expected, run = signature(state), backend.prepare(config)
    for observation in stream(backend, n_tensors, 6 if backend.name == "jax" else 30):
        decision, state = run(state, observation)
        assert signature(state) == expected
        assert [dtype.removeprefix("torch.") for _, _, dtype in signature(decision)] == [
            "bool",
            "float32",
            "int32",
            "float32",
            "float32",
            "int32",
            *["float32"] * (n_tensors if config.unit_rule else 0),
        ]


def test_the_state_is_as_documented():
    assert signature(init_guard(CONFIGS["all"], 3, xp=BACKENDS["numpy"].xp)) == [
        (".step", (), "int32"),
        (".loss_scale.scale", (), "float32"),
        (".loss_scale.good_steps", (), "int32"),
        (".loss_scale.hysteresis_left", (), "int32"),
        (".skipped_total", (), "int32"),
        (".skipped_in_a_row", (), "int32"),
        (".nonfinite_in_a_row", (), "int32"),
        (".halted", (), "int32"),
        (".recorder.floats", (128, 4), "float32"),
        (".recorder.ints", (128, 4), "int32"),
    ]


@pytest.mark.parametrize("config", only(["default", "all", "rules"], CONFIGS))
def test_a_scan_carries_the_state(config):
    config, backend = CONFIGS[config], BACKENDS["jax-jit"]
    steps = stream(backend, 3, 40)
    decisions, state = backend.run(config, steps)
    stacked = jax.tree.map(lambda *leaf: jnp.stack(leaf), *steps)

    def body(carry, observation):
        decision, carry = decide(config, carry, observation, xp=jnp)
        return carry, decision

    scanned_state, scanned = jax.lax.scan(body, backend.init(config, 3), stacked)
    expected = jax.tree.map(lambda *leaf: jnp.stack([jnp.asarray(x) for x in leaf]), *decisions)
    for name in ("apply", "reason", "worst"):
        assert_bit_equal(getattr(scanned, name), getattr(expected, name))
    assert_bit_equal(scanned_state.loss_scale[:3], state.loss_scale[:3])
    for (path, a), (_, b) in zip(leaves(scanned_state), leaves(state), strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-5, err_msg=path)
    assert_bit_equal(scanned_state.recorder.ints, state.recorder.ints)
    assert int(state.step) > 20, "a guard that has halted decides nothing"


@each_config
@pytest.mark.parametrize("n_tensors", [0, 3])
def test_meta_tensors_have_no_data_to_wait_for(config, n_tensors):
    xp = array_api_compat.torch
    state = init_guard(config, n_tensors, xp=xp, device="meta")
    decision, after = decide(config, state, without_data(n_tensors, "meta"), xp=xp)
    assert all(leaf.device.type == "meta" for _, leaf in (*leaves(decision), *leaves(after)))
    assert signature(after) == signature(state)


def test_the_meta_device_raises_on_a_wait():
    with pytest.raises(RuntimeError, match="meta tensors"):
        bool(torch.empty((), device="meta"))


@pytest.mark.sampled
@each_config
@pytest.mark.parametrize("n_tensors", [0, 3])
def test_decide_on_fake_tensors_has_no_data_dependent_output(config, n_tensors):
    xp = array_api_compat.torch
    with FakeTensorMode():
        state = init_guard(config, n_tensors, xp=xp)
        decision, after = decide(config, state, without_data(n_tensors), xp=xp)
        assert tuple(decision.apply.shape) == ()
        assert signature(after) == signature(state)
        with pytest.raises(DataDependentOutputException):
            decision.apply.item()  # what would happen if decide waited


@each_config
def test_jax_transfers_nothing_to_the_host(config):
    backend = BACKENDS["jax-jit"]
    run, state = backend.prepare(config), backend.init(config, 3)
    (seen,) = stream(backend, 3, 1)
    text = jax.jit(run).lower(state, seen).as_text()
    assert "callback" not in text
    assert "infeed" not in text
    assert "outfeed" not in text


@pytest.mark.slow
@each_config
def test_decide_compiled_by_inductor_is_the_same(config):
    eager, compiled = BACKENDS["torch"], torch_compiled(config, backend="inductor")
    state = expected_state = eager.init(config, 3)
    for observation in stream(eager, 3, 30):
        expected, expected_state = eager.prepare(config)(expected_state, observation)
        decision, state = compiled(state, observation)
        for name in ("apply", "reason", "worst"):
            assert_bit_equal(getattr(decision, name), getattr(expected, name))
        torch.testing.assert_close(decision.multiplier, expected.multiplier, rtol=1e-6, atol=0)
    assert_bit_equal(state.loss_scale, expected_state.loss_scale)
    assert to_numpy(state.step) == to_numpy(expected_state.step) > 20
