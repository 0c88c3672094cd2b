"""``precision``: apply a policy to a model by hooks, with other formats for some modules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from stablenum._support.settings_checks import check_choice, check_flag
from stablenum.errors import bad_field
from stablenum.formats import FORMATS
from stablenum.precision.delayed_scaling import DelayedScaling
from stablenum.precision.policy import Policy, as_policy, wider
from stablenum_torch._devices.uncompiled import uncompiled
from stablenum_torch._precision.casts import (
    cast_floating,
    cast_module,
    dtype_of,
    running_statistics,
)
from stablenum_torch._precision.fp8 import EightBitProducts, offers_native_products
from stablenum_torch._step.checks import check_module

__all__ = ["PolicyHandle", "precision"]

_STATISTICS = "fp8"  # the name of an 8-bit layer's statistics among its submodules


def precision(
    model: nn.Module,
    policy: Policy | str | Any,
    *,
    how: Literal["casts", "autocast"] = "casts",
    forward_scaling: DelayedScaling | None = None,
    backward_scaling: DelayedScaling | None = None,
    native: bool | None = None,
) -> PolicyHandle:
    """Make a model store, compute and return numbers in the formats of a policy.

    - Parameters are cast in place to ``policy.params``, module by module; they stay the same objects. Make
      the optimizer afterwards. Buffers get the wider of their module's formats for parameters and computing.
      Running statistics of norms are not narrowed, nor are the weights of such a norm while it computes.
    - While a module computes, its parameters appear in its compute format (as with jmp's
      ``cast_to_compute``), and the inputs of a module with parameters are cast to that format. Gradients
      arrive in the parameters' own format.
    - The policy's output format applies to the whole model, that of a rule to the modules it matches. Values
      between modules stay in the compute format.
    - Integers, bools, complex numbers and objects that are not tensors stay as they are; nested tuples,
      mappings and dataclasses keep their structure.
    - With an 8-bit compute format, ``nn.Linear`` multiplies 8-bit numbers with delayed scaling (see
      :class:`stablenum.DelayedScaling`); everything else computes in bfloat16. The statistics of the scales
      are buffers under ``<layer>.fp8`` in the state dict; the other keys stay the same.

    Functions called between modules (a softmax) compute in the format of their inputs, as in JAX. In torch
    the product of two formats is an error: if a float32 module feeds a function that also reads bfloat16,
    give its output format in the module's rule too (``"compute=float32,output=bfloat16"``). With
    ``how="autocast"`` torch chooses by function instead: products in the compute format, softmax and norms in
    float32.

    Args:
        model: any module.
        policy: a :class:`stablenum.Policy`, its text form, or an object with jmp's three attributes.
        how: ``"casts"`` does what the JAX adapter does; with ``"autocast"``, parameters are cast by
            ``torch.autocast``, which is on in modules that compute in 16 bits and off in the others.
        forward_scaling: the rule for inputs and weights of 8-bit products, by default
            ``DelayedScaling(power_of_two=True)``.
        backward_scaling: the rule for their gradients, by default the same for ``"float8_e5m2"``.
        native: True multiplies 8-bit numbers with ``torch._scaled_mm``; False rounds to 8 bits and multiplies
            in 16 bits. By default the product is native where the model's device supports it.

    Returns:
        A handle. Its ``remove()`` undoes everything except the parameters' format, and so does leaving the
        handle as a context manager.

    Raises:
        TypeError: ``model`` is not a module, or ``policy`` is none of the above.
        ValueError: a format is unknown, a scaling has another format, a rule's pattern matches no module, or
            the model already has a policy.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> handle = precision(model, Policy.parse("p=f32,c=bf16,o=f32", rules={"1": "float32"}))
        >>> model(torch.ones(3, 4)).dtype, model[0](torch.ones(3, 4)).dtype, model[1](torch.ones(3, 4)).dtype
        (torch.float32, torch.bfloat16, torch.float32)
        >>> handle.remove()
        >>> model[0](torch.ones(3, 4)).dtype
        torch.float32
    """
    check_module("model", model)
    check_choice("how", how, ("casts", "autocast"))
    for name, given, wanted in (
        ("forward_scaling", forward_scaling, "float8_e4m3fn"),
        ("backward_scaling", backward_scaling, "float8_e5m2"),
    ):
        if given is not None and (not isinstance(given, DelayedScaling) or given.format != wanted):
            raise bad_field(name, f"None or a DelayedScaling(format={wanted!r})", given)
    if native is not None:
        check_flag("native", native)
    return PolicyHandle(
        model,
        as_policy(policy),
        how=how,
        scalings=(
            forward_scaling or DelayedScaling(power_of_two=True),
            backward_scaling or DelayedScaling(format="float8_e5m2", power_of_two=True),
        ),
        native=native,
    )


@dataclass
class _Place:
    """The policy for one module.

    Attributes:
        compute: the format in which the module computes.
        output: the format of its results; None leaves them as they are.
        hooked: whether its inputs are cast.
    """

    compute: str
    output: str | None
    hooked: bool


class PolicyHandle:
    """The handle that :func:`precision` returns: a policy applied to a model.

    Attributes:
        model: the module.
        policy: the policy that the module follows.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        *,
        how: str,
        scalings: tuple[DelayedScaling, DelayedScaling],
        native: bool | None,
    ) -> None:
        places = _places(model, policy)
        self.model, self.policy = model, policy
        self._autocasts = how == "autocast"
        self._floor: str | None = None
        self._handles: list[Any] = []
        # What to undo when a hooked module is done, for each one that is running.
        self._running: list[contextlib.ExitStack] = []
        self._reading: set[nn.Module] = set()
        cast_module(model, policy)
        self._places = dict(places)
        for module, place in places:
            if place.hooked:
                self._hook(module)
            if FORMATS[place.compute].bits == 8 and type(module).forward is nn.Linear.forward:
                self._round_products(module, scalings, native)

    # --- setting up ----------------------------------------------------------------------------

    def _hook(self, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _round_products(
        self, module: nn.Module, scalings: tuple[DelayedScaling, DelayedScaling], native: bool | None
    ) -> None:
        device = next(module.parameters()).device
        products = EightBitProducts(
            *scalings, native=offers_native_products(device) if native is None else native, device=device
        )
        products.train(module.training)
        module.add_module(_STATISTICS, products)
        module.__dict__["forward"] = functools.partial(self._linear, module)

    def remove(self) -> None:
        """Remove the hooks and 8-bit products. Parameters keep their present format."""
        for handle in self._handles:
            handle.remove()
        for module in self._places:
            if isinstance(module._modules.get(_STATISTICS), EightBitProducts):
                del module._modules[_STATISTICS]
                del module.__dict__["forward"]
        self._handles.clear()
        self._places.clear()

    def __enter__(self) -> PolicyHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"PolicyHandle({str(self.policy)!r}, {type(self.model).__name__})"

    # --- computing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def at_least(self, format: str | None) -> Iterator[PolicyHandle]:  # noqa: A002
        """Let no module compute or return in a narrower format within the context; None changes nothing."""
        before, self._floor = self._floor, format
        try:
            yield self
        finally:
            self._floor = before

    def compute_format(self, module: nn.Module) -> str:
        """Return the format in which ``module``, a part of the model, computes at the moment."""
        own = self._places[module].compute
        return own if self._floor is None else wider(own, self._floor)

    def _compute_dtype(self, module: nn.Module) -> torch.dtype:
        return dtype_of(Policy(compute=self.compute_format(module)).carrier)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self._compute_dtype(module)
        if self._autocasts:
            self._begin_uncompiled(module)
        else:
            self._begin(module)
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._autocasts:
            self._end_uncompiled()
        else:
            self._end()
        wanted = self._places[module].output
        if wanted is None:
            return output
        if self._floor is not None:
            wanted = wider(wanted, Policy(compute=self._floor).carrier)
        return cast_floating(output, dtype_of(wanted))

    def _begin(self, module: nn.Module) -> None:
        undo = contextlib.ExitStack()
        self._running.append(undo)
        if self._autocasts:
            kind = next((t.device.type for t in module.parameters()), "cpu")
            if self._left_to_autocast(module):
                undo.enter_context(torch.autocast(kind, dtype=self._compute_dtype(module)))
            else:
                undo.enter_context(torch.autocast(kind, enabled=False))
        if module not in self._reading and not self._left_to_autocast(module):
            self._read_in_compute_format(module, undo)

    def _end(self) -> None:
        self._running.pop().close()

    # torch.compile cannot trace an autocast that begins in one hook and ends in another.
    _begin_uncompiled = uncompiled(_begin)
    _end_uncompiled = uncompiled(_end)

    def _left_to_autocast(self, module: nn.Module) -> bool:
        """Return whether torch's autocast casts the module's parameters. It does in 16 bits, except for batch
        norms."""
        narrow = self._compute_dtype(module) in (torch.bfloat16, torch.float16)
        return self._autocasts and narrow and running_statistics(module) is None

    def _read_in_compute_format(self, module: nn.Module, undo: contextlib.ExitStack) -> None:
        """Replace the parameters of ``module`` and its submodules by casts, until ``undo`` is closed.

        Parameters of submodules are replaced too, because a module may use a parameter of another module
        without calling that module, as attention and tied embeddings do.
        """
        parts = [
            part
            for part in module.modules()
            if part in self._places and part not in self._reading and not self._left_to_autocast(part)
        ]
        self._reading.update(parts)
        undo.callback(self._reading.difference_update, parts)
        for part in parts:
            # A norm with running statistics accepts narrow inputs, but not weights narrower than these.
            statistics = running_statistics(part)
            dtype = self._compute_dtype(part) if statistics is None else statistics.dtype
            own = dict(part._parameters)
            casts = {name: p if p is None else cast_floating(p, dtype) for name, p in own.items()}
            if any(casts[name] is not p for name, p in own.items()):
                _replace(part, casts)
                undo.callback(_replace, part, own)

    def _linear(self, module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
        if FORMATS[self.compute_format(module)].bits > 8:
            return F.linear(input, module.weight, module.bias)
        weight, bias = module.weight, module.bias
        if self._autocasts:  # autocast does not handle these products
            weight, bias = weight.to(input.dtype), bias if bias is None else bias.to(input.dtype)
            with torch.autocast(input.device.type, enabled=False):
                return module._modules[_STATISTICS](input, weight, bias)
        return module._modules[_STATISTICS](input, weight, bias)


def _replace(module: nn.Module, tensors: dict[str, Tensor | None]) -> None:
    module._parameters.update(tensors)
    if isinstance(module, nn.RNNBase):  # these modules read their parameters from a separate list
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _places(model: nn.Module, policy: Policy) -> list[tuple[nn.Module, _Place]]:
    """Return each module with its policy.

    Raises:
        ValueError: a rule matches no module, or the model already has a policy.
    """
    found, met = [], set()
    for path, module in model.named_modules():
        if any(
            isinstance(getattr(hook, "__self__", None), PolicyHandle)
            for hook in module._forward_hooks.values()
        ):
            raise ValueError(
                f"model must not have a policy yet; {path or 'it'} has one. Call remove() on its handle."
            )
        here = policy.at(path)
        met.update([rule for rule in policy.rules if rule.matches(path)])
        begins = policy.begins_at(path)
        owns = any(p is not None and p.is_floating_point() for p in module._parameters.values())
        found.append((module, _Place(here.compute, here.output if begins else None, begins or owns)))
    for rule in policy.rules:
        if rule not in met:
            raise bad_field("policy.rules", "patterns that match a module of the model", rule.pattern)
    return found
