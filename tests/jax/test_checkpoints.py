"""Checkpoints of JAX: a state comes back as it was, no poison is saved, nothing half written is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum
import stablenum_jax
from stablenum_jax._recovery import finiteness
from tests.jax.helpers import assert_same_bits, make_grads, make_params, spoil

FORMATS = ("npz", "safetensors", "orbax")
ROOT = Path(__file__).parents[2]
RULES: dict[str, Any] = {"clip": [stablenum.AdaGC(), 1.0], "loss_scale": "dynamic", "spike": "skip"}
each_format = pytest.mark.parametrize("kind", FORMATS)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def optimizer(**rules: Any) -> Any:
    return optax.chain(stablenum_jax.guard(**rules), optax.adamw(1e-2))


def started(tx: Any) -> dict[str, Any]:
    return {"params": make_params(), "opt_state": tx.init(make_params())}


def trained(tx: Any, steps: range, state: Any = None) -> Any:
    """Train for some steps, of which each fourth is bad."""
    state = started(tx) if state is None else state

    @jax.jit
    def step(state: Any, grads: Any) -> Any:
        scaled = jax.tree.map(lambda g: g * stablenum_jax.loss_scale(state["opt_state"]), grads)
        params, opt_state = stablenum_jax.step(tx, state["params"], state["opt_state"], scaled, value=1.0)
        return {"params": params, "opt_state": opt_state}

    for i in steps:
        state = step(state, spoil(make_grads(i), np.inf) if i % 4 == 1 else make_grads(i))
    return state


def everything() -> dict[str, Any]:
    """A state with every kind of leaf."""
    return {
        "params": make_params(),
        "opt_state": optax.chain(
            stablenum_jax.guard(**RULES), optax.adamw(1e-2), optax.contrib.reduce_on_plateau()
        ).init(make_params()),
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(1), 4), jax.random.PRNGKey(3)),
        "other key": jax.random.key(3, impl="rbg"),
        "narrow": [jnp.ones(3, dtype) for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")],
        "whole": [jnp.arange(3), jnp.asarray([True, False]), jnp.arange(3, dtype=jnp.uint8)],
        "complex": jnp.ones(2, jnp.complex64),
        "scalar": jnp.asarray(2.5, jnp.float32),
        "empty": jnp.zeros((0, 3)),
        "host": {"array": np.arange(3.0), "number": np.float32(3), "plain": 3, "flag": True, "text": "words"},
        "value": {"value": jnp.ones(2), "file": jnp.zeros(1)},
        "best": float("inf"),
        "none": None,
        "nnx": nnx.state(Net()),
        "module": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
        "tuple": (1, (jnp.ones(1),)),
    }


def assert_same(found: Any, wanted: Any) -> None:
    """The same structure, and leaves of the same kinds, formats and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        assert type(a) is type(b), path
        if not hasattr(b, "dtype"):
            assert a == b, path
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@each_format
def test_every_kind_of_leaf_comes_back_as_it_was(kind, tmp_path):
    state = everything()
    checkpoints = stablenum_jax.Checkpoints(tmp_path / "run", format=kind)
    folder = checkpoints.save(7, state)
    assert folder == checkpoints.folder / "step-000000007"
    step, found = checkpoints.load(state)
    assert (step, checkpoints.steps()) == (7, [7])
    assert_same(found, state)
    if kind != "npz":
        return
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "npz"
    assert set(manifest["versions"]) == {"stablenum", "jax", "numpy"}


@each_format
def test_other_integers_and_formats(kind, tmp_path):
    """safetensors has no 4-bit integers and no other 8-bit floating-point formats."""
    state = {"a": jnp.ones(3, jnp.int4), "b": jnp.ones(3, jnp.float8_e4m3b11fnuz)}
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    if kind == "safetensors":
        with pytest.raises(ValueError, match=r'a is int4, which safetensors cannot hold. Use format="npz"'):
            checkpoints.save(0, state)
        assert checkpoints.steps() == []
        return
    checkpoints.save(0, state)
    assert_same(checkpoints.load(state)[1], state)


