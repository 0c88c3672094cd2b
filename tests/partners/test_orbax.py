"""Orbax: a training with a guard resumes exactly, and its guard loads under other settings and elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.commands.verify.looking import look_at
from stablenum_jax.integrations.orbax import GuardedCheckpointHandler, GuardedRestore, GuardedSave
from tests.jax.helpers import assert_same_bits, make_grads, make_params, spoil, without_guard

RULES = {"clip": [stablenum.AdaGC()], "loss_scale": "dynamic", "spike": "skip"}


def optimizer(**rules: Any) -> Any:
    return optax.chain(stablenum_jax.guard(**rules), optax.adamw(1e-2))


def started(tx: Any) -> dict[str, Any]:
    return {"params": make_params(), "opt_state": tx.init(make_params())}


def stepped(tx: Any) -> Any:
    def step(state: Any, grads: Any) -> Any:
        scaled = jax.tree.map(lambda g: g * stablenum_jax.loss_scale(state["opt_state"]), grads)
        params, opt_state = stablenum_jax.step(tx, state["params"], state["opt_state"], scaled, value=1.0)
        return {"params": params, "opt_state": opt_state}

    return step


def trained(tx: Any, steps: range, state: Any = None) -> Any:
    """Train for some steps, of which each fourth is bad."""
    step = jax.jit(stepped(tx))
    state = started(tx) if state is None else state
    for i in steps:
        state = step(state, spoil(make_grads(i), np.inf) if i % 4 == 1 else make_grads(i))
    return state


@pytest.mark.parametrize(
    ("save", "restore"),
    [(ocp.args.StandardSave, ocp.args.StandardRestore), (GuardedSave, GuardedRestore)],
    ids=["StandardSave", "GuardedSave"],
)
def test_a_training_resumes_exactly(tmp_path: Path, save: Any, restore: Any) -> None:
    tx = optimizer(**RULES)
    state = trained(tx, range(6))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=save(state))
    with ocp.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(manager.latest_step(), args=restore(started(tx)))
    assert_same_bits(restored, state)
    assert_same_bits(trained(tx, range(6, 11), restored), trained(tx, range(6, 11), state))
    assert stablenum_jax.metrics(restored)["skipped_total"] == 2


def test_beside_other_items_and_with_a_checkpointer(tmp_path: Path) -> None:
    tx = optimizer(clip=1.0)
    state = trained(tx, range(3))
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        args = ocp.args.Composite(state=GuardedSave(state), data=ocp.args.JsonSave({"epoch": 3}))
        manager.save(2, args=args)
        manager.wait_until_finished()
        args = ocp.args.Composite(state=GuardedRestore(started(tx)), data=ocp.args.JsonRestore())
        restored = manager.restore(2, args=args)
    assert_same_bits(restored.state, state)
    assert restored.data == {"epoch": 3}
    for kind in (ocp.Checkpointer, ocp.AsyncCheckpointer):
        with kind(GuardedCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / kind.__name__, args=GuardedSave(state))
        with ocp.Checkpointer(GuardedCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(tmp_path / kind.__name__, args=GuardedRestore(started(tx)))
        assert_same_bits(found, state)


def test_buffers_may_be_donated_while_they_are_written(tmp_path: Path) -> None:
    tx = optimizer(clip=1.0)
    state = trained(tx, range(3))
    expected = jax.tree.map(np.array, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(2, args=GuardedSave(state))
        jax.jit(stepped(tx), donate_argnums=0)(state, make_grads(3))
        manager.wait_until_finished()
        assert_same_bits(manager.restore(2, args=GuardedRestore(started(tx))), expected)


def test_other_rules_start_from_scratch_and_the_rest_is_kept(tmp_path: Path) -> None:
    state = trained(optimizer(clip=1.0, loss_scale="dynamic"), range(6))
    other = optimizer(clip=[stablenum.AutoClip(), 2.0], loss_scale="dynamic", spike="skip")
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.Composite(ours=GuardedSave(state), plain=ocp.args.StandardSave(state)))
        manager.wait_until_finished()
        args = ocp.args.Composite(ours=GuardedRestore(started(other)))
        with pytest.warns(stablenum.StatisticsNotLoadedWarning) as warned:
            restored = manager.restore(5, args=args).ours
        assert {str(w.message).split(":")[0] for w in warned} == {"state.clip[0]", "state.spike"}
        args = ocp.args.Composite(plain=ocp.args.StandardRestore(started(other)))
        with pytest.raises(ValueError, match="tree structures do not match"):
            manager.restore(5, args=args)
    assert jax.tree.structure(restored) == jax.tree.structure(started(other))
    assert_same_bits(without_guard(restored), without_guard(state))
    assert stablenum_jax.history(restored) == stablenum_jax.history(state)
    assert stablenum_jax.loss_scale(restored) == 2.0**14
    trained(other, range(6, 8), restored)


@pytest.mark.parametrize("before", [None, "dynamic", 128.0])
@pytest.mark.parametrize("now", [None, "dynamic", 128.0])
def test_standard_restore_has_the_old_loss_scale_for_one_step(tmp_path: Path, before: Any, now: Any) -> None:
    """As docs/recipes/orbax.md says; GuardedRestore has the new one."""
    scales = {None: 1.0, "dynamic": 65536.0, 128.0: 128.0}
    old, new = (optax.chain(stablenum_jax.guard(loss_scale=x), optax.sgd(0.1)) for x in (before, now))
    params = make_params()
    restored = {}
    for save, restore in ((ocp.args.StandardSave, ocp.args.StandardRestore), (GuardedSave, GuardedRestore)):
        with ocp.CheckpointManager(tmp_path / save.__name__) as manager:
            manager.save(0, args=save(old.init(params)))
            manager.wait_until_finished()
            restored[restore] = manager.restore(0, args=restore(new.init(params)))
    assert stablenum_jax.loss_scale(restored[GuardedRestore]) == scales[now]
    opt_state = restored[ocp.args.StandardRestore]
    assert stablenum_jax.loss_scale(opt_state) == scales[before]
    grads = jax.tree.map(lambda g: g * scales[before], make_grads(0))
    _, opt_state = stablenum_jax.step(new, params, opt_state, grads)
    assert stablenum_jax.loss_scale(opt_state) == scales[now]
    assert stablenum_jax.metrics(opt_state)["applied"] == (now is not None or before is None)


def torch_optimizer(rules: Any) -> tuple[list[torch.nn.Parameter], Any]:
    flat = jax.tree_util.tree_leaves_with_path(make_params())
    named = [
        (".".join(key.key for key in path), torch.nn.Parameter(torch.tensor(np.array(leaf))))
        for path, leaf in flat
    ]
    return [p for _, p in named], stablenum_torch.wrap(torch.optim.AdamW(named, lr=1e-2), **rules)


def test_the_guard_crosses_to_pytorch_and_back(tmp_path: Path) -> None:
    tx = optimizer(**RULES)
    state = trained(tx, range(6))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=GuardedSave(state))
    file = tmp_path / "5" / "default" / "guard.json"
    params, opt = torch_optimizer(RULES)
    opt.load_guard_state_dict(json.loads(file.read_text()))
    assert opt.guard_state_dict() == stablenum_jax.guard_state_dict(state)
    for i in range(6, 9):
        grads = jax.tree.leaves(spoil(make_grads(i), np.inf) if i == 7 else make_grads(i))
        opt.zero_grad()
        opt.backward(sum((p * torch.tensor(np.array(g))).sum() for p, g in zip(params, grads)))
        opt.step()
    file.write_text(json.dumps(opt.guard_state_dict()))
    with ocp.CheckpointManager(tmp_path) as manager:
        back = manager.restore(5, args=GuardedRestore(started(tx)))
    rows = stablenum_jax.history(back)
    assert [row["applied"] for row in rows] == [i % 4 != 1 and i != 7 for i in range(9)]
    assert (
        float(stablenum_jax.loss_scale(back)) == opt.loss_scale == 2.0**14
    )  # the loss of step 7 was not finite
    assert_same_bits(without_guard(back), without_guard(state))


MESHES = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp
import stablenum, stablenum_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from stablenum_jax.integrations.orbax import GuardedRestore, GuardedSave

tx = optax.chain(stablenum_jax.guard(clip=stablenum.AdaGC()), optax.adamw(1e-2))
one, two = Mesh(jax.devices(), "x"), Mesh(np.reshape(jax.devices(), (4, 2)), ("a", "b"))


def laid_out(mesh, spec):
    whole = NamedSharding(mesh, P())
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)}
    state = {"params": params, "opt_state": tx.init(params)}
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec) if x.shape == (8, 8) else whole)
    return jax.tree.map(place, state)


@jax.jit
def train(state, scale):
    grads = jax.grad(lambda p: scale * jnp.sum(p["w"] ** 3))(state["params"])
    params, opt_state = stablenum_jax.step(tx, state["params"], state["opt_state"], grads)
    return {"params": params, "opt_state": opt_state}


state = laid_out(one, P("x"))
state = train(state, 1.0)

# A bad step in shard_map, where the devices decide together and the worst is named: the device of row 5.
joined = optax.chain(stablenum_jax.guard(clip=stablenum.AdaGC(), axis_name="x"), optax.adamw(1e-2))
specs = jax.tree.map(lambda x: P("x") if x.shape == (8, 8) else P(), state)


def train_joined(state, grads):
    params, opt_state = stablenum_jax.step(joined, state["params"], state["opt_state"], grads)
    return {"params": params, "opt_state": opt_state}


bad = {"w": jax.device_put(jnp.ones((8, 8)).at[5, 2].set(jnp.nan), NamedSharding(one, P("x")))}
state = jax.jit(
    jax.shard_map(train_joined, mesh=one, in_specs=(specs, specs["params"]), out_specs=specs)
)(state, bad)
worst = stablenum_jax.metrics(state["opt_state"])
assert (worst["worst_rank"], worst["worst"].name, worst["applied"]) == (5, "w", False), worst
state = train(state, 2.0)
with ocp.CheckpointManager(sys.argv[1]) as manager:
    manager.save(0, args=GuardedSave(state))
    manager.wait_until_finished()
    like = laid_out(two, P("b", "a"))
    is_guard = lambda x: isinstance(x, stablenum_jax.typing.GuardOptState)
    to_shape = lambda x: x if is_guard(x) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    for template in (like, jax.tree.map(to_shape, like, is_leaf=is_guard)):
        found = manager.restore(0, args=GuardedRestore(template))
        assert stablenum_jax.history(found)[1]["worst_rank"] == 5
        for new, old, saved in zip(*map(jax.tree.leaves, (found, like, state)), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, new.ndim), (new.sharding, old.sharding)
            np.testing.assert_array_equal(new, saved)
alone = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
for scale in (jnp.nan, 1.0):
    found, alone = train(found, scale), train(alone, scale)
np.testing.assert_allclose(found["params"]["w"], alone["params"]["w"], rtol=1e-6)
decided = [[(r["applied"], r["reason"]) for r in stablenum_jax.history(s)] for s in (found, alone)]
assert decided[0] == decided[1] and len(decided[0]) == 5, decided
"""

