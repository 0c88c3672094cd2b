"""The state of an optimizer, captured and put back in place.

``Optimizer.load_state_dict`` makes new tensors, and casts moments to the format of their parameter. Here the
tensors stay the same ones, in their own formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stablenum_torch._devices.ranks import is_dtensor, local_part
from stablenum_torch._recovery.modules import write
from stablenum_torch._recovery.trees import brought_back, copied_tree

__all__ = ["OptimizerPart", "parameters_of"]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters, in the order of the groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class OptimizerPart:
    """An optimizer without a guard, as a part of the state of a run.

    Args:
        optimizer: the optimizer.
        elsewhere: tensors that another part captures.
    """

    def __init__(self, optimizer: Optimizer, elsewhere: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self.optimizer, self._elsewhere = optimizer, elsewhere
        cls = type(optimizer)
        # Those that compute their state dict from more than torch's two attributes know best how to load it.
        self._own = (
            cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict
        ) and not _is_redundant(optimizer)

    def capture(self, copied: Callable[[Tensor], Tensor], *, moved: Callable[[Tensor], Tensor]) -> Any:
        """Return plain values and copies; see :meth:`ModulePart.capture`."""
        others = {id(t) for t in self._elsewhere()}
        params = {
            str(i): moved(local_part(p))
            for i, p in enumerate(parameters_of(self.optimizer))
            if id(p) not in others
        }
        kept = {"params": params, "sizes": self._sizes()}
        if self._own:
            return kept | {"own": copied_tree(self.optimizer.state_dict(), moved)}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        # A scheduler may write into the tensor of a learning rate.
        return kept | {"groups": copied_tree(groups, copied), "state": self._state(moved)}

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def check(self, kept: Mapping[str, Any]) -> None:
        """Check that the groups are those of the snapshot.

        Raises:
            RuntimeError: they are not.
        """
        if self._sizes() != kept["sizes"]:
            raise RuntimeError(
                "opt must have the same parameters in the same groups as when the snapshot was taken; it had "
                f"{kept['sizes']} of them, and has {self._sizes()}."
            )

    def _state(self, moved: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        numbers = {p: i for i, p in enumerate(parameters_of(self.optimizer))}
        return {
            str(numbers[key]) if isinstance(key, Tensor) else f"key {key}": {
                name: _Entry.of(value, key, moved) for name, value in entries.items()
            }
            for key, entries in _live_state(self.optimizer).items()
            if isinstance(entries, dict)
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Put back what :meth:`capture` returned, and :meth:`check` has checked."""
        params = parameters_of(self.optimizer)
        for number, values in kept["params"].items():
            write(params[int(number)], values)
        if self._own:
            self.optimizer.load_state_dict(brought_back(kept["own"], self.optimizer.state_dict()))
            return
        self._restore_groups(kept["groups"])
        self._restore_state(kept["state"])

    def _restore_groups(self, groups: list[dict[str, Any]]) -> None:
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in settings.items():
                now = group.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                    write(now, value)  # a compiled step reads the learning rate from this tensor
                else:
                    group[name] = brought_back(value, now)

    def _restore_state(self, kept: Mapping[str, Any]) -> None:
        live = _live_state(self.optimizer)
        keys = {str(i): p for i, p in enumerate(parameters_of(self.optimizer))}
        keys |= {f"key {key}": key for key in live if not isinstance(key, Tensor)}
        for written, key in keys.items():
            if written not in kept:
                live.pop(key, None)  # the state begins later
                continue
            entries, values = live.setdefault(key, {}), kept[written]
            for name in [name for name in entries if name not in values]:
                del entries[name]
            for name, value in values.items():
                _Entry.put(entries, name, value, key)


class _Entry:
    """One value of the state of a parameter, as plain values."""

    @staticmethod
    def of(value: Any, key: Any, moved: Callable[[Tensor], Tensor]) -> Any:
        if not isinstance(value, Tensor):
            return {"plain": copied_tree(value, moved)}
        with_parameter = isinstance(key, Tensor) and value.device == key.device
        kept = {"tensor": moved(local_part(value)), "with_parameter": with_parameter}
        return kept | {"sharded": is_dtensor(value)}

    @staticmethod
    def put(entries: dict[str, Any], name: str, kept: Mapping[str, Any], key: Any) -> None:
        now = entries.get(name)
        if "plain" in kept:
            entries[name] = brought_back(kept["plain"], now)
            return
        values = kept["tensor"]
        fits = isinstance(now, Tensor) and now.dtype == values.dtype and is_dtensor(now) == kept["sharded"]
        if fits and local_part(now).shape == values.shape:
            write(now, values)
        else:
            entries[name] = _made(values, key, with_parameter=kept["with_parameter"], sharded=kept["sharded"])


def _made(values: Tensor, key: Any, *, with_parameter: bool, sharded: bool) -> Tensor:
    """Return an entry that the optimizer does not have at present."""
    made = values.to(key.device if with_parameter else "cpu", copy=True)
    if not sharded:
        return made
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        made, key.device_mesh, key.placements, shape=key.shape, stride=key.stride(), run_check=False
    )


def _is_redundant(optimizer: Optimizer) -> bool:
    """Return whether this is a ``ZeroRedundancyOptimizer``, which steps an optimizer for its own part."""
    return isinstance(getattr(optimizer, "optim", None), Optimizer)


def _live_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the optimizer's own state, keyed by parameter."""
    return optimizer.optim.state if _is_redundant(optimizer) else optimizer.state
