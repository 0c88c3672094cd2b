"""``audit``: inspect an optimizer's state, report risks, and reset poisoned elements.

Each tensor is read once, in blocks, on its own device; the host waits for the device once per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.diagnosis.audit import (
    Audit,
    Measured,
    Role,
    Row,
    UpdateFormula,
    eps_is_lost,
    join_blocks,
    measure_block,
    poisoned,
    torch_formula,
)
from stablenum_torch._devices.fused_optimizers import is_fused
from stablenum_torch._devices.ranks import is_sharded, local_part
from stablenum_torch._diagnosis.optimizer_entries import (
    entries_of,
    formula_owner,
    kind_of,
    unwrapped,
)
from stablenum_torch._precision.float32_copies import Float32CopyOptimizer
from stablenum_torch._step.checks import given_names
from stablenum_torch._step.parameters import names_of

__all__ = ["audit", "repair", "setting_problems", "state_problems", "value_of"]

# Elements per block: a block and what is computed from it fit in the cache, or in a part of GPU memory.
_ON_HOST, _ON_DEVICE = 2**15, 2**23


def audit(
    optimizer: Optimizer,
    grads: Mapping[str, Tensor] | Sequence[Tensor | None] | None = None,
    *,
    names: torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
) -> Audit:
    """Report on the state of an optimizer, parameter by parameter, sorted by risk.

    Per parameter, the report has the RMS of the update that the moments give at the present learning rate,
    max abs(dw)/abs(w), frac(v == 0 and m != 0), the numbers of inf and of negative second moments and of
    NaN, sqrt(v) compared with eps, RMS(g^2/v), and frac(w + dw == w). Values that the optimizer's state does
    not contain are None ("-" in the table). Decoupled weight decay is not part of the update. Counts are
    numbers of elements; the real and imaginary parts of a complex parameter count separately, and of a
    sharded parameter only this rank's part counts.

    Args:
        optimizer: any ``torch.optim.Optimizer``, guarded or not.
        grads: unscaled gradients, by name, or one per parameter in the order of the groups; by default
            ``p.grad``, unless it may still contain the guard's loss scale.
        names: the model, or names and parameters, as for :func:`stablenum_torch.wrap`.

    Raises:
        TypeError: ``optimizer`` is not an optimizer; ``grads`` or ``names`` has a wrong type.
        ValueError: ``grads`` do not fit the parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(2, 3)).square().mean().backward()
        >>> opt.step()
        >>> audit(opt, names=model).ok
        True
        >>> opt.state[model.weight]["exp_avg_sq"][0, 1] = float("inf")
        >>> report = audit(opt, names=model)
        >>> print(report.risks[0])
        weight: state of 1 of 3 elements is poisoned: 1 with an infinite second moment (their updates ...
        >>> repair(opt, report)
        1
    """
    _check_optimizer(optimizer)
    inner, named = unwrapped(optimizer), _names(optimizer, given_names(names))
    notes: list[str] = []
    given = _gradients(optimizer, named, grads, notes)
    own = formula_owner(inner)
    kind, fused, every = kind_of(own), is_fused(own), inner.state
    rows, bad_gradients = [], []
    places = ((p, group) for group in inner.param_groups for p in group["params"])
    for (p, group), name, grad in zip(places, named, given, strict=True):
        state, value = every.get(p, {}), value_of(inner, p)
        # A master weight is the value itself, not a part of the state.
        state = {key: entry for key, entry in state.items() if key != "master" or value is p}
        row = _row(name, value, state, torch_formula(kind, group, state, _number), grad, fused=fused)
        rows.append(row)
        if row.measured.gradient_bad:
            bad_gradients.append(name)
    if any(is_sharded(p) for group in inner.param_groups for p in group["params"]):
        notes.append("parameters are sharded: counts cover only the part on this rank")
    if bad_gradients:
        notes.append(f"gradients are not finite: {', '.join(bad_gradients[:4])}; replay the step to see why")
    if not kind:
        notes.append(
            f"the update formula of {type(own).__name__} is not known: updates and eps were not checked"
        )
    return Audit.of(type(own).__name__, rows, notes=notes)


def state_problems(
    optimizer: Optimizer, names: Iterable[tuple[str, Tensor]] | None = None
) -> tuple[str, ...]:
    """Describe each problem in an optimizer's state that can make the next update wrong, the worst first.

    Parameters and gradients are not judged, and warnings are left out: see :func:`audit`, also for ``names``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
    """
    return audit(optimizer, names=names).problems()


def setting_problems(optimizer: Optimizer) -> tuple[str, ...]:
    """Describe each setting of an optimizer that is not a number it can use, such as the learning rate of a
    broken schedule."""
    return tuple(
        f"{name} {problem} in parameter group {i} of {type(optimizer).__name__}"
        for i, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and (problem := _problem(type(optimizer), name, value))
    )


# Settings that a step multiplies by, and torch's own rates of decay, which are below 1.
_FACTORS = ("lr", "momentum", "weight_decay")
_DECAYS = {
    torch.optim.Adadelta: "rho",
    torch.optim.Adam: "betas",
    torch.optim.AdamW: "betas",
    torch.optim.NAdam: "betas",
    torch.optim.RAdam: "betas",
    torch.optim.RMSprop: "alpha",
}


def _problem(kind: type[Optimizer], name: str, value: Any) -> str:
    """Return what is wrong with a setting; "" if nothing is known to be."""
    numbers = value if name == "betas" and isinstance(value, list | tuple) else (value,)
    for x in (float(n) for n in numbers if isinstance(n, float | Tensor) and torch.as_tensor(n).numel() == 1):
        if math.isnan(x):
            return "is NaN"
        if name in _FACTORS and math.isinf(x):
            return "is inf"
        if name == _DECAYS.get(kind) and x >= 1.0:
            return f"is {x:g}, not below 1,"
    return ""


# --- what is known of the optimizer ----------------------------------------------------------


def value_of(optimizer: Optimizer, p: Tensor) -> Tensor:
    """Return what the update formula applies to: the parameter, or its value in float32."""
    inner = unwrapped(optimizer)
    return inner.wide_value(p) if isinstance(inner, Float32CopyOptimizer) else p


def _names(optimizer: Optimizer, given: Mapping[Tensor, str]) -> list[str]:
    """Return a name for each parameter in the order of the groups."""
    known = getattr(optimizer, "parameter_names", None)  # of a guarded optimizer
    if not callable(known):
        return names_of(optimizer, given)
    params = (p for group in optimizer.param_groups for p in group["params"])
    return [given.get(p, name) for p, name in zip(params, known(), strict=True)]


def _gradients(
    optimizer: Optimizer,
    names: Sequence[str],
    grads: Mapping[str, Tensor] | Sequence[Tensor | None] | None,
    notes: list[str],
) -> list[Tensor | None]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if grads is None:
        if getattr(optimizer, "scales_loss", False):
            notes.append(
                "p.grad may include the loss scale, so it was left out; pass unscaled gradients as grads="
            )
            return [None] * len(params)
        return [p.grad for p in params]
    if isinstance(grads, Mapping):
        unknown = [name for name in grads if name not in set(names)]
        if unknown:
            raise ValueError(
                f"grads must be named as the parameters are; got {unknown[0]!r}; the parameters' names are "
                f"{', '.join(names[:4])}{'...' if len(names) > 4 else ''}. To use the model's names, pass "
                "names=model."
            )
        found = [grads.get(name) for name in names]
    elif isinstance(grads, Sequence):
        if len(grads) != len(params):
            raise ValueError(f"grads must have one gradient per parameter, {len(params)}; got {len(grads)}.")
        found = list(grads)
    else:
        raise TypeError(
            "grads must be a mapping of name to tensor, a sequence of tensors, or None; "
            f"got {type(grads).__name__}."
        )
    for name, p, grad in zip(names, params, found, strict=True):
        if grad is not None and not isinstance(grad, Tensor):
            raise TypeError(f"grads[{name!r}] must be a tensor or None; got {type(grad).__name__}.")
        if grad is not None and not (grad.is_floating_point() or grad.is_complex()):
            raise TypeError(f"grads[{name!r}] must be a floating-point tensor; got {grad.dtype}.")
        if grad is not None and grad.shape != p.shape:
            raise ValueError(
                f"grads[{name!r}] must have the parameter's shape {tuple(p.shape)}; got {tuple(grad.shape)}."
            )
    return found


def _number(value: Any) -> float | None:
    """Return a number, or a tensor with one element, as a float. Reading a tensor makes the host wait."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


# --- one parameter ---------------------------------------------------------------------------


def _row(
    name: str,
    p: Tensor,
    state: Mapping[str, Any],
    formula: UpdateFormula,
    grad: Tensor | None,
    *,
    fused: bool,
) -> Row:
    entries, others = entries_of(p, state, formula.kind)
    second = next((t for role, t in entries.values() if role.squared), None)
    second_dtype = None if second is None else _dtype(second)
    lost = eps_is_lost(formula.eps, second_dtype, wide=fused and formula.eps != 0)
    tensors = {**{key: t for key, (_, t) in entries.items()}, **others}
    return Row(
        name=name,
        shape=tuple(p.shape),
        dtype=_dtype(p),
        state_dtypes={key: _dtype(t) for key, t in tensors.items()},
        law=formula,
        measured=_measure(p, list(entries.values()), grad, formula, 0.0 if lost else formula.eps),
        others={key: _bad_elements(t) for key, t in others.items()},
        second_dtype=second_dtype,
        eps_lost=lost,
    )


def _measure(
    p: Tensor,
    entries: Sequence[tuple[Role, Tensor]],
    grad: Tensor | None,
    formula: UpdateFormula,
    eps: float | None,
) -> Measured:
    weights = _flat(p)
    if not weights.numel():
        return Measured()
    gradient = None if grad is None else _flat(grad)
    values = [(role, _flat(t)) for role, t in entries]
    narrow = _rounding(weights.dtype)
    size = _ON_HOST if weights.device.type == "cpu" else _ON_DEVICE
    blocks: list[Tensor] = []
    keys: list[str] = []
    for start in range(0, weights.numel(), size):

        def wide(t: Tensor, start: int = start) -> Tensor:
            return _wide(t[start : start + size])

        parts = measure_block(
            wide(weights),
            [(role, wide(t)) for role, t in values],
            None if gradient is None else wide(gradient),
            None,
            formula,
            eps=eps,
            narrow=narrow,
            xp=xp,
        )
        keys = list(parts)
        blocks.append(torch.stack([part.double() for part in parts.values()]))
    read = torch.stack(blocks).tolist()
    return join_blocks([dict(zip(keys, line, strict=True)) for line in read])


def _rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _flat(tensor: Tensor) -> Tensor:
    """Return (n,) real values in logical order, including both parts of complex numbers and the zeros of a
    sparse tensor."""
    values = local_part(tensor).detach()
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.reshape(-1)


def _wide(values: Tensor) -> Tensor:
    # Apple's GPUs have no float64.
    return (values.cpu() if values.device.type == "mps" else values).double()


def _bad_elements(tensor: Tensor) -> int:
    values = local_part(tensor).detach()
    values = values if values.layout == torch.strided else values.coalesce().values()
    return int((~torch.isfinite(values)).sum())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- repair ----------------------------------------------------------------------------------


@torch.no_grad()
def repair(optimizer: Optimizer, audit: Audit) -> int:
    """Set the poisoned elements of an optimizer's state to 0, in place; all other values stay bit for bit.

    An element is poisoned if an entry of its state is not finite, or a second moment is negative. All its
    entries of known meaning are reset, including AMSGrad's maximum. Step counts stay, so bias correction
    treats the element as late in training: the first update of such an element is
    lr (1 - beta1) / sqrt(1 - beta2), which is 3.2 lr with Adam's defaults, and later updates settle.
    Parameters are not changed, even if they are not finite.

    Args:
        optimizer: the audited optimizer, guarded or not.
        audit: the result of :func:`stablenum_torch.audit` for it.

    Returns:
        The number of elements that were reset; of sharded parameters, only those on this rank count.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or ``audit`` is not an audit.
        ValueError: the audit does not have the same number of poisoned elements as the optimizer's state, so
            it is the audit of another optimizer or of an earlier state. Nothing is changed.
    """
    _check_optimizer(optimizer)
    if not isinstance(audit, Audit):
        raise TypeError(
            f"audit must be what stablenum_torch.audit(optimizer) returned; got {type(audit).__name__}."
        )
    inner = unwrapped(optimizer)
    kind, every = kind_of(formula_owner(inner)), inner.state
    found: list[tuple[list[Tensor], Tensor]] = []
    for group in inner.param_groups:
        for p in group["params"]:
            entries, _ = entries_of(p, every.get(p, {}), kind)
            parts = [(role, _writable(t)) for role, t in entries.values()]
            if parts and parts[0][1].numel():
                found.append(([values for _, values in parts], poisoned(parts, xp=xp)))
    total = sum(int(mask.sum()) for _, mask in found)
    if total != sum(audit.poisoned.values()):
        raise ValueError(
            f"audit must be of this optimizer as it is now; it names {sum(audit.poisoned.values())} poisoned "
            f"elements, but the optimizer's state has {total}. Audit the optimizer that you want to repair."
        )
    for entries_of_one, mask in found:
        for values in entries_of_one:
            values.masked_fill_(mask, 0.0)
    return total


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, guarded or not; got {type(optimizer).__name__}."
        )


def _writable(tensor: Tensor) -> Tensor:
    """Return this rank's part as real values that share its memory."""
    values = local_part(tensor).detach()
    return torch.view_as_real(values) if values.is_complex() else values
