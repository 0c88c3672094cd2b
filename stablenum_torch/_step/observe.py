"""Observe a step: all that is measured of its gradients and loss, as the core's ``Observation``."""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor

from stablenum.arrays import map_leaves
from stablenum.guard.decide import Observation
from stablenum.guard.observation import Fault
from stablenum.guard.ranks import Ranks
from stablenum.norms.wide import Wide, narrow, recorded
from stablenum.rules.clipping import Units
from stablenum_torch._devices.host_decide import HostGuard
from stablenum_torch._devices.scalar_namespace import as_scalar, scalars
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.elements import Extremes, extremes_on_host, extremes_without_wait
from stablenum_torch._step.measure.exactly import exact_norms, exact_sums, total_of
from stablenum_torch._step.measure.norms import (
    gradient_norms_without_wait,
    in_float32,
    norms_on_host,
    saturated,
)
from stablenum_torch._step.measure.together import measured_together
from stablenum_torch._step.measure.units import units_on_host, units_without_wait
from stablenum_torch._step.measure.wide import wide_norms_on_host, wide_units_on_host

__all__ = [
    "Measured",
    "measured_without_wait",
    "noted",
    "observation",
    "observed_beyond_float32",
    "observed_on_host",
    "with_fault",
]


def observed_on_host(host: HostGuard, inputs: StepInputs) -> Observation:
    """Return the observation of CPU gradients as NumPy arrays and scalars."""
    if inputs.joint is not None or inputs.config.exact_norms:
        return _on_host(observation(measured_without_wait(inputs)))
    units = amax = tiny = None
    if host.unit_rule is None:
        norms = norms_on_host([p.grad for p in inputs.params])
    else:
        norms, units = units_on_host(host.unit_rule, inputs)
    if host.needs:
        amax, tiny = extremes_on_host([p.grad for p in inputs.params], host.needs)
    return Observation(
        norms=norms,
        loss=None if inputs.loss is None else np.float32(float(in_float32(inputs.loss))),
        found_inf=None if inputs.found_inf is None else inputs.found_inf.numpy()[()],
        units=units,
        amax=None if amax is None else as_scalar(amax),
        tiny=None if tiny is None else as_scalar(tiny),
    )


def with_fault(seen: Observation, fault: Fault | None) -> Observation:
    """Return an observation on the host with a fault, if there is one."""
    return seen if fault is None else seen._replace(fault=_on_host(fault))


def _on_host(values: Any) -> Any:
    return map_leaves(lambda v: None if v is None else as_scalar(v.numpy()), values)


def observed_beyond_float32(seen: Observation, inputs: StepInputs) -> Observation:
    """Return the observation with norms that do not saturate, for the rare step that needs them."""
    if inputs.joint is not None or inputs.config.exact_norms:
        return _again_beyond_float32(seen, inputs)
    rule = inputs.config.unit_rule
    if rule is None:
        norms, units = wide_norms_on_host(inputs.params), None
    else:
        norms, units = wide_units_on_host(rule, inputs)
    return seen._replace(norms=norms.value, units=units, exponents=norms.power)


def _again_beyond_float32(seen: Observation, inputs: StepInputs) -> Observation:
    # All ranks come here in the same step, because they have decided alike so far.
    wide = measured_without_wait(inputs, wide=True)

    def narrowed(values: Tensor) -> tuple[Any, Any]:
        found = values.numpy()
        return narrow(found, np.zeros(len(found), np.int32), xp=scalars)

    norms, exponents = narrowed(wide.norms)
    ranks = seen.ranks
    if ranks is not None and wide.rows is not None:
        of_ranks, powers = narrowed(wide.rows[:, 0])
        ranks = ranks._replace(norms=of_ranks, exponents=powers)
    units = None
    if wide.units is not None:
        pairs = [narrowed(part) for part in wide.units.norms]
        weights = tuple(saturated(part).numpy() for part in wide.units.weights)
        units = Units(tuple(value for value, _ in pairs), weights, tuple(power for _, power in pairs))
    total = None if wide.total is None else _on_host(wide.total)
    return seen._replace(norms=norms, exponents=exponents, units=units, ranks=ranks, total=total)


class Measured(NamedTuple):
    """What is measured, as tensors, before the final computation of the ``Observation``.

    Attributes:
        norms: (n,) float64, see ``wide_norms_without_wait``; float32 with units.
        loss, found_inf: as in ``StepInputs``, but on its device; None if they are in the rows.
        units: as in ``Observation``.
        extremes: what the loss-scale rule asks for.
        rows: what each rank measured, see ``together.py``; None if this process decides alone.
        total: the joint norm, if it is computed without rounding.
    """

    norms: Tensor
    loss: Tensor | None
    found_inf: Tensor | None
    units: Units | None
    extremes: Extremes
    rows: Tensor | None = None
    total: Wide | None = None


def measured_without_wait(inputs: StepInputs, *, wide: bool = False) -> Measured:
    """Measure gradients on any device, whole or sharded; no value is read on the host.

    Args:
        inputs: what is measured, and where the results are put.
        wide: whether ranks exchange norms beyond float32's range.
    """
    if inputs.joint is not None:
        rows, norms, units, extremes, total = measured_together(inputs, inputs.joint, wide=wide)
        return Measured(norms, None, None, units, extremes, rows, total)
    config, params, device = inputs.config, inputs.params, inputs.device
    units = total = None
    if config.unit_rule is None:
        norms = gradient_norms_without_wait(params, device)
    else:
        norms, units = units_without_wait(config.unit_rule, inputs)
    if config.exact_norms and params:
        sums = exact_sums([p.grad for p in params], device)
        exact, total = exact_norms(sums), exact_norms(total_of(sums))
        norms = torch.ldexp(exact.value.double(), exact.power)
    loss, found_inf = noted(inputs)
    return Measured(
        norms=norms,
        loss=loss,
        found_inf=found_inf,
        units=units,
        extremes=extremes_without_wait(inputs),
        total=total,
    )


def noted(inputs: StepInputs) -> tuple[Tensor | None, Tensor | None]:
    """Return the loss and the flag of the inputs on their device."""
    loss = None if inputs.loss is None else to_device(inputs.loss, inputs.device)
    return loss, None if inputs.found_inf is None else to_device(inputs.found_inf, inputs.device)


def observation(measured: Measured) -> Observation:
    """Return the observation for the core, in float32."""
    amax, tiny = measured.extremes.joined()
    rows, units = measured.rows, measured.units
    # Norms beyond float32 saturate here: with exponents, compiling the decision would take minutes.
    return Observation(
        norms=saturated(measured.norms),
        loss=None if measured.loss is None else in_float32(measured.loss),
        found_inf=measured.found_inf,
        units=units if rows is None else map_leaves(lambda v: v if v is None else saturated(v), units),
        amax=amax,
        tiny=tiny,
        ranks=None if rows is None else Ranks(saturated(rows[:, 0]), *rows[:, 1:4].float().unbind(1)),
        total=None if measured.total is None else Wide(recorded(measured.total, xp=torch_namespace)),
    )