UNCOMMITTED = """
import sys
import jax, jax.numpy as jnp, optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
import stablenum_jax
from stablenum_jax.integrations.orbax import GuardedRestore, GuardedSave

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))}
tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
first = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(0)}
as_shapes = jax.tree.map(
    lambda x: x if stablenum_jax.typing.GuardOptState is type(x)
    else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    first, is_leaf=lambda x: type(x) is stablenum_jax.typing.GuardOptState)
assert not all(x.committed for x in jax.tree.leaves(first))  # the count of AdamW

with ocp.CheckpointManager(sys.argv[1]) as manager:
    manager.save(0, args=GuardedSave(first))
    manager.wait_until_finished()
    for like in (first, as_shapes):
        found = manager.restore(0, args=GuardedRestore(like))
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(first), strict=True):
            assert new.committed == old.committed, (new, old)
        stablenum_jax.step(tx, found["params"], found["opt_state"], found["params"])
"""


@pytest.mark.parametrize("program", [MESHES, UNCOMMITTED], ids=["another mesh", "uncommitted"])
def test_a_state_saved_on_a_mesh_loads_onto_a_mesh(tmp_path: Path, program: str) -> None:
    flags = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
    command = [sys.executable, "-c", flags + program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_wrong_items_and_checkpoints_are_named(tmp_path: Path) -> None:
    tx = optimizer()
    for kind in (GuardedSave, GuardedRestore):
        with pytest.raises(ValueError, match=r"item must hold exactly one guard's state; got none"):
            kind(make_params())
        with pytest.raises(ValueError, match=r"item must hold exactly one guard's state; got 2"):
            kind([tx.init(make_params()), tx.init(make_params())])
    with pytest.raises(ValueError, match="item must hold the guard's own arrays"):
        GuardedRestore(jax.eval_shape(lambda: started(tx)))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(started(tx)))
    wrong = pytest.raises(ValueError, match=r"must be written by GuardedSave; it has no guard\.json")
    with ocp.CheckpointManager(tmp_path) as manager, wrong:
        manager.restore(0, args=GuardedRestore(started(tx)))


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


