"""Edge cases, each of which was once a bug."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
from stablenum import init_guard
from stablenum_jax._step.apply import negative_zeros
from stablenum_jax._step.observe import Watched, judge
from tests.jax.helpers import assert_same_bits


def run(tx, grads, params=None):
    params = {"w": jnp.ones(2)} if params is None else params
    state = tx.init(params)
    seen = []
    for g in grads:
        params, state = sj.step(tx, params, state, {"w": g})
        seen.append(sj.metrics(state)["applied"])
    return params, state, seen


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(jnp.float16, [30000.0] * 4 + [1.0] * 8), (jnp.float32, [3e38, 3e38, 3e38] + [1.0] * 9)],
)
def test_a_window_whose_sum_overflows_is_dropped_and_the_next_one_is_applied(dtype, values):
    k = 4 if dtype == jnp.float16 else 3
    inner = optax.chain(sj.guard(), optax.sgd(0.1))
    tx = optax.MultiSteps(inner, k, use_grad_mean=False).gradient_transformation()
    params = {"w": jnp.ones(2, dtype)}
    params, state, _ = run(tx, [jnp.full(2, v, dtype) for v in values], params)
    assert sj.metrics(state)["skipped_total"] == 1
    assert sj.metrics(state)["applied"]
    assert bool(jnp.isfinite(params["w"]).all())
    assert bool((params["w"] < 1).all()), "later windows moved the parameters"


def test_a_guard_outside_multisteps_recovers_under_plain_update():
    tx = sj.guard(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for i in range(7):
        grads = {"w": jnp.full(2, jnp.nan if i == 1 else 1.0)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], 0.7, rtol=1e-6)


def test_a_state_whose_halt_was_cleared_can_be_donated():
    tx = optax.chain(sj.guard(on_nonfinite="raise"), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    state = sj.clear_halt(tx.init(params))
    step = jax.jit(lambda p, s, g: sj.step(tx, p, s, g), donate_argnums=(0, 1))
    params, state = step(params, state, {"w": jnp.ones(2)})
    np.testing.assert_allclose(params["w"], 0.9, rtol=1e-6)


def test_a_loss_scale_needs_a_guard_that_sees_everything():
    inner = {"g": optax.chain(sj.guard(loss_scale=1024.0), optax.sgd(0.1)), "o": optax.sgd(0.1)}
    tx = optax.multi_transform(inner, {"a": "g", "b": "o"})
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    with pytest.raises(ValueError, match="1 of them bypass it"):
        sj.step(tx, params, tx.init(params), {"a": jnp.ones(1), "b": jnp.ones(1)})


@pytest.mark.parametrize("jit", [False, True])
def test_flags_among_the_extra_arguments_stay_flags(jit):
    def update(updates, state, params=None, *, flag, **_):
        return jax.tree.map(lambda u: -u if flag else u, updates), state

    tx = optax.chain(sj.guard(), optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update))
    params = {"w": jnp.zeros(2)}
    state = tx.init(params)

    def step(p, s, g):
        return sj.step(tx, p, s, g, flag=True)

    params, _ = (jax.jit(step) if jit else step)(params, state, {"w": jnp.ones(2)})
    assert params["w"].tolist() == [-1.0, -1.0]


def test_gradients_of_integers_are_unchanged():
    tx = optax.chain(sj.guard(), optax.identity())  # most optimizers multiply, which float0 does not support
    params = {"w": jnp.ones(2), "n": jnp.asarray([3], jnp.int32)}
    state = tx.init(params)
    grads = {"w": jnp.ones(2), "n": np.zeros((1,), jax.dtypes.float0)}
    params, _ = sj.step(tx, params, state, grads)
    assert params["n"].tolist() == [3]
    assert params["w"].tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore::stablenum_jax.NotATrueSkipWarning")
@pytest.mark.parametrize("jitted", [False, True])
def test_a_plain_update_refuses_whole_numbers_for_the_gradients_of_real_parameters(jitted):
    """They would be applied as they are, unclipped."""
    tx = optax.chain(sj.guard(clip=1.0), optax.sgd(0.1))
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    update = jax.jit(tx.update) if jitted else tx.update
    with pytest.raises(TypeError, match=r"updates\['w'\] must hold floating-point numbers.*got int32"):
        update({"w": jnp.ones(3, jnp.int32)}, state, params)
    update({"w": jnp.ones(3)}, state, params)


def test_a_stacked_state_is_named_under_jit_too():
    tx = sj.guard(optax.sgd(0.1))
    states = jax.vmap(tx.init)({"w": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="single training run"):
        jax.jit(sj.metrics)(states)


def test_the_loss_of_a_plain_update_is_a_scalar():
    tx = optax.chain(sj.guard(), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    with (
        pytest.warns(sj.NotATrueSkipWarning),
        pytest.raises(ValueError, match="value must be the scalar loss"),
    ):
        tx.update(params, tx.init(params), params, value=jnp.ones(3))


def test_a_wrapped_optimizer_under_shard_map_and_on_explicit_meshes():
    """One device is enough: the types of the arrays differ, not their number."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    tx = sj.guard(optax.adam(0.1), clip=1.0)
    spec = jax.sharding.PartitionSpec("d")

    def step(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    with jax.set_mesh(mesh):
        place = jax.sharding.NamedSharding(mesh, spec)
        params, grads = (jax.device_put(jnp.full(8, v), place) for v in (1.0, 2.0))
        assert bool((jax.jit(step)(params, grads) < 1).all())
    sharded = sj.guard(optax.adam(0.1), axis_name="d", clip=1.0)

    def local(params, grads):
        updates, _ = sharded.update(grads, sharded.init(params), params)
        return optax.apply_updates(params, updates)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(8), jnp.ones(8))
    assert bool((out < 1).all())


