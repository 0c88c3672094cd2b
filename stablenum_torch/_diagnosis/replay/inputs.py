"""Find what a step works on: modules, optimizers and tensors among its arguments, closure and globals."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stablenum_torch._step.parameters import names_of

__all__ = ["Surroundings", "look_around"]

_MOST_ITEMS = 256
_MOST_OBJECTS = 10_000
_DEEPEST = 6


@dataclass(slots=True)
class Surroundings:
    """The objects that were found, with names.

    Attributes:
        model: the only module; None if there are several or none.
        modules: the modules by name.
        optimizers: the optimizers, in the order in which they were found.
        others: schedulers and scalers, whose attributes a step changes.
        parameters, buffers: the parameters and the buffers by name.
        names: id of a tensor -> (role, name).
        held: tensors that are kept alive, so that those ids stay valid.
    """

    model: nn.Module | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    names: dict[int, tuple[str, str]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)

    @property
    def scalers(self) -> list[torch.amp.GradScaler]:
        """The scalers that are enabled."""
        return [x for x in self.others if isinstance(x, torch.amp.GradScaler) and x.is_enabled()]

    @property
    def objects(self) -> list[Any]:
        """All objects whose attributes a step may change."""
        return [*self.modules.values(), *self.optimizers, *self.others]


def look_around(
    step_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    model: nn.Module | None,
    optimizer: Optimizer | None,
) -> Surroundings:
    """Search the arguments, the function's closure, and the globals that its code names."""
    found = Surroundings()
    tensors: dict[int, tuple[str, Tensor]] = {}
    if model is not None:
        found.modules[""] = model
    if optimizer is not None:
        found.optimizers.append(optimizer)
    for name, obj in _reachable(step_fn, args, kwargs):
        if isinstance(obj, nn.Module):
            _add_module(found.modules, name, obj)
        elif isinstance(obj, Optimizer):
            if all(obj is not o for o in found.optimizers):
                found.optimizers.append(obj)
        elif isinstance(obj, Tensor):
            tensors.setdefault(id(obj), (name, obj))
        else:
            found.others.append(obj)
    found.others += [x for x in _in_hooks(found.optimizers) if all(x is not known for known in found.others)]
    if len(found.modules) == 1:
        (found.model,) = found.modules.values()
    _name_parameters(found, {key: name for key, (name, _) in tensors.items()})
    for name, tensor in tensors.values():
        role = "parameter" if tensor.requires_grad and tensor.is_leaf else "input"
        found.names.setdefault(id(tensor), (role, name))
        found.held.append(tensor)
        if role == "parameter" and all(tensor is not p for p in found.parameters.values()):
            found.parameters[name] = tensor
    return found


def _in_hooks(optimizers: Sequence[Optimizer]) -> Iterator[Any]:
    """Return the schedulers and scalers that hooks of optimizers step. torch has no public name for hooks."""
    for optimizer in optimizers:
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            for hook in getattr(optimizer, kind, {}).values():
                for _, obj in _reachable(hook, (), {}):
                    if not isinstance(obj, Tensor | nn.Module | Optimizer):
                        yield obj


def _add_module(modules: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    """Add a module that is not a part of another one, in the place of its own parts. The model, named "",
    stays."""
    if any(_contains(m, module) for m in modules.values()):
        return
    for part in [n for n, m in modules.items() if n and _contains(module, m)]:
        del modules[part]
    modules[name] = module


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(m is inner for m in outer.modules())


def _name_parameters(found: Surroundings, variables: Mapping[int, str]) -> None:
    """Name parameters after modules, else as optimizers name them, else after the user's variables."""
    single = len(found.modules) == 1
    for prefix, module in found.modules.items():
        start = "" if single or not prefix else f"{prefix}."
        for role, into, named in (
            ("parameter", found.parameters, module.named_parameters()),
            ("buffer", found.buffers, module.named_buffers()),
        ):
            for path, tensor in named:
                name = start + ".".join(p for p in path.split(".") if p != "_orig_mod")
                into[name] = tensor
                found.names.setdefault(id(tensor), (role, name))
    for optimizer in found.optimizers:
        for name, p in _parameters_of(optimizer):
            if name.startswith("param_groups["):
                name = variables.get(id(p), name)
            if id(p) not in found.names:
                found.names[id(p)] = ("parameter", name)
                found.parameters[name] = p
            known = found.names[id(p)][1]
            state = optimizer.state.get(p, {})
            for key, x in state.items() if isinstance(state, dict) else ():
                if isinstance(x, Tensor):
                    found.names.setdefault(id(x), ("state", f"{key} of {known}"))
                    found.held.append(x)


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    known = getattr(optimizer, "parameter_names", None)  # of a guarded optimizer
    names = known() if callable(known) else names_of(optimizer, {})
    yield from zip(names, (p for group in optimizer.param_groups for p in group["params"]))


def _reachable(
    step_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Return all reachable objects, breadth first, so that near ones are found and named first."""
    seen: set[int] = set()
    todo = deque((name, obj, 0) for name, obj in [*_arguments(step_fn, args, kwargs), ("", step_fn)])
    while todo and len(seen) < _MOST_OBJECTS:
        name, obj, depth = todo.popleft()
        if id(obj) in seen or isinstance(obj, ModuleType | type | str | bytes | int | float):
            continue
        seen.add(id(obj))
        if isinstance(obj, Tensor | nn.Module | Optimizer | torch.amp.GradScaler | LRScheduler):
            yield name, obj
        elif depth < _DEEPEST and len(todo) < _MOST_OBJECTS:
            todo.extend((inner, x, depth + 1) for inner, x in _inside(name, obj))


def _arguments(
    step_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    try:
        bound = inspect.signature(step_fn).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]
    return list(bound.arguments.items())


def _inside(name: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """Return the contents of an object. The only mappings searched are dicts: others may read files."""
    if isinstance(obj, functools.partial):
        yield from ((name, part) for part in (obj.func, obj.args, obj.keywords))
    elif isinstance(obj, MethodType):
        yield from ((name, part) for part in (obj.__self__, obj.__func__))
    elif isinstance(obj, FunctionType):
        yield from _named_by(obj)
    elif isinstance(obj, dict | UserDict):
        yield from ((f"{name}[{key!r}]", x) for key, x in list(obj.items())[:_MOST_ITEMS])
    elif isinstance(obj, list | tuple):
        yield from ((f"{name}[{i}]", x) for i, x in enumerate(obj[:_MOST_ITEMS]))
    elif type(obj).__module__ not in ("builtins", "numpy") and hasattr(obj, "__dict__"):
        inside = list(vars(obj).items())[:_MOST_ITEMS]
        yield from ((f"{name}.{key}" if name else key, x) for key, x in inside)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the objects that a function's code names: closure cells, globals, defaults."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell: not assigned yet
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    names = code.co_varnames[: code.co_argcount]
    yield from zip(reversed(names), reversed(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
