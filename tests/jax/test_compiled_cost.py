"""The cost of a guarded step compiled by XLA: copies, aliasing, temporary memory, collectives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from tests.jax.helpers import run_on_four_devices
from tests.selection import only

pytestmark = pytest.mark.usefixtures("without_compilation_cache")

SIZE = 128
ONE_TENSOR = SIZE * SIZE * 4
Step = Callable[[Any, Any, Any], Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "clip": {"clip": 1.0},
    "all": {"clip": 1.0, "loss_scale": "dynamic", "spike": "skip", "max_skips_in_a_row": 9},
}


def _guarded(**settings: Any) -> tuple[Any, Step]:
    tx = optax.chain(stablenum_jax.guard(**settings), optax.adamw(1e-3))
    return tx, functools.partial(stablenum_jax.step, tx)


def _plain(tx: Any) -> tuple[Any, Step]:
    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx, step


def _wrapped(**settings: Any) -> tuple[Any, Step]:
    return _plain(stablenum_jax.guard(optax.adamw(1e-3), **settings))


def _by_selection() -> tuple[Any, Step]:
    """The naive true skip: everything is computed, then selected."""
    tx = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, after = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), after
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))

    return tx, step


def _params(n: int, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(0.1 * rng.standard_normal((SIZE, SIZE)).astype(np.float32), dtype) for _ in range(n)]


def _compile(
    made: tuple[Any, Step], n: int = 6, dtype: Any = np.float32, grad_dtype: Any = np.float32
) -> Any:
    """The compiled step, with parameters and state donated and the gradients kept."""
    tx, step = made
    params, grads = _params(n, dtype), _params(n, grad_dtype)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), grads).compile()


def _compile_whole(made: tuple[Any, Step], n: int = 6) -> Any:
    """Loss, gradients and step in one program, so that the gradients are intermediates."""
    tx, step = made
    params = _params(n)

    def loss(params: Any) -> Any:
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, jnp.ones((8, SIZE))) ** 2)

    def whole(params: Any, opt_state: Any) -> Any:
        return step(params, opt_state, jax.grad(loss)(params))

    return jax.jit(whole, donate_argnums=(0, 1)).lower(params, tx.init(params)).compile()


def _copies(compiled: Any) -> int:
    """How many buffers of a parameter's shape are copied."""
    return len(re.findall(rf"= \w+\[{SIZE},{SIZE}\]\S* copy\(", compiled.as_text()))


def _temp(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.sampled
@pytest.mark.parametrize("grad_dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_no_parameter_is_copied_and_all_donated_buffers_are_reused(settings: Any, grad_dtype: Any) -> None:
    made, params = _guarded(**settings), _params(6)
    compiled = _compile(made, grad_dtype=grad_dtype)
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((params, made[0].init(params))))
    assert _copies(compiled) == 0
    assert compiled.memory_analysis().alias_size_in_bytes == donated


@pytest.mark.parametrize("settings", [{}, {"loss_scale": "dynamic"}], ids=["default", "scale"])
def test_half_precision_gradients_are_not_stored_in_float32(settings: Any) -> None:
    compiled = _compile(_guarded(**settings), grad_dtype=jnp.bfloat16)
    assert _temp(compiled) < ONE_TENSOR // 2


def test_the_copy_test_can_fail() -> None:
    compiled = _compile(_by_selection())
    assert _copies(compiled) > 0
    assert _temp(compiled) >= 6 * ONE_TENSOR


@pytest.mark.parametrize("n", only([1, 60], [1, 10, 60]))
def test_temporary_memory_grows_by_scalars_alone(n: int) -> None:
    """A tensor has some scalars (each takes 64 bytes on a CPU) and entries in tuples (8 bytes each); the
    recorder, which XLA does not shift in place, has 4 KiB."""
    more = _temp(_compile(_guarded(clip=1.0), n)) - _temp(_compile(_plain(optax.adamw(1e-3)), n))
    assert more < 6 * 1024 + 256 * n


@pytest.mark.parametrize("settings", only([SETTINGS["clip"]], SETTINGS.values()), ids=SETTINGS.keys())
def test_in_a_whole_step_the_wrapper_writes_updates_over_the_gradients(settings: Any) -> None:
    gradients = 6 * ONE_TENSOR
    ours = _temp(_compile_whole(_wrapped(**settings)))
    assert ours < gradients + 64 * 1024
    assert ours - _temp(_compile_whole(_guarded(**settings))) < ONE_TENSOR // 4


def test_the_whole_step_test_can_fail() -> None:
    """optax's own clip and skip keep both gradients and updates."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    peer = optax.apply_if_finite(clipped, max_consecutive_errors=5)
    assert _temp(_compile_whole(_plain(peer))) > 2 * 6 * ONE_TENSOR - ONE_TENSOR


COLLECTIVES = """
import functools, re
import jax, jax.numpy as jnp, numpy as np, optax, stablenum_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
assert len(jax.devices()) == 4
layouts = [P("data", None), P(None, "data"), P(), P("data", None), P("data"), P("data", None)]
shapes = [(64, 32), (64, 32), (7,), (128, 3), (64,), (64, 32)]

def make(seed):
    rng = np.random.default_rng(seed)
    return [
        jax.device_put(rng.standard_normal(s).astype(np.float32), NamedSharding(mesh, layout))
        for s, layout in zip(shapes, layouts)
    ]

params, grads = make(0), make(1)
tx = optax.chain(stablenum_jax.guard(clip=1.0, loss_scale="dynamic"), optax.adamw(1e-3))
state = jax.jit(tx.init)(params)
step = jax.jit(functools.partial(stablenum_jax.step, tx))
text = step.lower(params, state, grads).compile().as_text()

found, where = {}, None
for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?(\\S+) \\(.*\\{$", line)
    where = ("entry" if head.group(1) else head.group(2)) if head else where
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    op = re.search(rf" = (.*?) ({names})\\S*\\(", line)
    if op:
        found.setdefault((op.group(2), where == "entry"), []).append(op.group(1))
# In the hot path all sums of squares travel in one all-reduce; in the second read, in one more.
assert set(found) == {("all-reduce", True), ("all-reduce", False)}, found
assert [len(calls) for calls in found.values()] == [1, 1], found
for calls in found.values():
    assert re.findall(r"\\w+\\[[\\d,]*\\]", calls[0]) == ["f32[]"] * 5, calls  # nothing but scalars

# and the sharded step is the whole one's
whole = jax.jit(functools.partial(stablenum_jax.step, tx))
host = [np.asarray(x) for x in params], jax.tree.map(np.asarray, state), [np.asarray(x) for x in grads]
for big in (1.0, 1e20, 1e-30):
    scaled = lambda tree: [g * np.float32(big) for g in tree]
    one, two = step(params, state, scaled(grads)), whole(host[0], host[1], scaled(host[2]))
    assert bool(stablenum_jax.metrics(one[1])["applied"])
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
"""


def test_sharded_gradients_cost_one_all_reduce_of_scalars() -> None:
    run_on_four_devices(COLLECTIVES)