@pytest.mark.parametrize(
    "grad",
    [jnp.ones(3), jnp.ones(2), jnp.full(2, jnp.nan), np.zeros(2, jax.dtypes.float0), np.zeros(3, int)],
    ids=["another shape", "the same", "not finite", "no numbers", "neither shape nor kind"],
)
def test_the_updates_of_a_skip_have_the_shape_of_the_optimizers_updates(grad):
    """The inner optimizer's updates may differ from the gradients in shape and dtype."""
    (zeros,) = jax.tree.leaves(negative_zeros({"w": jnp.ones(2)}, {"w": grad}))
    assert (zeros.shape, zeros.dtype) == ((2,), jnp.float32)
    assert not zeros.any()
    assert np.signbit(zeros).all()


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float32])
def test_a_skip_changes_neither_part_of_complex_parameters(dtype):
    """The gradients may be real, if the inner optimizer makes complex updates of them."""
    params = {"w": jnp.asarray([complex(-0.0, -0.0), complex(1.0, 2.0)], jnp.complex64)}
    updates = negative_zeros(params, {"w": jnp.full(2, jnp.nan, dtype)})
    assert_same_bits(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize(("losses", "applied"), [([1.0, 4.0], True), ([1.0, np.nan], False)])
def test_over_a_mesh_axis_the_loss_is_the_mean_of_the_shards(losses, applied):
    config = stablenum.GuardConfig(clip=1.0)

    def local(grad, loss):
        state = init_guard(config, 1, xp=jnp)
        decision, after = judge(config, state, Watched((("w",),), (grad,)), loss=loss, axis_name="i")
        return decision.apply, decision.grad_norm, after.recorder.floats[-1]

    over_shards = jax.jit(jax.vmap(local, axis_name="i"))
    apply, norm, floats = over_shards(jnp.asarray([[3.0], [4.0]]), jnp.asarray(losses))
    assert apply.tolist() == [applied] * 2
    assert norm.tolist() == [5.0] * 2
    np.testing.assert_array_equal(floats[:, 0], np.full(2, np.mean(losses)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("clip", [1.0, stablenum.ClipByNorm(1.0)])
def test_over_a_mesh_axis_unscaled_gradients_are_judged_as_scaled_ones(clip, exact):
    """So it is in ``MultiSteps``, which has divided them by the scale."""
    config = stablenum.GuardConfig(clip=clip, loss_scale=1024.0, exact_norms=exact)

    def local(grad, axis_name, unscaled):
        state = init_guard(config, 1, xp=jnp)
        watched = Watched((("w",),), (grad,))
        seen = judge(config, state, watched, loss=None, axis_name=axis_name, unscaled=unscaled)
        return seen.decision.grad_norm, jnp.squeeze(seen.decision.multiplier)

    shards = jnp.asarray([[3.0], [4.0]])
    norm, multiplier = jax.jit(jax.vmap(lambda g: local(g, "i", True), axis_name="i"))(shards)
    np.testing.assert_allclose(norm, [5.0] * 2, rtol=1e-6)
    np.testing.assert_allclose(multiplier, [0.2] * 2, rtol=1e-6)
    norm, multiplier = jax.jit(lambda g: local(g, None, False))(1024 * shards)
    np.testing.assert_allclose([norm, multiplier], [5.0, 0.2 / 1024], rtol=1e-6)
