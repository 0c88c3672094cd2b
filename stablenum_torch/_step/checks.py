"""The checks that ``wrap`` makes before it builds anything."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.user_warnings import warn
from stablenum.errors import bad_field, bad_type
from stablenum.formats import FORMATS, get_format
from stablenum.guard.config import GuardConfig
from stablenum_torch._devices.fused_optimizers import forgets_elements, is_fused, moves_other_elements
from stablenum_torch._devices.groups import data_parallel
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.uncompiled import uncompiled
from stablenum_torch._step.measure.norms import dense_values
from stablenum_torch._step.two_steps import PARTS, parts_of

__all__ = [
    "EpsTooSmallWarning",
    "check_can_unscale",
    "check_module",
    "check_names",
    "check_optimizer",
    "check_parameters",
    "check_rules",
    "check_stages",
    "check_state_dict",
    "check_unscaled",
    "given_names",
    "keeps_state_on_one_rank",
    "needs_closure",
    "state_dict_of",
    "two_loss_scales",
    "warn_of_forgotten_elements",
    "warn_of_lost_eps",
    "warn_of_other_elements",
    "warn_of_other_steps",
]


class EpsTooSmallWarning(UserWarning):
    """The optimizer's eps rounds to 0 in the format in which its denominator is computed."""


def check_module(name: str, module: torch.nn.Module) -> torch.nn.Module:
    """Return ``module``.

    Raises:
        TypeError: it is not a module.
    """
    if not isinstance(module, torch.nn.Module):
        raise bad_type(name, "a torch.nn.Module", module)
    return module


def check_optimizer(optimizer: object) -> None:
    """Check that ``optimizer`` can be guarded.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, its ``step`` needs a closure, or it averages parameters
            over ranks.
        ValueError: ``optimizer`` has no parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}. "
            "Example: wrap(torch.optim.AdamW(model.parameters()))."
        )
    if _is_distributed(optimizer, "PostLocalSGDOptimizer"):
        raise TypeError(
            "PostLocalSGDOptimizer cannot be guarded: its step() averages parameters over ranks, and would "
            "wait for a rank that skips. Guard the optimizer inside: "
            "PostLocalSGDOptimizer(wrap(...), averager)."
        )
    parts = parts_of(optimizer)
    if parts not in ((), PARTS):
        raise TypeError(
            f"{type(optimizer).__name__} cannot be guarded: it also moves parameters, or computes gradients, "
            f"in {', '.join(f'{name}()' for name in parts)}, which the guard does not know, so that steps "
            "would pass by it. Guard the optimizer inside, which applies the update, where it has one: "
            f"{type(optimizer).__name__}(wrap(...)). Of steps in several parts, the guard knows those with "
            "first_step() and second_step() alone (SAM)."
        )
    if needs_closure(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} cannot be guarded: its step() re-evaluates the model through a "
            "closure any number of times, so there is no single gradient to decide on."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("optimizer must hold at least one parameter; all its param_groups are empty.")
    check_parameters(optimizer)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step`` cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_parameters(optimizer: Optimizer) -> None:
    """Check that the guard can measure the optimizer's parameters.

    Raises:
        ValueError: a parameter has no memory, is there twice, or is stepped inside the backward pass.
    """
    seen: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            where = f"param_groups[{g}]['params'][{i}]"
            if p.device.type == "meta":
                raise ValueError(
                    f"optimizer must hold parameters with memory; {where} is on the meta device. Call "
                    "model.to_empty(device=...) or load the weights, then make the optimizer from the new "
                    "parameters, because moving a module off the meta device replaces them."
                )
            if hasattr(p, "_in_backward_optimizers"):
                raise ValueError(
                    f"optimizer cannot be guarded: {where} is stepped inside the backward pass "
                    "(_apply_optimizer_in_backward), before there is anything to decide on. Step after the "
                    "backward pass instead."
                )
            if id(p) in seen:
                raise ValueError(
                    f"optimizer must hold each parameter once; {where} is there twice, so its gradient would "
                    "count and be applied twice."
                )
            seen.add(id(p))


def _is_distributed(optimizer: Optimizer, name: str) -> bool:
    """Return whether this is the optimizer of that name in ``torch.distributed.optim``, which is not
    imported for it."""
    return any(
        cls.__name__ == name and cls.__module__.startswith("torch.distributed.optim")
        for cls in type(optimizer).__mro__
    )


def keeps_state_on_one_rank(optimizer: Optimizer) -> bool:
    """Return whether each parameter's state is on one of the ranks that hold copies of the parameter."""
    return _is_distributed(optimizer, "ZeroRedundancyOptimizer")