@each_format
def test_names_may_have_any_characters(kind, tmp_path):
    state = {"C#": jnp.ones(2), "a#b": jnp.ones(2, jnp.bfloat16), "x/y": jnp.ones(1), "#2": jnp.ones(1, int)}
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(1, state)
    assert_same(checkpoints.load(state)[1], state)


@each_format
def test_a_training_resumes_exactly(kind, tmp_path):
    tx = optimizer(**RULES)
    state = trained(tx, range(6))
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(6, state)
    _, found = checkpoints.load(started(tx))
    assert_same_bits(found, state)
    assert_same_bits(trained(tx, range(6, 11), found), trained(tx, range(6, 11), state))
    assert stablenum_jax.metrics(found)["skipped_total"] == 2


@each_format
def test_a_guard_loads_with_other_settings(kind, tmp_path):
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(6, trained(optimizer(clip=1.0, loss_scale="dynamic"), range(6)))
    other = started(optimizer(clip=[stablenum.AutoClip(), 2.0], loss_scale="dynamic", spike="skip"))
    with pytest.warns(stablenum.StatisticsNotLoadedWarning):
        _, found = checkpoints.load(other)
    assert jax.tree.structure(found) == jax.tree.structure(other)
    assert stablenum_jax.metrics(found)["skipped_total"] == 2


def poisoned(state: Any, name: str, value: float) -> Any:
    def spoilt(path: Any, leaf: Any) -> Any:
        here = jax.tree_util.keystr(path, simple=True, separator=".") == name
        return leaf.at[(0,) * leaf.ndim].set(value) if here else leaf

    return jax.tree_util.tree_map_with_path(spoilt, state)


@each_format
def test_poison_is_refused_and_named(kind, tmp_path):
    state = {"w": jnp.ones((2, 3)), "opt": optax.adam(1e-3).init({"w": jnp.ones(3), "g": jnp.ones(())})}
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(1, state)
    bad = {
        "w": np.nan,
        "opt.0.nu.w": np.inf,
        "opt.0.mu.w": -np.inf,
        "opt.0.mu.g": np.inf,
    }
    for name, value in bad.items():
        with pytest.raises(stablenum.PoisonedStateError, match="step 2 is not saved") as caught:
            checkpoints.save(2, poisoned(state, name, value))
        assert caught.value.names == (name,)
        assert checkpoints.steps() == [1]
    aside = stablenum_jax.Checkpoints(tmp_path, format=kind, on_poisoned="set aside")
    folder = aside.save(2, poisoned(state, "w", np.nan))
    assert folder == tmp_path / "post-mortem" / "step-000000002"
    assert aside.load(state)[0] == 1


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.asarray([1.0, jnp.nan], jnp.bfloat16),
        jnp.asarray([1.0, jnp.nan], jnp.float8_e4m3fn),
        jnp.asarray([1.0, jnp.inf], jnp.float8_e5m2),
        jnp.asarray([1.0, complex(0.0, jnp.inf)], jnp.complex64),
        jnp.asarray(jnp.nan),
        np.asarray([1.0, np.nan]),
        np.float64(np.nan),
        np.asarray([1.0, np.nan]).astype(jnp.bfloat16),
        float("nan"),
        complex(0.0, float("nan")),
    ],
    ids=lambda leaf: f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}",
)
def test_poison_is_seen_in_every_format_of_numbers(leaf, tmp_path):
    with pytest.raises(stablenum.PoisonedStateError) as caught:
        stablenum_jax.Checkpoints(tmp_path).save(0, {"a": jnp.ones(2), "b": {"c": leaf}})
    assert caught.value.names == ("b.c",)
    assert not [*tmp_path.iterdir()]


