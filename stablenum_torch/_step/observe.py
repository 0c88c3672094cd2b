"""Observe a step: all that is measured of its gradients and loss, as the core's ``Observation``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stablenum.arrays import map_leaves
from stablenum.formats import FLOAT32_MAX
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Observation
from stablenum.rules.clipping import Units
from stablenum_torch._devices.host_decide import HostGuard
from stablenum_torch._devices.ranks import joins_ranks
from stablenum_torch._devices.scalar_namespace import as_scalar
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.measure import (
    gradient_norms_on_host,
    gradient_norms_without_wait,
    saturated,
)
from stablenum_torch._step.measure_elements import Extremes, extremes_on_host, extremes_without_wait
from stablenum_torch._step.measure_units import units_on_host, units_without_wait
from stablenum_torch._step.measure_wide import wide_norms_on_host, wide_units_on_host

__all__ = [
    "Measured",
    "Noted",
    "in_float32",
    "measured_without_wait",
    "observation",
    "observed_beyond_float32",
    "observed_on_host",
]

_CPU = torch.device("cpu")


class Noted(NamedTuple):
    """What was seen of a step before it began.

    Attributes:
        loss: () the unscaled loss, if known.
        found_inf: () bool, whether a gradient was not finite before it was unscaled for the user to change;
            None if the gradients are as the backward pass left them.
    """

    loss: Tensor | None = None
    found_inf: Tensor | None = None


def observed_on_host(
    host: HostGuard,
    params: Sequence[Tensor],
    noted: Noted,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> Observation:
    """Return the observation of CPU gradients as NumPy arrays and scalars."""
    if (host.unit_rule is not None or host.needs) and joins_ranks(params, process_group):
        measured = measured_without_wait(host.config, params, noted, _CPU, process_group, included)
        return map_leaves(lambda v: None if v is None else as_scalar(v.numpy()), observation(measured))
    units = amax = tiny = None
    if host.unit_rule is None:
        norms = gradient_norms_on_host(params, process_group)
    else:
        norms, units = units_on_host(host.unit_rule, params, included)
    if host.needs:
        amax, tiny = extremes_on_host([p.grad for p in params], host.needs)
    return Observation(
        norms=norms,
        loss=None if noted.loss is None else np.float32(float(in_float32(noted.loss))),
        found_inf=None if noted.found_inf is None else noted.found_inf.numpy()[()],
        units=units,
        amax=None if amax is None else as_scalar(amax),
        tiny=None if tiny is None else as_scalar(tiny),
    )


def observed_beyond_float32(
    host: HostGuard,
    seen: Observation,
    params: Sequence[Tensor],
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> Observation:
    """Return the observation with norms that do not saturate, for the rare step that needs them."""
    if host.unit_rule is None:
        norms, units = wide_norms_on_host(params, process_group), None
    else:
        norms, units = wide_units_on_host(host.unit_rule, params, included)
    return seen._replace(norms=norms.value, units=units, exponents=norms.power)


class Measured(NamedTuple):
    """What is measured, as tensors, before the final computation of the ``Observation``.

    Attributes:
        norms: (n,) float64, see ``wide_norms_without_wait``; float32 with units.
        noted: what was seen before the step, on the device of the results.
        units: as in ``Observation``.
        extremes: what the loss-scale rule asks for.
    """

    norms: Tensor
    noted: Noted
    units: Units | None
    extremes: Extremes


def measured_without_wait(
    config: GuardConfig,
    params: Sequence[Tensor],
    noted: Noted,
    device: torch.device,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> Measured:
    """Measure gradients on any device, whole or sharded; no value is read on the host.

    Args:
        config: says what is needed.
        params: the parameters; a missing gradient counts as zero.
        noted: what was seen before the step.
        device: the device of the results.
        process_group: the ranks over which plain gradients are sharded.
        included: whether the rule for units, if there is one, applies to each parameter.
    """
    units = None
    if config.unit_rule is None:
        norms = gradient_norms_without_wait(params, device, process_group)
    else:
        norms, units = units_without_wait(config.unit_rule, params, included, device)
    return Measured(
        norms=norms,
        noted=Noted(*(None if part is None else to_device(part, device) for part in noted)),
        units=units,
        extremes=extremes_without_wait(params, device, config.needs, process_group),
    )


def observation(measured: Measured) -> Observation:
    """Return the observation for the core, in float32."""
    amax, tiny = measured.extremes.joined()
    # Norms beyond float32 saturate here: with exponents, compiling the decision would take minutes.
    return Observation(
        norms=saturated(measured.norms),
        loss=None if measured.noted.loss is None else in_float32(measured.noted.loss),
        found_inf=measured.noted.found_inf,
        units=measured.units,
        amax=amax,
        tiny=tiny,
    )


def in_float32(loss: Tensor) -> Tensor:
    """Return the loss in float32. A finite float64 loss beyond float32's range saturates: it is not inf."""
    if loss.dtype == torch.float64:
        loss = torch.where(torch.isfinite(loss), loss.clamp(-FLOAT32_MAX, FLOAT32_MAX), loss)
    return loss.float()
