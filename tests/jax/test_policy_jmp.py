"""``stablenum_jax.policy`` in place of jmp: jmp's own tests, and jmp's defects."""

from __future__ import annotations

import importlib
import importlib.util
import unittest
from types import ModuleType

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import stablenum
import stablenum_jax
import stablenum_jax.policy as ours

# It requires that the floor is not a leaf, which is why jmp loses it under jit, where it becomes 1 again.
PINS_THE_LOST_FLOOR = "test_dynamic_loss_scale_tree"


def load(name: str) -> ModuleType:
    """jmp's installed test file, with our module where it imports jmp's."""
    spec = importlib.util.find_spec(f"jmp._src.{name}_test")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    package = importlib.import_module("jmp._src")  # jmp hides it as an attribute
    theirs = getattr(package, name)
    setattr(package, name, ours)
    try:
        spec.loader.exec_module(module)
    finally:
        setattr(package, name, theirs)
    assert module.jmp is ours
    return module


def jmps_tests() -> list[unittest.TestCase]:
    found = [unittest.defaultTestLoader.loadTestsFromModule(load(name)) for name in ("policy", "loss_scale")]
    return [test for suite in found for group in suite for test in group]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # in the arithmetic of jmp's tests
@pytest.mark.parametrize("case", jmps_tests(), ids=lambda case: str(case._testMethodName))
def test_jmps_own_tests_pass(case: unittest.TestCase) -> None:
    result = unittest.TestResult()
    case.run(result)
    problems = [text for _, text in result.errors + result.failures]
    if PINS_THE_LOST_FLOOR in case.id():
        assert len(problems) == 1
        assert "First list contains 1 additional elements" in problems[0]
        return
    assert not problems, problems[0]
    assert result.testsRun == 1
    assert not result.skipped


def test_the_names_are_jmps() -> None:
    assert set(jmp.__all__) <= set(ours.__all__)


def test_the_floor_survives_jit() -> None:
    def fall(scale):
        return jax.lax.fori_loop(0, 40, lambda _, s: s.adjust(jnp.bool_(False)), scale)

    floor = np.float32(8.0)
    start = ours.DynamicLossScale(jnp.float32(2.0**15), min_loss_scale=floor)
    assert float(jax.jit(fall)(start).loss_scale) == float(fall(start).loss_scale) == 8.0
    theirs = jmp.DynamicLossScale(jnp.float32(2.0**15), min_loss_scale=floor)
    assert float(jax.jit(fall)(theirs).loss_scale) == 1.0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_scale_of_any_dtype_moves_and_stays_finite(dtype) -> None:
    scale = ours.DynamicLossScale(dtype(2.0**14), period=1)
    assert float(scale.adjust(False).loss_scale) == 2.0**13
    scale = jax.jit(lambda s: jax.lax.fori_loop(0, 200, lambda _, s: s.adjust(jnp.bool_(True)), s))(scale)
    assert scale.loss_scale.dtype == dtype
    assert float(scale.loss_scale) == (2.0**15 if dtype == jnp.float16 else 2.0**100)


def test_the_scale_grows_although_its_counter_is_beyond_the_period() -> None:
    scale = ours.DynamicLossScale(jnp.float32(4.0), jnp.int32(7), period=5).adjust(True)
    assert (float(scale.loss_scale), int(scale.counter)) == (8.0, 0)


@pytest.mark.parametrize(
    ("dtype", "bad", "taken_for"),
    [
        (jnp.float32, jnp.nan, 1.0),
        (jnp.float32, -jnp.inf, 1.0),
        (jnp.float32, jnp.inf, 2.0**100),
        (jnp.float16, jnp.nan, 1.0),
        (jnp.float16, jnp.inf, 2.0**15),
    ],
)
def test_a_scale_that_is_not_finite_recovers(dtype, bad, taken_for) -> None:
    scale = ours.DynamicLossScale(dtype(bad))
    assert float(scale.adjust(True).loss_scale) == taken_for
    assert float(scale.adjust(False).loss_scale) == max(taken_for / 2, 1.0)


