"""What a version wrote into its folder in ``saved/`` is read, and trainings go on as if not interrupted.

``python -m tests.test_saved`` writes the folder of this version, which stays as it is after the release.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.runlog.reading import read_run

SAVED = Path(__file__).with_name("saved")
SAVED_AT, END = 12, 18  # steps
CONFIG = stablenum.GuardConfig(
    clip=(stablenum.AdaGC(warmup_steps=3), stablenum.AutoClip(window=8)),
    loss_scale=stablenum.LogMaxLossScale(),
    spike=stablenum.SpikeGuard(window=16, min_samples=6),
)
RECOVERY = stablenum.RecoveryPolicy(every=6, keep=1, good_after=0, check_every=3)
SETTINGS = (CONFIG, RECOVERY, stablenum.Policy(compute="float16"), stablenum.DelayedScaling())
TX = optax.chain(stablenum_jax.guard(config=CONFIG), optax.adamw(0.1))


def batch(n: int) -> np.ndarray:
    x = np.random.default_rng(n).normal(size=(4, 3)).astype(np.float32)
    return np.full_like(x, np.nan) if n == 4 else x


def in_torch(log: Path | None = None) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    for p in model.parameters():
        torch.nn.init.ones_(p)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "opt": stablenum_torch.wrap(opt, CONFIG, names=model, log=log)}


def torch_step(model: Any, opt: Any, x: np.ndarray) -> None:
    opt.zero_grad()
    opt.backward(model(torch.from_numpy(x)).square().mean())
    opt.step()


def with_recovery(steps: int, folder: Path | None = None) -> dict[str, Any]:
    """A training that goes back once; it begins with the snapshot in the folder, if there is one."""
    state = in_torch()
    recovery = stablenum_torch.Recovery(**state, policy=RECOVERY, data=batch, folder=folder)
    recovery.resume()
    for x in recovery.batches(steps):
        torch_step(**state, x=x)
        if recovery.step == 8 and not recovery.events:
            recovery.report("smoke")
    return state


def in_jax() -> Any:
    params = {"weight": jnp.ones((2, 3)), "bias": jnp.ones(2)}
    return params, TX.init(params)


@jax.jit
def jax_step(state: Any, x: jax.Array) -> Any:
    params, opt_state = state
    loss_fn = lambda p: jnp.square(x @ p["weight"].T + p["bias"]).mean()  # noqa: E731
    loss, grads = stablenum_jax.value_and_grad(loss_fn, opt_state)(params)
    return stablenum_jax.step(TX, params, opt_state, grads, value=loss)


def run(state: Any, first: int, last: int) -> Any:
    for n in range(first, last):
        if isinstance(state, dict):
            torch_step(**state, x=batch(n))
        else:
            state = jax_step(state, batch(n))
    return state


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    of_torch, of_jax = run(in_torch(folder / "run.jsonl"), 0, SAVED_AT), run(in_jax(), 0, SAVED_AT)
    stablenum_torch.Checkpoints(folder / "torch").save(SAVED_AT, of_torch)
    stablenum_jax.Checkpoints(folder / "jax").save(SAVED_AT, of_jax)
    (folder / "guard.json").write_text(json.dumps(of_torch["opt"].guard_state_dict(), allow_nan=False))
    (folder / "objects.pickle").write_bytes(pickle.dumps((SETTINGS, of_torch, of_jax)))
    with_recovery(SAVED_AT, folder / "recovery")
    for lock in folder.rglob(".lock"):
        lock.unlink()


@pytest.fixture(params=sorted(SAVED.iterdir()), ids=lambda path: path.name)
def saved(request: pytest.FixtureRequest) -> Path:
    return request.param


def result(state: Any) -> tuple[list[stablenum.Reason], list[np.ndarray]]:
    if isinstance(state, dict):
        rows, weights = state["opt"].history(), [p.detach() for p in state["model"].parameters()]
    else:
        rows, weights = stablenum_jax.history(state), jax.tree.leaves(state[0])
    return [row["reason"] for row in rows], [np.asarray(w) for w in weights]


def assert_same(state: Any, other: Any) -> None:
    (reasons, weights), (expected, others) = result(state), result(other)
    assert reasons == expected
    for w, known in zip(weights, others, strict=True):
        # The saved steps were taken on another machine, whose kernels round otherwise: weights of 0.25 may be
        # some ulps apart, 2^-26 each.
        np.testing.assert_allclose(w, known, rtol=1e-6, atol=2**-22)


def test_checkpoints(saved):
    state = in_torch()
    assert stablenum_torch.Checkpoints(saved / "torch").load(state) == SAVED_AT
    assert_same(run(state, SAVED_AT, END), run(in_torch(), 0, END))
    step, state = stablenum_jax.Checkpoints(saved / "jax").load(in_jax())
    assert step == SAVED_AT
    assert_same(run(state, SAVED_AT, END), run(in_jax(), 0, END))


def test_pickles(saved):
    settings, of_torch, of_jax = pickle.loads((saved / "objects.pickle").read_bytes())
    assert settings == SETTINGS
    assert_same(run(of_torch, SAVED_AT, END), run(in_torch(), 0, END))
    assert_same(run(of_jax, SAVED_AT, END), run(in_jax(), 0, END))


def test_a_guards_state(saved):
    plain = json.loads((saved / "guard.json").read_text("utf-8"))
    opt = in_torch()["opt"]
    opt.load_guard_state_dict(plain)
    assert opt.guard_state_dict()["state"] == plain["state"]


def test_a_snapshot(saved, tmp_path):
    shutil.copytree(saved / "recovery", tmp_path, dirs_exist_ok=True)
    assert_same(with_recovery(END, tmp_path), with_recovery(END))


def test_a_log(saved):
    found = read_run(saved / "run.jsonl")
    assert stablenum.GuardConfig.from_dict(found.header["settings"]) == CONFIG
    assert (len(found.steps), found.unreadable) == (SAVED_AT, 0)


if __name__ == "__main__":
    write(SAVED / stablenum.__version__)