def check_rules(config: GuardConfig, optimizer: Optimizer, process_group: object) -> None:
    """Check that every rule can work with this optimizer.

    Raises:
        ValueError: ``AdaptiveGradClip`` would get plain shards; ``ClipUpdateRMS`` is relative to
            learning rates that the groups do not have; or gradients are said to be sharded and are not.
    """
    if process_group is not None and _is_distributed(optimizer, "ZeroRedundancyOptimizer"):
        raise ValueError(
            "process_group must be None for ZeroRedundancyOptimizer: it shards the optimizer's state, but "
            "each rank has the whole gradients, whose norm would come out too large."
        )
    if config.unit_rule is not None and process_group is not None:
        raise ValueError(
            "clip must not contain AdaptiveGradClip with process_group: only of DTensors is it known which "
            "units of a parameter lie on which rank. Use AdaGC, which clips per tensor, or FSDP2, whose "
            "parameters are DTensors."
        )
    if config.update_rule is not None and parts_of(optimizer):
        raise ValueError(
            f"clip must not contain ClipUpdateRMS with {type(optimizer).__name__}, which moves the "
            "parameters twice in a step. Use a rule that clips gradients."
        )
    if config.update_rule is not None and config.update_rule.per_lr:
        for i, group in enumerate(optimizer.param_groups):
            if group.get("lr") is None:
                raise ValueError(
                    f"ClipUpdateRMS compares updates with the learning rate, but param_groups[{i}] of "
                    f"{type(optimizer).__name__} has no 'lr'. Use ClipUpdateRMS(max_rms, per_lr=False), "
                    "whose max_rms bounds the update itself."
                )


def check_stages(config: GuardConfig) -> None:
    """Check that every rule can work where ranks have other parameters than others.

    Raises:
        ValueError: a rule would need what other ranks' parameters have left.
    """
    if config.joins_again:
        raise ValueError(
            "clip must not contain a rule by the joint norm behind AdaGC or ClipByNorm where the ranks of "
            "process_group hold different parameters: no rank knows what the others clipped; got "
            f"{config.clip}. Put the rule by the joint norm first. Nothing was changed."
        )


def check_can_unscale(params: Iterable[Tensor], scaled: bool, again: bool) -> None:
    """Check that gradients can be divided by the loss scale before the step.

    Raises:
        RuntimeError: they are not those of a scaled loss, or have been divided already.
        ValueError: one is float16.
    """
    if again:
        raise RuntimeError(
            "unscale_() was called twice since the last step; the gradients are unscaled already."
        )
    if not scaled:
        raise RuntimeError(
            "unscale_() must be called between the backward pass of a scaled loss and step(): call "
            "opt.backward(loss) first."
        )
    if any(p.grad is not None and p.grad.dtype == torch.float16 for p in params):
        raise ValueError(
            "unscale_() cannot be used on float16 gradients, most of which would become 0. Keep the "
            "parameters in float32 and compute in opt.autocast(), or use the guard's own clip rules, which "
            "need no unscaling."
        )


@uncompiled
def state_dict_of(state: object) -> dict[str, Any]:
    """Return a copy of the state dict of an optimizer.

    Raises:
        TypeError: it is not a mapping.
    """
    if not isinstance(state, Mapping):
        raise bad_type("state_dict", "a dict, as opt.state_dict() returns", state)
    return dict(state)


def check_state_dict(state: Mapping[str, Any]) -> None:
    """Check that a state dict has what every optimizer's has.

    Raises:
        ValueError: it has not.
    """
    if not {"state", "param_groups"} <= state.keys():
        allowed = "a dict with the keys 'state' and 'param_groups', as opt.state_dict() returns"
        raise bad_field("state_dict", allowed, sorted(map(str, state)))
    if not isinstance(state["state"], Mapping):
        raise bad_type("state_dict['state']", "a dict", state["state"])


def check_unscaled(params: Iterable[Tensor]) -> None:
    """Check that all gradients of a step are 0, for which no loss was multiplied by the loss scale.

    ``torch.distributed.checkpoint`` steps with gradients of 0 to have the optimizer create its state.

    Raises:
        RuntimeError: a gradient is not 0. Divided by the scale, it would hardly move the weights.
    """
    if any(dense_values(local_part(p.grad)).count_nonzero() for p in params if p.grad is not None):
        raise RuntimeError(
            "The guard has a loss scale, but no loss was multiplied by it since the last step. Write "
            "opt.backward(loss), or opt.scale(loss).backward(), instead of loss.backward(). Where other code "
            "runs the backward pass (Accelerate, a Trainer, a GradScaler), wrap the optimizer without "
            "loss_scale. Nothing was changed."
        )


def two_loss_scales(config: GuardConfig) -> RuntimeError:
    """Return the error for a ``GradScaler`` that steps a guard with a loss scale."""
    return RuntimeError(
        "A guard with a loss scale must be stepped without a GradScaler, which multiplies by a scale of its "
        f"own and drops steps before the guard sees them; got loss_scale={config.loss_scale}. Leave the "
        "GradScaler out: compute the loss in opt.autocast(), then opt.backward(loss) and opt.step(). With "
        "Fabric, make it without precision=, and call fabric.backward(opt.scale(loss)); with Lightning's "
        "Trainer, add a GuardCallback. No parameter was changed."
    )


