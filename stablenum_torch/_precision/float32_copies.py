"""An optimizer that runs another one on float32 copies of narrow parameters.

From the outside it is an ordinary optimizer of the model's own parameters. The inner optimizer never sees a
narrow number: gradients are widened for it, its state is float32, and a factor on the gradients (of a loss
scale or a clip rule) is applied to the widened gradients, where it cannot flush them to zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.interrupts import and_restore, and_then
from stablenum._support.settings_checks import check_callable
from stablenum.errors import bad_type
from stablenum_torch._devices.uncompiled import uncompiled
from stablenum_torch._step.checks import check_state_dict, state_dict_of

__all__ = ["Float32CopyOptimizer", "is_narrow"]

NARROW = (torch.bfloat16, torch.float16)


def is_narrow(p: Tensor) -> bool:
    """Return whether the parameter has a 16-bit format."""
    return p.dtype in NARROW


class Float32CopyOptimizer(Optimizer):
    """The common part of :class:`MasterWeights`, :class:`KahanUpdate` and :class:`StochasticRounding`.

    Subclasses define which value a float32 copy has before a step (:meth:`_fill`), and how the parameter is
    updated from the copy afterwards (:meth:`_write_back`). A parameter that is not narrow has no copy: the
    inner optimizer updates the parameter itself.

    Args:
        params: what any optimizer takes: parameters, (name, parameter) pairs, or groups.
        make: makes the inner optimizer from groups, such as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``.
    """

    inner: Optimizer
    _copies: dict[Tensor, Tensor]
    _kept: dict[Tensor, Tensor | None]

    _allowed: tuple[torch.dtype, ...] = NARROW
    # The name in a state dict of what is stored for each narrow parameter.
    _kept_name: str | None = None

    def __init__(
        self, params: Iterable[Any] | Mapping[str, Tensor], make: Callable[[list[dict[str, Any]]], Optimizer]
    ) -> None:
        if not callable(make):
            raise TypeError(
                f"make must be a function that makes an optimizer from groups; got {type(make).__name__}. "
                f"Example: {type(self).__name__}(model.parameters(), lambda p: torch.optim.AdamW(p))."
            )
        if not isinstance(params, Iterable):
            raise bad_type("params", "parameters, (name, parameter) pairs or groups", params)
        self._copies, self._kept = {}, {}
        super().__init__(list(params.items()) if isinstance(params, Mapping) else params, {})
        inner = make([self._copied_group(group) for group in self.param_groups])
        if not isinstance(inner, Optimizer) or isinstance(inner, Float32CopyOptimizer):
            raise TypeError(f"make must return a torch.optim.Optimizer; got {type(inner).__name__}.")
        self.inner = inner
        self.defaults = inner.defaults
        self._pull_settings()
        self._release(list(self._copies))

    # --- the subclass's part -------------------------------------------------------------------

    def _new_kept(self, p: Tensor) -> Tensor | None:
        """Return the initial value of what is stored for a parameter, if anything."""
        return None

    def _fill(self, p: Tensor, wide: Tensor) -> None:
        """Write into ``wide``, the copy of ``p``, the value from which the inner optimizer starts."""
        raise NotImplementedError  # pragma: no cover

    def _write_back(self, p: Tensor, wide: Tensor) -> None:
        """Update ``p`` from ``wide``, its copy, which the inner optimizer has moved."""
        raise NotImplementedError  # pragma: no cover

    def _release(self, params: Sequence[Tensor]) -> None:
        """Free the memory of the copies of ``params`` if it is not needed until the next step."""

    def wide_value(self, p: Tensor) -> Tensor:
        """Return the parameter's value in float32, as exactly as it is known."""
        return self._copies[p].detach()

    # --- groups --------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer and to the inner one.

        Raises:
            ValueError: a parameter has a format that this optimizer does not support.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if is_narrow(p) and p.dtype not in self._allowed:
                self.param_groups.pop()
                allowed = " or ".join(str(d).removeprefix("torch.") for d in self._allowed)
                raise ValueError(
                    f"params must be {allowed} for {type(self).__name__} (or float32, which is updated as "
                    f"usual); got {p.dtype}."
                )
        for p in group["params"]:
            # The copy has values from the start, because some optimizers create their state from it at once.
            self._copies[p] = p.detach().float() if is_narrow(p) else p
            if is_narrow(p):
                self._kept[p] = self._new_kept(p)
        if "inner" in self.__dict__:
            self.inner.add_param_group(self._copied_group(group))
            self._pull_settings()
            self._release(group["params"])

    def _copied_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        made = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        copies = [self._copies[p] for p in group["params"]]
        names = group.get("param_names")
        return made | {"params": list(zip(names, copies, strict=True)) if names else copies}

    def _push_settings(self) -> None:
        """Pass on what schedulers have set here, such as learning rates."""
        for mine, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            its.update({k: v for k, v in mine.items() if k not in ("params", "param_names")})

    def _pull_settings(self) -> None:
        for mine, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({k: v for k, v in its.items() if k not in ("params", "param_names")})

    # --- the step ------------------------------------------------------------------------------

    def _moving(self) -> list[Tensor]:
        """Return the narrow parameters with a gradient."""
        return [p for g in self.param_groups for p in g["params"] if is_narrow(p) and p.grad is not None]

    @torch.no_grad()
    def wide_gradients(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the next step, which may be changed in place; float32 if widened."""
        found: list[Tensor | None] = []
        for p in params:
            wide = self._copies[p]
            if wide is not p and p.grad is not None:
                if wide.shape != p.shape:
                    wide.data = torch.empty_like(p, dtype=torch.float32)
                wide.grad = p.grad.float()
            found.append(wide.grad)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer on the copies, then update the parameters from them.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients enabled.
        """
        result = None
        if closure is not None:
            check_callable("closure", closure, "a function that returns the loss, or None")
            with torch.enable_grad():
                result = closure()
        moving = self._moving()
        self._push_settings()
        and_restore(functools.partial(self._move, moving), functools.partial(self._forget, moving))
        self._pull_settings()
        return result

    def _move(self, params: Sequence[Tensor]) -> None:
        """Step the copies and write them back; an interrupt after the inner step does not part the two."""
        for p in params:
            if self._copies[p].grad is None:
                self.wide_gradients([p])
            self._fill(p, self._copies[p])
        left = list(reversed(params))

        def write_back() -> None:
            while left:
                self._write_back(left[-1], self._copies[left[-1]])
                left.pop()

        self._step_inner(write_back)

    def _forget(self, params: Sequence[Tensor]) -> None:
        for p in params:
            self._copies[p].grad = None
        self._release(params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including the widened ones."""
        super().zero_grad(set_to_none=set_to_none)
        for p, wide in self._copies.items():
            if wide is not p:
                wide.grad = None

    def _step_inner(self, then: Callable[[], None]) -> None:
        """Step the inner optimizer and call ``then``, whatever comes between."""
        and_then(self.inner.step, then)

    # --- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The inner optimizer's state per parameter, and what is stored here; a new dict for each read."""
        if "inner" not in self.__dict__:
            return self.__dict__.setdefault("_no_state", {})
        found = {}
        for p, wide in self._copies.items():
            kept = self._kept.get(p)
            more = {} if kept is None or self._kept_name is None else {self._kept_name: kept}
            found[p] = {**self.inner.state.get(wide, {}), **more}
        return found

    @state.setter
    def state(self, state: Any) -> None:
        if state:
            raise AttributeError(f"the state of {type(self).__name__} can only be set by load_state_dict.")

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like any optimizer's, which also has what is stored per narrow parameter."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._push_settings()
        saved = self.inner.state_dict()
        each = {index: dict(values) for index, values in saved["state"].items()}
        for index, p in self._numbered():
            if self._kept_name is not None and self._kept.get(p) is not None:
                each.setdefault(index, {})[self._kept_name] = self._saved_kept(p)
        saved = {**saved, "state": each, **self._saved_more()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    @uncompiled
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` wrote, or the state dict of a plain optimizer like the inner one.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            ValueError: it is not that of an optimizer, or the number of parameters differs, or the shape of
                what is stored for one of them.
        """
        state = state_dict_of(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state)
            state = state if replaced is None else dict(replaced)
        check_state_dict(state)
        each = {index: dict(values) for index, values in state["state"].items()}
        kept: dict[Tensor, Tensor | None] = {}
        # Matched by order, as in torch, because distributed checkpoints have names where others have numbers.
        indices = [index for group in state["param_groups"] for index in group["params"]]
        if len(indices) != len(self._copies):
            raise ValueError(
                f"state_dict must have {len(self._copies)} parameters, "
                f"as many as this optimizer; got {len(indices)}."
            )
        for index, (_, p) in zip(indices, self._numbered(), strict=True):
            found = each.get(index, {}).pop(self._kept_name, None)
            if found is not None and is_narrow(p) and found.shape != p.shape:
                raise ValueError(
                    f"state_dict['state'][{index!r}]['{self._kept_name}'] must have shape {tuple(p.shape)}; "
                    f"got {tuple(found.shape)}."
                )
            kept[p] = found
        each = {index: values for index, values in each.items() if values}
        self.inner.load_state_dict({"state": each, "param_groups": state["param_groups"]})
        for p in self._kept:
            self._load_kept(p, kept[p])
        self._load_more(state)
        self._pull_settings()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _saved_kept(self, p: Tensor) -> Tensor | None:
        """Return what is stored for ``p``, in the form of a state dict."""
        return self._kept[p]

    def _load_kept(self, p: Tensor, found: Tensor | None) -> None:
        """Continue with ``found``, which was saved for ``p``; if it is None, start afresh."""
        fresh = self._new_kept(p)
        if fresh is not None and found is not None:
            fresh.copy_(found)
        self._kept[p] = fresh

    def _saved_more(self) -> dict[str, Any]:
        return {}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        pass

    def _numbered(self) -> list[tuple[int, Tensor]]:
        """Return the parameters with their numbers in a state dict."""
        return list(enumerate(p for group in self.param_groups for p in group["params"]))

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "defaults", "param_groups", "_kept", "_copies")  # they are a file format
        return {name: self.__dict__[name] for name in names}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"
