"""What is saved and what is checked is judged by one rule: ``Checkpoints`` and ``stablenum verify`` agree."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum_jax
import stablenum_torch
from stablenum import AdaGC, PoisonedStateError
from stablenum.commands.verify.looking import look_at
from tests.core.saving import store_in

NAN, INF = math.nan, math.inf
MASK = torch.full((3, 3), -INF).triu(1)
# What is beside a model and an optimizer, and whether it is good.
BESIDE: list[tuple[dict[str, Any], bool]] = [
    ({"best": INF}, True),
    ({"best": torch.tensor(INF)}, True),
    ({"least_seen": torch.tensor(INF)}, True),
    ({"extra": {"best": torch.tensor([-INF]), "window": [INF, 1.0]}}, True),
    ({"last": NAN}, False),
    ({"best": torch.tensor(NAN)}, False),
    ({"extra": {"losses": [1.0, NAN]}}, False),
    ({"extra": {"losses": torch.tensor([1.0, INF])}}, False),
    ({"ema": {"scale": torch.tensor(INF)}}, False),
    ({"extra": {"mask": MASK}}, True),
    ({"extra": {"weight": MASK}}, False),
]


def saved(folder: Any, state: dict[str, Any]) -> bool:
    try:
        stablenum_torch.Checkpoints(folder / "own").save(1, state)
    except PoisonedStateError:
        return False
    return True


def outcome(path: Any) -> str:
    return look_at(path)[0][0].word


def agree(folder: Any, state: dict[str, Any], good: bool) -> None:
    """Both judge a state so, and what the first has saved is good to the second."""
    plain = {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in state.items()}
    torch.save(plain, folder / "other.pt")
    assert outcome(folder / "other.pt") == ("good" if good else "poisoned")
    assert saved(folder, state) == good
    if good:
        assert outcome(folder / "own" / "step-000000001") == "good"
        stablenum_torch.Checkpoints(folder / "own").load(state)


def training() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    opt = stablenum_torch.wrap(torch.optim.AdamW(model.parameters()), clip=AdaGC())
    opt.zero_grad()
    opt.backward(model(torch.ones(1, 3)).sum())
    opt.step()
    return {"model": model, "optimizer": opt}


@pytest.mark.parametrize(("beside", "good"), BESIDE)
def test_what_is_beside_a_model(tmp_path, beside, good):
    agree(tmp_path, training() | beside, good)


@pytest.mark.parametrize(
    ("setting", "value", "good"),
    [("lr", INF, False), ("lr", NAN, False), ("max_norm", INF, True), ("max_norm", NAN, False)],
)
@pytest.mark.parametrize("form", [float, torch.tensor])
def test_settings_of_an_optimizer(tmp_path, setting, value, good, form):
    state = training()
    state["optimizer"].param_groups[0][setting] = form(value)
    agree(tmp_path, state, good)


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_a_step_count(tmp_path, form):
    state = training()
    state["optimizer"].state[state["model"].weight]["step"] = form(INF)
    agree(tmp_path, state, False)


@pytest.mark.parametrize(
    ("state", "good"),
    [
        ({"best": jnp.asarray(INF)}, True),
        ({"best": np.float64(INF)}, True),
        ({"best": jnp.asarray(NAN)}, False),
        ({"extra": {"loss": jnp.asarray([INF])}}, True),
        ({"ema": {"scale": jnp.asarray(INF)}}, False),
        ({"opt_state": optax.inject_hyperparams(optax.sgd)(INF).init(jnp.ones(2))}, False),
    ],
)
def test_states_of_jax(tmp_path, state, good):
    state = {"params": {"w": jnp.ones(2)}} | state
    arrays: dict[str, Any] = {}
    for path, leaf in stablenum_jax_leaves(state):
        arrays[path] = np.asarray(leaf)
    np.savez(tmp_path / "other.npz", **arrays)
    assert outcome(tmp_path / "other.npz") == ("good" if good else "poisoned")
    checkpoints = stablenum_jax.Checkpoints(tmp_path / "own")
    if good:
        assert outcome(checkpoints.save(1, state)) == "good"
        checkpoints.load(state)
    else:
        with pytest.raises(PoisonedStateError):
            checkpoints.save(1, state)


def stablenum_jax_leaves(state: Any) -> list[tuple[str, Any]]:
    import jax

    found = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found]


def test_poison_of_one_rank_is_not_hidden_by_what_another_is_allowed(tmp_path):
    """Both ranks have an entry of one name; that of the last is a mask."""
    from stablenum.checkpoints.finiteness import NonFinite

    entries = [
        NonFinite("x.mask", "buffer", 1, 0, 0, 4, 2),
        NonFinite("x.mask", "buffer", 0, 0, 1, 4, 2, others_zero=True),
    ]

    class Two:
        rank = 0

        def gather(self, value: Any) -> list[Any]:
            return [[entry] for entry in entries] if value == [entries[0]] else [value, value]

    store = store_in(tmp_path)
    store.ranks = Two()
    store.codec.nonfinite = lambda state: [entries[0]]  # type: ignore[method-assign]
    with pytest.raises(PoisonedStateError, match=r"x\.mask \(1 NaN of 4\)"):
        store.save(1, {"x": [1.0]})