def given_names(
    names: torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None,
) -> dict[Tensor, str]:
    """Return the argument ``names`` of ``wrap`` as a mapping from parameter to name.

    The names of a ``DistributedDataParallel`` model, compiled or not, are those of the model inside, so that
    a state saved with it fits the model without it, or under FSDP2.

    Raises:
        TypeError: ``names`` is not a module, a mapping of name to tensor, or (name, tensor) pairs.
    """
    if names is None:
        return {}
    if isinstance(names, torch.nn.Module):
        model = data_parallel(names)
        names = (names if model is None else model.module).named_parameters()
    pairs = names.items() if isinstance(names, Mapping) else names
    found: dict[Tensor, str] = {}
    try:
        for name, parameter in pairs:
            if not isinstance(name, str) or not isinstance(parameter, Tensor):
                raise TypeError
            found.setdefault(parameter, name)
    except (TypeError, ValueError):
        raise TypeError(
            "names must be the model, a mapping from name to parameter, or (name, parameter) pairs such as "
            f"those from model.named_parameters(); got {type(names).__name__}."
        ) from None
    return found


def check_names(names: Mapping[Tensor, str], optimizer: Optimizer) -> None:
    """Check that names belong to the optimizer's parameters and tell them apart.

    Raises:
        ValueError: they are those of other parameters, or two parameters have the same name.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = [names[p] for p in params if p in names]
    if names and not known:
        raise ValueError(
            "names must be those of the optimizer's parameters; got only names of other tensors (of a copy "
            "of the model, or of a model that was moved or sharded after the optimizer was made?)."
        )
    twice = next((name for name, count in Counter(known).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"names must be different for each parameter; got {twice!r} for two of them.")


def warn_of_forgotten_elements(optimizer: Optimizer) -> bool:
    """Warn if the optimizer's fused kernel does not move all elements of its parameters, and return whether
    it does not."""
    dtype = forgets_elements(optimizer)
    if dtype is not None:
        kind, name = type(optimizer).__name__, str(dtype).removeprefix("torch.")
        warn(
            f"The fused {kind} of torch {torch.__version__} does not move all elements of {name} parameters "
            "on a CPU, with a guard or without, so most of a model is not trained. Make it with fused=False."
        )
    return dtype is not None


def warn_of_other_elements(optimizer: Optimizer, name: Callable[[Tensor], str]) -> bool:
    """Warn if the optimizer's fused kernel moves the wrong elements of a parameter, and return whether it
    does."""
    found = moves_other_elements(optimizer)
    if found is not None:
        kind = type(optimizer).__name__
        warn(
            f"The gradient of {name(found)} has other strides than the parameter, {found.grad.stride()} "
            f"instead of {found.stride()}: the fused {kind} of torch {torch.__version__} moves the wrong "
            "elements of it on a CPU, with a guard or without. Make it with fused=False, or give the "
            "gradient the parameter's strides: torch.empty_like(p).copy_(gradient)."
        )
    return found is not None


def warn_of_lost_eps(optimizer: Optimizer) -> None:
    """Warn if ``x / (sqrt(v) + eps)`` will be computed with an eps of 0, so that a zero gradient gives
    NaN."""
    if hasattr(optimizer, "wide_gradients"):
        return  # computes in float32, whatever the format of its parameters
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float | int):
            continue
        for p in group["params"]:
            name = str(p.dtype).removeprefix("torch.")
            if name not in FORMATS or (is_fused(optimizer) and eps > 0):
                continue  # fused kernels compute the denominator in float32
            # Round to nearest even: half of the smallest subnormal, or less, becomes 0.
            if eps <= get_format(name).smallest_subnormal / 2:
                warn(
                    f"eps={eps:g} is 0 in {name}: the optimizer divides 0 by 0 where a gradient is zero, and "
                    f"the parameter becomes NaN although no gradient is. Use float32 parameters, "
                    f"fused=True, or eps >= {get_format(name).smallest_subnormal:g}.",
                    EpsTooSmallWarning,
                )
                return


def warn_of_other_steps(optimizer: Optimizer) -> None:
    """Warn that parameters were stepped without the guard."""
    kind = type(optimizer).__name__
    warn(
        "The parameters moved after a loss was given to the guard, and opt.step() was not called: a step has "
        "passed by the guard, which neither looked at its gradients nor recorded it. It was another method "
        f"of {kind}, its own step(), or another optimizer. Call opt.step() of what wrap() returned; where "
        f"{kind} must step in a method of its own, guard the optimizer inside it that applies the update. "
        "(Weights that were exchanged in the middle of a step, for an evaluation or a rewind, look alike: "
        "then nothing is wrong. This is said once.)"
    )
