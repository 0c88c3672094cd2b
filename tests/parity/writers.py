"""Programs that keep writing until they are killed, for readers in another process.

Run as ``FRAMEWORK KIND FOLDER KEEP``, where the kind is a format of checkpoints, ``snapshots`` or ``log``.
All that is written follows from its step.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stablenum import RecoveryPolicy

__all__ = ["checkpoints_of", "log_at", "recovery_of", "state_of", "step_of"]

ELEMENTS = 64  # of each array


def state_of(framework: str, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    if framework == "torch":
        import torch

        return {
            "w": torch.full((ELEMENTS, ELEMENTS), float(step)),
            "narrow": torch.full((ELEMENTS,), step % 7),
        }
    import jax.numpy as jnp

    return {"w": jnp.full((ELEMENTS, ELEMENTS), float(step)), "narrow": jnp.full(ELEMENTS, step % 7)}


def step_of(state: dict[str, Any]) -> int:
    """Return the step that a state follows from.

    Raises:
        AssertionError: it follows from none.
    """
    (step,) = set(state["w"].reshape(-1).tolist())
    assert set(state["narrow"].tolist()) == {step % 7}
    return int(step)


def checkpoints_of(framework: str, folder: Path, kind: str, keep: int) -> tuple[Any, Callable[[], int]]:
    """Return the checkpoints in a folder, and what loads one and returns the step of its state."""
    if framework == "torch":
        import stablenum_torch

        checkpoints = stablenum_torch.Checkpoints(folder, format=kind, keep=keep)  # type: ignore[arg-type]

        def load() -> int:
            state = state_of("torch", -1)
            assert checkpoints.load(state) == step_of(state)
            return step_of(state)

        return checkpoints, load
    import stablenum_jax

    others = stablenum_jax.Checkpoints(folder, format=kind, keep=keep)  # type: ignore[arg-type]

    def load_other() -> int:
        step, state = others.load(state_of("jax", -1))
        assert step == step_of(state)
        return step

    return others, load_other


def recovery_of(
    framework: str, folder: Path, keep: int
) -> tuple[Any, Callable[[], object], Callable[[], set[float]]]:
    """Return a recovery in a folder, what takes a step, which adds 1 to each weight, and what reads these."""
    policy = RecoveryPolicy(every=1, keep=keep, good_after=0, check_every=1)
    if framework == "torch":
        import torch

        import stablenum_torch

        weights = torch.nn.Parameter(torch.zeros(ELEMENTS))
        opt = stablenum_torch.wrap(torch.optim.SGD([weights], lr=1.0))
        model = torch.nn.ParameterList([weights])
        recovery: Any = stablenum_torch.Recovery(model, opt, policy, data=float, folder=folder)

        def step() -> None:
            opt.zero_grad()
            opt.backward(-weights.sum())
            opt.step()

        return recovery, step, lambda: set(weights.tolist())
    import jax
    import jax.numpy as jnp
    import optax

    import stablenum_jax

    tx = optax.chain(stablenum_jax.guard(), optax.sgd(-1.0))
    params = jnp.zeros(ELEMENTS)
    state = {"params": params, "opt_state": tx.init(params)}
    recovery = stablenum_jax.Recovery(state, policy, data=float, folder=folder)

    @jax.jit
    def one(state: Any) -> Any:
        params, opt_state = stablenum_jax.step(tx, state["params"], state["opt_state"], jnp.ones(ELEMENTS))
        return {"params": params, "opt_state": opt_state}

    def step_in_jax() -> None:
        recovery.state = one(recovery.state)

    return recovery, step_in_jax, lambda: set(recovery.state["params"].tolist())


def log_at(framework: str, path: Path) -> Callable[[int], object]:
    """Return what takes a step, whose loss is its number, and logs it into a file."""
    if framework == "torch":
        import torch

        import stablenum_torch

        weights = torch.nn.Parameter(torch.zeros(ELEMENTS))
        opt = stablenum_torch.wrap(torch.optim.SGD([weights], lr=1.0), log=path)

        def step(number: int) -> None:
            opt.zero_grad()
            opt.backward(0.0 * weights.sum() + float(number))
            opt.step()

        return step
    import jax
    import jax.numpy as jnp
    import optax

    import stablenum_jax

    tx = optax.chain(stablenum_jax.guard(), optax.sgd(1.0))
    params = jnp.zeros(ELEMENTS)
    state = [params, tx.init(params)]
    log = stablenum_jax.RunLog(path)

    @jax.jit
    def one(params: Any, opt_state: Any, loss: Any) -> Any:
        return stablenum_jax.step(tx, params, opt_state, jnp.zeros(ELEMENTS), value=loss)

    def step_in_jax(number: int) -> None:
        state[:] = one(*state, float(number))
        log(state[1], state[0])

    return step_in_jax


def main(framework: str, kind: str, folder: str, keep: str) -> None:
    place = Path(folder)
    if kind == "log":
        logged = log_at(framework, place / "run.jsonl")
        for number in itertools.count():
            logged(number)
    elif kind == "snapshots":
        recovery, step, _ = recovery_of(framework, place, int(keep))
        for _ in recovery.batches(10**9):
            step()
    else:
        checkpoints, _ = checkpoints_of(framework, place, kind, int(keep))
        for number in itertools.count():
            checkpoints.save(number, state_of(framework, number))


if __name__ == "__main__":
    main(*sys.argv[1:])
