"""The same state in torch's and in optax's optimizer gives the same audit."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum_jax._diagnosis.audit import state_problems as problems_in_jax
from stablenum_torch._diagnosis.audit import state_problems as problems_in_torch

SHAPES = {"a": (40, 30), "b": (7,), "c": ()}
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
# What only one framework knows: the names of its entries, and weight decay.
OWN = ("state_dtypes", "law")


def state(seed: int, dtype: Any) -> dict[str, dict[str, np.ndarray]]:
    """Parameters, moments and gradients, some of them faulty."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in SHAPES.items():
        g = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3)
        arrays = {"w": rng.normal(size=shape), "m": 0.3 * g, "v": 0.01 * g * g, "g": g}
        made[name] = {k: np.asarray(x, np.float32).astype(dtype) for k, x in arrays.items()}
    a, b = made["a"], made["b"]
    faults = [
        ("v", np.inf),
        ("v", np.nan),
        ("v", -1e-2),
        ("m", np.inf),
        ("m", np.nan),
        ("v", 0.0),
        ("w", np.nan),
    ]
    for i, (key, value) in enumerate(faults):
        a[key][i, 2 * i] = value
    a["v"][10:15] = a["m"][10:15] = 0.0
    b["v"][3], b["w"][4], b["g"][5] = 0.0, 0.0, np.inf
    return made


def in_torch(made: dict[str, dict[str, np.ndarray]], dtype: torch.dtype, **settings: Any):
    """torch's Adam with this state."""

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x.astype(np.float32)).to(dtype)

    params = {name: torch.nn.Parameter(tensor(x["w"])) for name, x in made.items()}
    optimizer = torch.optim.Adam(params.items(), lr=0.01, **settings)
    for name, x in made.items():
        params[name].grad = tensor(x["g"])
        optimizer.state[params[name]] = {
            "step": torch.tensor(9.0),
            "exp_avg": tensor(x["m"]),
            "exp_avg_sq": tensor(x["v"]),
        }
    return optimizer, params


def in_jax(made: dict[str, dict[str, np.ndarray]], dtype: Any):
    """optax's Adam with this state, its parameters and gradients."""
    w, m, v, g = ({n: jnp.asarray(x[k].astype(np.float32), dtype) for n, x in made.items()} for k in "wmvg")
    first, *rest = optax.adam(0.01).init(w)
    return (first._replace(count=jnp.asarray(9, jnp.int32), mu=m, nu=v), *rest), w, g


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_state_gives_the_same_rows_and_risks(dtype: str, seed: int) -> None:
    made = state(seed, jnp.dtype(dtype))
    optimizer, _ = in_torch(made, getattr(torch, dtype), foreach=True)
    opt_state, params, grads = in_jax(made, dtype)
    ours = stablenum_torch.audit(optimizer)
    theirs = stablenum_jax.audit(opt_state, params, grads, learning_rate=0.01, **ADAM)
    assert [row.name for row in ours.rows] == [row.name for row in theirs.rows]
    assert ours.risks == theirs.risks
    assert ours.risks
    assert ours.poisoned == theirs.poisoned == {"a": 5}
    assert problems_in_torch(optimizer) == theirs.problems()
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        left, right = one.to_dict(), other.to_dict()
        assert set(left) == set(right)
        for key in set(left) - set(OWN):
            if isinstance(left[key], float):
                assert left[key] == pytest.approx(right[key], rel=1e-12), (one.name, key)
            else:
                assert left[key] == right[key], (one.name, key)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_repair(seed: int) -> None:
    made = state(seed, np.float32)
    optimizer, tensors = in_torch(made, torch.float32)
    opt_state, params, _ = in_jax(made, "float32")
    assert stablenum_torch.repair(optimizer, stablenum_torch.audit(optimizer)) == 5
    mended = stablenum_jax.repair(opt_state, stablenum_jax.audit(opt_state, params))
    for name, p in tensors.items():
        for key, tree in (("exp_avg", mended[0].mu), ("exp_avg_sq", mended[0].nu)):
            assert optimizer.state[p][key].numpy().tobytes() == np.asarray(tree[name]).tobytes()
    assert any("v is 0 but m is not" in p for p in problems_in_torch(optimizer))
    assert not any("poisoned" in p for p in problems_in_jax(mended, params))


def test_the_next_update_after_a_repair_is_the_same() -> None:
    made = state(3, np.float32)
    for x in made.values():
        x["w"], x["g"] = np.ones_like(x["w"]), np.ones_like(x["g"])
        x["m"], x["v"] = np.ones_like(x["m"]), np.full_like(x["v"], math.inf)
    optimizer, tensors = in_torch(made, torch.float32)
    opt_state, params, grads = in_jax(made, "float32")
    stablenum_torch.repair(optimizer, stablenum_torch.audit(optimizer))
    mended = stablenum_jax.repair(opt_state, stablenum_jax.audit(opt_state, params))
    optimizer.step()
    updates, _ = optax.adam(0.01).update(grads, mended, params)
    # m = 0.1, v = 0.001, and step 10's bias: 0.1 / 0.651 / sqrt(0.001 / 0.00996) learning rates.
    expected = 0.01 * (0.1 / (1 - 0.9**10)) / math.sqrt(0.001 / (1 - 0.999**10))
    for name, p in tensors.items():
        np.testing.assert_allclose(1.0 - p.detach().numpy(), expected, rtol=1e-4)
        np.testing.assert_allclose(-np.asarray(updates[name]), expected, rtol=1e-4)