@each_format
def test_what_is_not_finite_on_purpose_is_saved(kind, tmp_path):
    tx = optimizer(**RULES)
    state = {
        "guard": trained(tx, range(3)),
        "plateau": optax.contrib.reduce_on_plateau().init({"w": jnp.ones(2)}),
        "search": optax.scale_by_backtracking_linesearch(3).init({"w": jnp.ones(2)}),
        "mask": jnp.where(jnp.tri(3, dtype=bool), jnp.zeros((3, 3)), -jnp.inf),
        "best": float("-inf"),
        "metrics": {"least": jnp.asarray(jnp.inf), "last": jnp.asarray([jnp.inf])},
        "numpy": {"least": np.float64("inf")},
    }
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(3, state)
    assert_same(checkpoints.load(state)[1], state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", jnp.where(jnp.tri(3, dtype=bool), 0.0, -jnp.inf)),
        ("mask", jnp.asarray([0.0, -jnp.inf])),
        ("mask", jnp.asarray([[0.0, jnp.inf]])),
        ("mask", jnp.asarray([[1.0, -jnp.inf]])),
    ],
)
def test_what_only_looks_like_a_mask_is_refused_unless_it_is_allowed(name, value, tmp_path):
    state = {"layer": {name: value}}
    with pytest.raises(stablenum.PoisonedStateError):
        stablenum_jax.Checkpoints(tmp_path).save(0, state)
    allowing = stablenum_jax.Checkpoints(tmp_path, allow=(f"layer.{name}",))
    allowing.save(0, state)
    assert_same(allowing.load(state)[1], state)


def test_arrays_on_devices_are_looked_at_in_one_pass(tmp_path, monkeypatch):
    calls = []
    look = finiteness._bad
    monkeypatch.setattr(finiteness, "_bad", lambda arrays: calls.append(len(arrays)) or look(arrays))
    stablenum_jax.Checkpoints(tmp_path).save(0, {"a": jnp.ones(2), "b": [jnp.ones(()), jnp.zeros((2, 2))]})
    assert calls == [3]


@each_format
def test_a_changed_byte_is_found_and_the_older_checkpoint_is_loaded(kind, tmp_path, caplog):
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    for step in (1, 2):
        folder = checkpoints.save(step, {"w": jnp.full(1000, step, jnp.float32)})
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    largest = max(files, key=lambda p: p.stat().st_size)
    changed = bytearray(largest.read_bytes())
    changed[len(changed) // 2] ^= 1
    largest.write_bytes(changed)
    step, state = checkpoints.load({"w": jnp.zeros(1000)})
    assert (step, float(state["w"][0])) == (1, 1.0)
    assert "step-000000002" in caplog.text
    assert "does not match its checksum" in caplog.text


@each_format
def test_a_state_may_be_abstract_and_leave_out_parts(kind, tmp_path):
    tx = optimizer(clip=1.0)
    state = trained(tx, range(2)) | {"key": jax.random.key(5)}
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(2, state)
    is_guard = lambda x: isinstance(x, stablenum_jax.typing.GuardOptState)  # noqa: E731
    shape = lambda x: x if is_guard(x) else jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    assert_same(checkpoints.load(jax.tree.map(shape, state, is_leaf=is_guard))[1], state)
    assert_same(checkpoints.load({"params": state["params"]})[1], {"params": state["params"]})
    with pytest.raises(TypeError, match=r"like must hold the guard's own arrays.*opt_state\.0 are abstract"):
        checkpoints.load(jax.eval_shape(lambda: state))


@each_format
def test_arrays_get_the_formats_of_the_state_that_they_are_loaded_into(kind, tmp_path):
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(0, {"w": jnp.asarray([1.0, 70000.0]), "host": np.ones(2)})
    _, found = checkpoints.load({"w": jnp.zeros(2, jnp.bfloat16), "host": np.zeros(2, np.float32)})
    assert found["w"].dtype == jnp.bfloat16
    assert found["host"].dtype == np.float32
    with pytest.raises(stablenum.CheckpointError, match=r"not finite: w \(1 inf of 2\)"):
        checkpoints.load({"w": jnp.zeros(2, jnp.float16), "host": np.ones(2)})


MISFITS = [
    ({"w": jnp.ones(2), "more": jnp.ones(2)}, "more is not in it"),
    ({"w": jnp.ones(3)}, r"w is float32\(2,\) there and float32\(3,\) here"),
    ({"w": jnp.ones(2, jnp.int32)}, r"w is float32\(2,\) there and int32\(2,\) here"),
    ({"w": {"inside": jnp.ones(2)}}, r"w.inside is not in it"),
    ({"n": jnp.ones(2)}, "n is an array here but not in the checkpoint"),
    ({"w": 3}, "w is a plain value here but not in the checkpoint"),
    ({"key": jax.random.key(0, impl="rbg")}, "key is key<fry>.* there and key<rbg>.* here"),
    ({"w": jax.random.key(0)}, "w is a random key here but not in the checkpoint"),
    ({"w": optimizer().init(make_params())}, "w.0 is not in it"),
]


@each_format
def test_a_state_that_does_not_fit_is_named(kind, tmp_path):
    checkpoints = stablenum_jax.Checkpoints(tmp_path, format=kind)
    checkpoints.save(0, {"w": jnp.ones(2), "n": 3, "key": jax.random.key(0)})
    for like, words in MISFITS:
        with pytest.raises(stablenum.CheckpointError, match=words) as caught:
            checkpoints.load(like)
        assert list(caught.value.reasons) == ["step-000000000"]


def test_wrong_arguments_are_named(tmp_path, monkeypatch):
    for arguments, words in (
        ({"folder": 3}, "folder must be a path; got int"),
        ({"folder": tmp_path, "format": "torch"}, "format must be"),
        ({"folder": tmp_path, "keep": 0}, "keep must be"),
        ({"folder": tmp_path, "allow": "*.mask"}, "allow must be"),
        ({"folder": tmp_path, "on_poisoned": "keep"}, "on_poisoned must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            stablenum_jax.Checkpoints(**arguments)
    checkpoints = stablenum_jax.Checkpoints(tmp_path)
    with pytest.raises(TypeError, match="w is traced"):
        jax.jit(lambda w: checkpoints.save(0, {"w": w}))(jnp.ones(2))
    with pytest.raises(ValueError, match=r"two leaves called a\.b"):
        checkpoints.save(0, {"a": {"b": 1}, "a.b": 2} | {"a": _Pair(1, 2)})
    for module, kind in (("safetensors", "safetensors"), ("orbax.checkpoint", "orbax")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf'Checkpoints\(format="{kind}"\) needs .*: pip install'):
            stablenum_jax.Checkpoints(tmp_path, format=kind)


@jax.tree_util.register_pytree_with_keys_class
class _Pair:
    """A node whose two children have one key."""

    def __init__(self, left: Any, right: Any) -> None:
        self.both = (left, right)

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.DictKey("b")
        return [(key, part) for part in self.both], None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> _Pair:
        return cls(*children)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("npz", 8),
        ("safetensors", 6),
        ("orbax", 6),
        *(pytest.param(kind, 200, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]) for kind in FORMATS),
    ],
)
def test_a_killed_process_leaves_a_good_checkpoint(kind, times, tmp_path):
    command = [sys.executable, "-m", "tests.jax.saving_program", str(tmp_path / "run"), kind, str(times), "7"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=2900,
    )
    assert done.returncode == 0, done.stderr
    where = json.loads(done.stdout)
    assert sum(where.values()) == times
    assert where.get("writing", 0) >= times // 4, "most kills came while a checkpoint was written"