DAMAGE = {
    "truncated": (_truncated, r"must be JSON, as GuardedSave writes it; got .*: restore another step"),
    "not text": (lambda file: file.write_bytes(b"\xff\xfe\xff"), r"must be JSON"),
    "another dict": (lambda file: file.write_text("{}"), r"guard state must be a dict written by"),
    "missing": (Path.unlink, r"it has no guard\.json\. .* the file was lost"),
}


def saved(tmp_path: Path, layout: str) -> tuple[Path, Path]:
    """A checkpoint and its guard's file: a step of one item, a part of a step, or an item alone."""
    args = GuardedSave(started(optimizer(**RULES)))
    if layout == "alone":
        with ocp.Checkpointer(GuardedCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / "alone", args=args)
        return tmp_path / "alone", tmp_path / "alone" / "guard.json"
    part = layout == "part"
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(state=args) if part else args)
    return tmp_path / "0", tmp_path / "0" / ("state" if part else "default") / "guard.json"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_guard_is_named_on_restoring(tmp_path: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    _, file = saved(tmp_path, "step")
    damage(file)
    like = started(optimizer(**RULES))
    wrong = pytest.raises(ValueError, match=words)
    with ocp.CheckpointManager(tmp_path) as manager, wrong as raised:
        manager.restore(0, args=GuardedRestore(like))
    assert str(file.parent) in str(raised.value)
    assert "guard.json" in str(raised.value)
    assert_same_bits(like, started(optimizer(**RULES)))


@pytest.mark.parametrize("layout", ["step", "part", "alone", "item of a step"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_the_check_of_a_checkpoint_names_a_damaged_guard(tmp_path: Path, kind: str, layout: str) -> None:
    path, file = saved(tmp_path, "step" if layout == "item of a step" else layout)
    path = file.parent if layout == "item of a step" else path
    (outcome,), _ = look_at(path)
    assert (outcome.exit_code, outcome.word) == (0, "good")
    DAMAGE[kind][0](file)
    (outcome,), _ = look_at(path)
    assert (outcome.exit_code, outcome.word) == (2, "corrupt")
    assert outcome.why.startswith(f"{file.parent.name}/guard.json is ")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("field", [("loss_scale", "scale"), ("spike", "debt")])
def test_the_check_of_a_checkpoint_names_a_field_that_is_not_finite(
    tmp_path: Path, field: tuple[str, str], value: str
) -> None:
    path, file = saved(tmp_path, "step")
    plain = json.loads(file.read_text())
    plain["state"][field[0]][field[1]] = value
    file.write_text(json.dumps(plain))
    (outcome,), _ = look_at(path)
    assert (outcome.exit_code, outcome.word) == (1, "poisoned")
    (poison,) = outcome.verdict.poison
    assert poison.name == f"default/guard.json: state.{'.'.join(field)}"
    (outcome,), _ = look_at(path, allow=["*guard.json*"])
    assert outcome.exit_code == 0


def test_the_check_of_a_checkpoint_lets_records_and_windows_be_not_finite(tmp_path: Path) -> None:
    path, file = saved(tmp_path, "step")
    plain = json.loads(file.read_text())
    plain["state"]["recorder"]["floats"][-1] = ["nan", "inf", 1.0, 1.0]
    plain["state"]["spike"]["loss"][0] = 2.0
    file.write_text(json.dumps(plain))
    (outcome,), _ = look_at(path)
    assert (outcome.exit_code, outcome.word) == (0, "good")


def test_what_to_save_and_to_restore_is_shown_in_one_line() -> None:
    state = started(optimizer())
    count = len(jax.tree.leaves(state))
    assert repr(GuardedSave(state)) == f"GuardedSave(arrays={count})"
    assert repr(GuardedRestore(state)) == f"GuardedRestore(arrays={count})"
