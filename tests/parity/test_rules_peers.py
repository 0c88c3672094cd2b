"""On clean gradients, where the peers' rules are right, ours equals them to 1e-6 in the NumPy reference."""

from __future__ import annotations

import array_api_compat.numpy as xp
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from stablenum import (
    AdaptiveGradClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    GuardConfig,
    Observation,
    decide,
    init_guard,
)
from stablenum.reference.guarded import SGD, Guarded, apply, measure, measure_units

SHAPES = {
    "kernel": (3, 3, 4, 8),
    "dense": (16, 8),
    "heads": (6, 2, 5),
    "bias": (8,),
    "column": (7, 1),
    "row": (1, 9),
    "gain": (),
}


def tensors(seed: int, size: float) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [np.asarray(size * draw.normal(size=shape), np.float32) for shape in SHAPES.values()]


def clipped(config: GuardConfig, gradients, params, scale: float = 1.0):
    """The gradients that the optimizer gets; ``scale`` is the loss scale."""
    raw = [np.asarray(g * np.float32(scale)) for g in gradients]
    units = config.unit_rule and measure_units(config.unit_rule, list(SHAPES), raw, params)
    observation = Observation(norms=measure(raw), units=units)
    with np.errstate(all="ignore"):
        decision, _ = decide(config, init_guard(config, len(raw), xp=xp), observation, xp=xp)
    return apply(config, decision, raw)


def assert_equal(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("clipping", [0.01, 0.3])
def test_adaptive_grad_clip_equals_optaxs(clipping, size, scale):
    gradients, params = tensors(1, size), tensors(2, 0.5)
    params[3] = np.zeros_like(params[3])  # a bias that starts at 0 can move by eps
    peer = optax.adaptive_grad_clip(clipping)
    theirs, _ = peer.update([jnp.asarray(g) for g in gradients], peer.init(params), params)
    config = GuardConfig(clip=AdaptiveGradClip(clipping=clipping), loss_scale=scale)
    assert_equal(clipped(config, gradients, params, scale or 1.0), theirs)


def test_adaptive_grad_clip_then_global_norm_equals_optaxs_chain():
    gradients, params = tensors(1, 1.0), tensors(2, 0.5)
    peer = optax.chain(optax.adaptive_grad_clip(0.1), optax.clip_by_global_norm(0.05))
    theirs, _ = peer.update([jnp.asarray(g) for g in gradients], peer.init(params), params)
    ours = clipped(GuardConfig(clip=(AdaptiveGradClip(clipping=0.1), 0.05)), gradients, params)
    # Ours divides by norm + 1e-6, as torch does.
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6 / 0.05 + 1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [1e-2, 1.0, 1e4])
def test_clip_by_global_norm_equals_torchs_and_optaxs(max_norm):
    gradients, params = tensors(3, 1.0), tensors(4, 1.0)
    ours = clipped(GuardConfig(clip=ClipByGlobalNorm(max_norm)), gradients, params)
    weights = [torch.nn.Parameter(torch.tensor(p)) for p in params]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = torch.tensor(gradient)
    torch.nn.utils.clip_grad_norm_(weights, max_norm)
    assert_equal(ours, [weight.grad.numpy() for weight in weights])
    theirs, _ = optax.clip_by_global_norm(max_norm).update([jnp.asarray(g) for g in gradients], None)
    assert_equal(ours, theirs)


def test_clip_by_norm_equals_torchs_for_each_tensor():
    gradients, params = tensors(5, 1.0), tensors(6, 1.0)
    ours = clipped(GuardConfig(clip=ClipByNorm(0.7)), gradients, params)
    for a, gradient in zip(ours, gradients, strict=True):
        weight = torch.nn.Parameter(torch.tensor(gradient))
        weight.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([weight], 0.7)
        assert_equal([a], [weight.grad.numpy()])


@pytest.mark.parametrize("max_value", [0.01, 0.5, 10.0])
def test_clip_by_value_equals_torchs_and_optaxs(max_value):
    gradients, params = tensors(7, 1.0), tensors(8, 1.0)
    ours = clipped(GuardConfig(clip=ClipByValue(max_value)), gradients, params)
    weights = [torch.nn.Parameter(torch.tensor(p)) for p in params]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = torch.tensor(gradient)
    torch.nn.utils.clip_grad_value_(weights, max_value)
    assert_equal(ours, [weight.grad.numpy() for weight in weights])
    theirs, _ = optax.clip(max_value).update([jnp.asarray(g) for g in gradients], None)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("threshold", [0.1, 1.0, 10.0])
def test_clip_update_rms_equals_optaxs_clip_by_block_rms(threshold):
    # Plain SGD with a rate of 1 from zero weights, so the new weights are the update.
    gradients = tensors(9, 1.0)
    train = Guarded(
        [np.zeros_like(g) for g in gradients], SGD(lr=1.0), clip=ClipUpdateRMS(threshold, per_lr=False)
    )
    train.step(gradients)
    theirs, _ = optax.clip_by_block_rms(threshold).update([-jnp.asarray(g) for g in gradients], None)
    assert_equal(train.params, theirs)
    with_rate = Guarded([np.zeros_like(g) for g in gradients], SGD(lr=0.25), clip=ClipUpdateRMS(threshold))
    with_rate.step(gradients)
    assert_equal([4.0 * p for p in with_rate.params], theirs)