def test_losses_are_scaled_in_float32() -> None:
    tree = {"loss": jnp.float16(3.0), "n": jnp.arange(2), "key": jax.random.key(0), "none": None}
    for scale in (ours.StaticLossScale(2**15), ours.DynamicLossScale(jnp.float16(2**15))):
        scaled = scale.scale(tree)
        assert float(scaled["loss"]) == 98304.0
        assert scaled["key"] is tree["key"]
        assert scaled["n"].dtype == tree["n"].dtype
        assert float(scale.unscale(scaled)["loss"]) == 3.0
    assert np.isinf(jmp.StaticLossScale(2**15).scale(tree["loss"]))


def test_all_finite_and_select_ignore_leaves_that_are_not_numbers() -> None:
    tree = {"w": jnp.ones(2), "key": jax.random.key(1), "n": jnp.arange(3)}
    assert bool(ours.all_finite(tree))
    other = {"w": jnp.zeros(2), "key": jax.random.key(2), "n": jnp.arange(3) + 1}
    chosen = jax.jit(ours.select_tree)(jnp.bool_(False), tree, other)
    assert int(chosen["n"][0]) == 1
    assert (jax.random.key_data(chosen["key"]) == jax.random.key_data(other["key"])).all()


@pytest.mark.parametrize("module", [jmp, ours])
def test_the_guard_accepts_these_objects(module) -> None:
    dynamic = module.DynamicLossScale(jnp.float32(64.0), period=5, factor=4, min_loss_scale=np.float32(2.0))
    config = stablenum.GuardConfig(loss_scale=dynamic)
    assert config.loss_scale == stablenum.DynamicLossScale(
        init_scale=64.0, growth_interval=5, growth_factor=4.0, backoff_factor=0.25, min_scale=2.0
    )
    static = stablenum.GuardConfig(loss_scale=module.StaticLossScale(1024))
    assert static.loss_scale == stablenum.StaticLossScale(scale=1024.0)
    assert stablenum.GuardConfig(loss_scale=module.NoOpLossScale()).loss_scale is None
    high = stablenum.GuardConfig(loss_scale=module.DynamicLossScale(jnp.float32(2.0**30)))
    assert high.loss_scale.max_scale == 2.0**30
    with pytest.raises(ValueError, match=r"loss_scale.loss_scale must be a finite number"):
        stablenum.GuardConfig(loss_scale=module.StaticLossScale(jnp.inf))
    with pytest.raises(ValueError, match="Call the class to make a rule"):
        stablenum.GuardConfig(loss_scale=module.StaticLossScale)


def test_jmps_policies_are_accepted_wherever_ours_are() -> None:
    theirs = jmp.get_policy("p=f32,c=bf16,o=f32")
    policy = ours.as_policy(theirs)
    assert str(policy) == str(theirs)
    assert policy == ours.get_policy("p=f32,c=bf16,o=f32") == ours.as_policy("p=f32,c=bf16,o=f32")
    assert ours.as_policy(policy) is policy
    assert ours.as_policy(stablenum.Policy.parse("c=bf16,o=f32")) == policy
    for wrong in (jmp.Policy, 3, None):
        with pytest.raises(TypeError, match="policy must be a string such as"):
            ours.as_policy(wrong)
    with pytest.raises(ValueError, match="Unknown dtype or part"):
        ours.as_policy("c=int8")


def test_the_text_of_a_policy_shows_its_rules() -> None:
    policy = ours.get_policy("c=bf16", rules={"*norm*": "f32"})
    assert str(policy) == "p=full,c=bf16,o=bf16;*norm*:c=float32,o=float32"
    assert policy.at("a.norm").compute_dtype is jnp.float32
    assert stablenum_jax.policy.Policy is ours.Policy


@pytest.mark.parametrize("factor", [0, 1, 0.5, -2, float("nan")])
def test_a_factor_that_cannot_raise_the_scale_is_refused(factor: float) -> None:
    for module in (jmp, stablenum_jax.policy):
        with pytest.raises(ValueError, match=r"factor must be a finite number above 1; got"):
            stablenum_jax.guard(loss_scale=module.DynamicLossScale(jnp.float32(8.0), factor=factor))
    with pytest.raises(ValueError, match=r"factor must be a finite number above 1; got"):
        stablenum_jax.policy.DynamicLossScale(jnp.float32(8.0), factor=factor).adjust(True)
