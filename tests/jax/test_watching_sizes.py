"""What the watch reads of arrays and trees at each call, and what it keeps from one call to the next."""

from __future__ import annotations

import gc
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum.diagnosis.watch.session import Session
from stablenum_jax._diagnosis.watch import magnitudes as kept
from stablenum_jax._diagnosis.watch.eager import places
from stablenum_jax._diagnosis.watch.results import floating_leaves, suspicion
from stablenum_jax._diagnosis.watch.sizes import sizes_of
from stablenum_jax._diagnosis.watch.trees import Tree
from tests.jax.watched import assert_healthy, found

FORMATS = ("float16", "bfloat16", "float32", "float8_e5m2")
SHAPES = ((1,), (), (3, 5), (kept._SMALL,), (kept._SMALL + 1,), (0, 2), (7, 300))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf], ids=str)
def test_magnitudes_are_exact_and_bad_where_a_number_is(dtype: str, bad: float | None) -> None:
    plain = np.linspace(-3, 2, 70, dtype=np.float32)
    plain[41] = plain[41] if bad is None else bad
    array = jnp.asarray(plain, dtype)
    for _ in range(2):  # read, then known
        (size,) = kept.magnitudes_of([array]).values()
        assert size == 3.0 if bad is None else not math.isfinite(size)
    flags = suspicion(Tree(array), Tree(()), derivative=True)
    assert bool(flags) == (bad is not None)
    assert bool(flags.nan) == (bad is not None and math.isnan(bad))


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf], ids=str)
def test_arrays_that_are_read_together_are_told_apart(bad: float | None) -> None:
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = []
        for i, dtype in enumerate((*FORMATS, "float64") * len(SHAPES)):
            plain = random.standard_normal(SHAPES[i % len(SHAPES)])
            if bad is not None and plain.size and i % 4 == 1:
                plain.flat[-1] = bad
            arrays.append(jnp.asarray(1e300 * plain if dtype == "float64" else plain, dtype))
        found = kept.magnitudes_of(arrays)
        expected = {
            i: float(np.abs(np.asarray(a).astype(np.float64)).max()) for i, a in enumerate(arrays) if a.size
        }
    assert list(found) == list(expected)
    assert all(math.isnan(found[i]) if math.isnan(size) else found[i] == size for i, size in expected.items())


def test_an_infinity_is_seen_beside_a_nan() -> None:
    both = jnp.array([math.nan, math.inf])
    seen = suspicion(Tree((both, jnp.array(1 + 1j), jnp.zeros((0, 2)), jnp.arange(3))), Tree(()))
    assert (seen.nan, seen.infinite) == ({0}, {0})
    assert suspicion(Tree(jnp.array(complex(0, math.nan))), Tree(())).nan == {0}


def test_arrays_that_are_gone_are_forgotten_and_their_ids_are_not_taken_for_others() -> None:
    for i in range(3 * kept._MANY):
        assert kept.magnitudes_of([np.ones(1), jnp.full(2, float(i))]) == {1: float(i)}
    gc.collect()
    assert len(kept._known.found) <= 2 * kept._MANY


def test_arguments_have_the_names_of_reports() -> None:
    tree = Tree((({"w": jnp.ones(2)}, 3, jnp.arange(2)), {"scale": jnp.full((), -4.0)}))
    expected = {"args[0]['w']": 1.0, "['scale']": 4.0}
    assert sizes_of(tree) == expected
    assert list(sizes_of(Tree(tree.value))) == list(expected)


def test_guards_are_told_from_other_states_of_the_same_shape() -> None:
    state = stablenum_jax.guard(optax.sgd(0.1)).init({"w": jnp.zeros(2)})
    plain = jax.tree.unflatten(jax.tree.structure(list(jax.tree.leaves(state))), jax.tree.leaves(state))
    for _ in range(2):
        assert Tree((state, jnp.ones(2))).guards
        assert [leaf.shape for _, leaf in floating_leaves(Tree((state, jnp.ones(2))))] == [(2,)]
        assert not Tree((plain, jnp.ones(2))).guards


@jax.tree_util.register_pytree_node_class
class Labelled:
    """A node whose label cannot be hashed."""

    def __init__(self, label: list[str], value: Any) -> None:
        self.label, self.value = label, value

    def tree_flatten(self) -> tuple[tuple[Any], list[str]]:
        return (self.value,), self.label

    @classmethod
    def tree_unflatten(cls, label: list[str], values: tuple[Any]) -> Labelled:
        return cls(label, *values)


def test_structures_that_cannot_be_hashed_are_watched(session: Session) -> None:
    for x in (2.0, 3.0):
        jax.grad(lambda n: n.value**2)(Labelled(["x"], jnp.array(x)))
    assert_healthy(session)
    assert list(sizes_of(Tree(((Labelled(["x"], jnp.ones(1)),), {}))).values()) == [1.0]


def test_the_first_bad_call_is_named_though_calls_follow(session: Session) -> None:
    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, g = jax.value_and_grad(lambda w: jnp.sqrt(w * x).sum())(w)
        return w - 1e-3 * g, loss

    def run() -> None:
        w, x = jnp.ones(3), jnp.ones(3)
        for i in range(8):
            w, _ = step(w, x.at[0].set(0.0) if i == 3 else x)

    found(session, run)
    assert session.outcome.failure is not None
    assert (session.outcome.failure.unit, session.outcome.failure.step) == ("call", 3)


def test_what_makes_no_array_is_not_watched() -> None:
    names = {name for owner, name in places() if owner is jnp}
    assert "sqrt" in names
    assert not names & {"issubdtype", "result_type", "shape", "ndim"}
