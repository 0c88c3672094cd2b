"""The checks that a recovery makes of its arguments before it changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stablenum.errors import bad_type
from stablenum_torch._recovery.modules import inside, tensors_of
from stablenum_torch._recovery.optimizers import parameters_of
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["check_guarded", "check_same_model", "named_states"]


def check_guarded(opt: object) -> None:
    """Check the argument ``opt``.

    Raises:
        TypeError: it is not a guarded optimizer.
    """
    if not isinstance(opt, GuardedOptimizer):
        hint = "Wrap it: opt = stablenum_torch.wrap(optimizer, names=model)."
        hint = hint if isinstance(opt, Optimizer) else ""
        raise bad_type("opt", "the guarded optimizer that stablenum_torch.wrap returns", opt, hint=hint)


def check_same_model(model: nn.Module, opt: GuardedOptimizer) -> None:
    """Check that the optimizer trains the model.

    Raises:
        ValueError: it has none of its parameters.
    """
    known = {id(t) for t in tensors_of(inside(model)).values()}
    if not any(id(p) in known for p in parameters_of(opt)):
        raise ValueError(
            "opt must train the model; got an optimizer that has none of its parameters (those of a copy, or "
            "of the model before it was moved or sharded?)."
        )


def named_states(scheduler: Any, extra: Any) -> dict[str, Any]:
    """Return schedulers and what else has a state, by name.

    Raises:
        TypeError: something has no state that can be put back, or ``extra`` is not a mapping.
    """
    listed = scheduler if isinstance(scheduler, list | tuple) else () if scheduler is None else (scheduler,)
    if extra is not None and (
        not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra)
    ):
        raise bad_type("extra", "a mapping of name to object, or None", extra)
    found = {f"schedulers.{i}": one for i, one in enumerate(listed)}
    for one in listed:
        if not _has_state(one):
            raise bad_type("scheduler", "a learning-rate scheduler, several in a list, or None", one)
    for name, thing in (extra or {}).items():
        if not _has_state(thing) and not isinstance(thing, torch.Generator):
            raise bad_type(
                f"extra[{name!r}]",
                "an object with state_dict and load_state_dict, or a torch.Generator",
                thing,
            )
        found[f"extra.{name}"] = thing
    return found


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