MESHES = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import stablenum, stablenum_jax

tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
one, two = Mesh(jax.devices(), "x"), Mesh(np.reshape(jax.devices(), (4, 2)), ("a", "b"))


def laid_out(mesh, spec):
    whole = NamedSharding(mesh, P())
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)}
    state = {"params": params, "opt_state": tx.init(params), "key": jax.random.split(jax.random.key(0), 8)}
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec) if x.shape == (8, 8) else whole)
    return jax.tree.map(place, state)


state = laid_out(one, P("x"))
for kind in ("npz", "safetensors", "orbax"):
    checkpoints = stablenum_jax.Checkpoints(f"{sys.argv[1]}/{kind}", format=kind)
    checkpoints.save(0, state)
    like = laid_out(two, P("b", "a"))
    step, found = checkpoints.load(like)
    for new, old, saved in zip(*map(jax.tree.leaves, (found, like, state)), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim), (kind, new.sharding, old.sharding)
        data = jax.random.key_data if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else np.asarray
        np.testing.assert_array_equal(data(new), data(saved))
    bad = {**state, "params": {"w": state["params"]["w"].at[5, 2].set(jnp.nan)}}
    try:
        checkpoints.save(1, bad)
    except stablenum.PoisonedStateError as error:
        assert error.names == ("params.w",)
    else:
        raise AssertionError("not refused")
"""


def test_a_state_saved_on_one_mesh_loads_onto_another(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESHES, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **flags}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
