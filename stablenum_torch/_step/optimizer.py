"""``wrap``: a guarded optimizer that is a real ``torch.optim.Optimizer``.

What torch asks of an optimizer is in ``inner_protocol.py``, and the step itself in ``guard.py``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.settings_checks import check_callable
from stablenum.errors import bad_type
from stablenum.guard.config import GuardConfig, Settings, make_config, settings_shown
from stablenum.guard.decide import GuardState
from stablenum.guard.readout import Metrics, StepRecord, history, scalars
from stablenum.guard.replicas import steps_between_checks
from stablenum.precision.policy import Policy
from stablenum.runlog.writing import LogFile
from stablenum_torch._devices.generators import RngState
from stablenum_torch._devices.groups import Groups, check_not_copies, groups_of
from stablenum_torch._devices.joint import check_groups
from stablenum_torch._devices.state import to_device
from stablenum_torch._devices.uncompiled import uncompiled_before_2_12
from stablenum_torch._step.autocast import AppliedPolicy, autocast
from stablenum_torch._step.buffers import KeptBuffers
from stablenum_torch._step.checks import (
    check_module,
    check_names,
    check_optimizer,
    check_rules,
    given_names,
    warn_of_lost_eps,
)
from stablenum_torch._step.inner_protocol import PassThrough, observed_when_asked
from stablenum_torch._step.measure.norms import in_float32
from stablenum_torch._step.schedulers import hold

if TYPE_CHECKING:
    from stablenum.diagnosis.report.report import Report

__all__ = ["GuardedOptimizer", "wrap"]

S = TypeVar("S")


@settings_shown
def wrap(
    optimizer: Optimizer,
    config: GuardConfig | None = None,
    *,
    names: torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    loss_group: torch.distributed.ProcessGroup | None = None,
    buffers: torch.nn.Module | None = None,
    check_replicas_every: int | None = None,
    log: str | os.PathLike[str] | None = None,
    **overrides: Unpack[Settings],
) -> GuardedOptimizer:
    """Guard an optimizer: a step with a non-finite gradient or loss is skipped entirely, and recorded.

    The result shares ``param_groups`` and ``state`` with ``optimizer``; use it in its place.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps without a closure. With ``fused=True`` a step on
            an accelerator never makes the host wait; otherwise the host waits once per step. Of optimizers
            whose step has two parts, ``first_step()`` and ``second_step()`` (SAM), both are guarded: a
            gradient or loss that is not finite in either of them skips the whole step, and the parameters are
            what they were before the first. That takes memory for a copy of the parameters.
        config: a :class:`stablenum.GuardConfig`.
        names: the model, or (name, parameter) pairs, so that messages and rules can name parameters
            (``AdaptiveGradClip(exclude="head.*")``). By default the ``param_names`` of the groups are used,
            which optimizers made from ``named_parameters()`` have.
        process_group: the ranks over which gradients that are plain tensors are sharded (ZeRO-2, FSDP1), or
            that hold different parameters (the stages of a pipeline), so that all of them decide on the norm
            of the whole gradient. The groups of an FSDP1 model given as ``names`` are known without it. Not
            for gradients that are equal on all ranks (DDP, ZeroRedundancyOptimizer), nor for DTensors
            (FSDP2) alone, which have their own mesh.
        loss_group: the ranks that decide together, if they are not those of ``process_group`` or of the
            parameters' mesh; outside these they hold copies of the gradients. A step is judged by the mean of
            the losses of the ranks that have one, and a loss that is not finite on one rank skips the step
            on all. The group of a ``DistributedDataParallel`` model given as ``names`` is known without it.
            Where no group is known, the loss of a rank has no say. All ranks of the group must step equally
            often. In ``model.join()`` (uneven inputs) they do not: give ``names=model.module`` there, so that
            each rank decides alone, by gradients that are equal on all.
        buffers: the model whose buffers a skipped step restores to what they were before the step's first
            forward pass. A bad batch makes batch norm's running statistics NaN in the forward pass, and they
            would stay so. Costs a copy of the buffers per step. Several optimizers of one model share the
            copies. If they step after the same forward pass, a skip of any of them restores the buffers.
            A step is also skipped if a buffer that was finite has become NaN or inf since the last step,
            although loss and gradients are finite (reason ``FOUND_INF``); not where several ranks train of
            which it is not known that they decide together.
        check_replicas_every: compare the bits of the parameters and of the optimizer's state among the ranks
            that hold copies of them, after every so many steps, and raise
            :class:`stablenum.ReplicasPartedError` if they differ; None never compares. A check is one
            collective and one wait for the device; other steps have neither. Where no rank holds a copy it
            does nothing, and logs that once.
        log: a file to which each step's record is written as the run goes, for ``stablenum report``. On CUDA
            no step waits for it. Of several ranks, rank 0 writes. A file that is there is continued if it is
            such a log. ``history()``, ``state_dict()`` and the end of the program write what is still to be
            written.
        **overrides: fields of ``GuardConfig``: ``clip=1.0``, ``loss_scale="dynamic"``, ``spike="skip"``...
            ``ClipUpdateRMS`` needs memory for a copy of the parameters during a step.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, needs a closure (LBFGS), averages over ranks
            (PostLocalSGDOptimizer), steps in parts that the guard does not know, or is already guarded; a
            setting is unknown; ``names``, ``process_group``, ``loss_group``, ``buffers`` or ``log`` has a
            wrong type.
        ValueError: a setting has a wrong value; the optimizer has no parameters, one on the meta device, one
            twice, or one that is stepped inside the backward pass; ``names`` are those of other parameters;
            ``log`` is in a folder that does not exist, or is a file of another kind;
            ``process_group`` is given for whole gradients (ZeroRedundancyOptimizer, or the ranks of the
            ``DistributedDataParallel`` model in ``names``); this process is outside
            a group, or groups and meshes do not fit together; or a rule cannot work with this optimizer: a
            pattern of ``AdaptiveGradClip.exclude`` matches no parameter, gradients for that rule are plain
            shards, or a group lacks the learning rate that ``ClipUpdateRMS`` needs. The first step raises it
            if ranks have different settings, or different parameters and a rule by the joint norm behind one
            by the norms of single parameters.

    Warns:
        EpsTooSmallWarning: ``eps`` is 0 in the format of a parameter.
        UserWarning: the fused kernel of this version of torch leaves elements of 16-bit parameters on a CPU
            unmoved; from the first step, if it moves the wrong elements of one, because the gradient has
            other strides; later, once, if parameters move in a step that goes around the guard.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = wrap(torch.optim.AdamW(model.parameters(), fused=True), clip=1.0, names=model)
        >>> loss = model(torch.ones(2, 3)).square().mean()
        >>> opt.backward(loss)
        >>> opt.step()
        >>> opt.last["applied"], opt.loss_scale
        (True, 1.0)
    """
    check_optimizer(optimizer)
    made = make_config(config, overrides)
    every = steps_between_checks(check_replicas_every)
    if isinstance(optimizer, GuardedOptimizer):
        raise TypeError("optimizer is already guarded; wrap the original optimizer instead.")
    known = given_names(names)
    check_names(known, optimizer)
    of_model = groups_of(names)
    check_not_copies(process_group, of_model.loss)
    groups = Groups(
        of_model.parts if process_group is None else process_group,
        of_model.loss if loss_group is None else loss_group,
    )
    check_groups(groups, [p for group in optimizer.param_groups for p in group["params"]])
    check_rules(made, optimizer, groups.parts)
    warn_of_lost_eps(optimizer)
    kept = None if buffers is None else KeptBuffers(check_module("buffers", buffers))
    file = None if log is None else LogFile(log, argument="log")
    guarded = GuardedOptimizer(optimizer, made, known, groups, kept, every)
    if file is not None:
        guarded._guard.log_to(file)
    guarded._guard.warn_of_kernels()
    return guarded


class GuardedOptimizer(PassThrough):
    """The optimizer that :func:`wrap` returns. Other attributes are those of the inner optimizer."""

    # Set by the package: the diagnosis stands above the step, which cannot import it.
    _explain_step: Callable[..., Any]

    @property
    def config(self) -> GuardConfig:
        """The guard's settings, which may be replaced between two steps.

        Rules that stay keep their statistics, as they do when a state dict is loaded.
        """
        return self._guard.config

    @config.setter
    def config(self, config: GuardConfig) -> None:
        if not isinstance(config, GuardConfig):
            raise bad_type("config", "a GuardConfig", config)
        self._guard.configure(config)

    # --- the training step ---------------------------------------------------------------------

    def scale(self, loss: Tensor | EllipsisType = ...) -> Tensor:
        """Return the loss times the loss scale, in float32: call ``backward()`` on the result.

        The loss is kept for this step's record and finiteness check; the losses of several calls before one
        ``step()`` (gradient accumulation) add up. Without a loss scale the loss itself is returned.

        A loss for the parameters of two guarded optimizers has one scale: give both the same fixed scale,
        call ``scale`` of both and ``backward()`` on one result; or use one optimizer with several groups.
        Where several ranks decide together, the step is judged by the mean of their losses; where they are
        several and no group is known, losses are neither checked nor recorded.

        Args:
            loss: a () tensor, or a tensor whose sum is the loss. Without it, the scale itself is returned, ()
                float32, for gradients that are not those of a loss: multiply them by it.

        Raises:
            TypeError: ``loss`` is not a floating-point tensor.
            RuntimeError: :meth:`unscale_` was called for gradients that are still there.
        """
        self._guard.before_scaling()
        if isinstance(loss, EllipsisType):
            self._guard.scaled = True
            return self._guard.state.loss_scale.scale.clone()
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            got = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss must be a floating-point tensor; got {got}.")
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        # A copy of it: the caller may change the loss before the step.
        seen = wide.detach().sum() if wide.ndim or type(wide) is not Tensor else wide.detach().clone()
        noted = self._guard.loss
        self._guard.loss = seen if noted is None else noted + seen
        if self.config.loss_scale is None:
            return loss
        self._guard.scaled = True
        return wide * to_device(self._guard.state.loss_scale.scale, loss.device)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``scale(loss).backward(**kwargs)``.

        Raises:
            TypeError: ``loss`` is not a floating-point tensor.
            ValueError: ``loss`` does not depend on a parameter.
            RuntimeError: :meth:`unscale_` was called for gradients that are still there.
        """
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ValueError(
                "loss must depend on a parameter that requires a gradient; got a tensor that does not "
                "(computed under torch.no_grad(), detached, or made from a number?)."
            )
        self.scale(loss).backward(**kwargs)
        self._guard.after_backward()

    def unscale_(self) -> None:
        """Divide the gradients by the loss scale in place: call it before looking at them or changing them.

        Only between the backward pass and :meth:`step`, once, after the last gradient of the step has been
        added. The step still finds gradients that were inf or NaN here, even if they were clamped since. It
        multiplies by the scale again, so that all rules see what they always see, which costs two passes over
        the gradients: the guard's own clip rules cost none. Without a loss scale, nothing happens.

        Raises:
            RuntimeError: no loss was scaled since the last step, or this method was called since then.
            ValueError: a gradient is float16, in which most of it would become 0.

        Example:
            >>> import torch
            >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
            >>> opt = wrap(torch.optim.SGD([w], lr=1.0), loss_scale="dynamic")
            >>> opt.backward((w * w).sum() / 2)
            >>> opt.unscale_()
            >>> torch.nn.utils.clip_grad_norm_([w], 1.0).item()
            5.0
            >>> opt.step()
            >>> w
            Parameter containing:
            tensor([2.4000, 3.2000], requires_grad=True)
        """
        if self.config.loss_scale is not None:
            self._guard.unscale()

    def autocast(
        self, dtype: torch.dtype | None = None, *, policy: Policy | AppliedPolicy | str | Any = None
    ) -> AbstractContextManager[Any]:
        """Return ``torch.autocast`` for the parameters' device, in the format that the guard has decided on.

        With ``escalate`` in the settings, the guard's level selects one of its formats: a wider one, for a
        while, after repeated non-finite steps. Float32 means that autocast is off. On CUDA the level is read
        without a wait, so the format may change a step late.

        Args:
            dtype: the compute format at level 0. By default that of ``policy``, the first of ``escalate``,
                float16 with a loss scale, or bfloat16, in this order.
            policy: a policy, of which only the compute format is used (rules for modules need
                :func:`stablenum_torch.precision`); or the handle that :func:`stablenum_torch.precision`
                returned: its modules then compute in the guard's format or wider, and torch's autocast is
                not used.

        Raises:
            TypeError: ``policy`` is not a policy, or ``dtype`` is not a floating-point format.
            ValueError: ``policy`` is invalid, or does not compute in the first format of ``escalate``.
        """
        guard = self._guard
        return autocast(guard.config, guard.level, guard.parameters.now()[0].device.type, dtype, policy)

    @observed_when_asked
    @uncompiled_before_2_12
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Measure the gradients, decide, and apply the step or skip it entirely.

        After an applied step the gradients are unscaled and clipped, as with GradScaler, unless a fused
        kernel did this on the way; a skipped step may leave them as they are. If there is no gradient at
        all, nothing happens.

        Args:
            closure: re-evaluates the model and returns the loss; called once, before the decision, with
                gradients enabled. With a loss scale it has to call :meth:`backward` (or :meth:`scale`).

        Returns:
            The result of the closure, or None.

        Raises:
            TypeError: ``closure`` is not a function, or returns neither a real loss nor None (other results
                are passed on where :meth:`backward` was called in it); or it is missing for an optimizer
                whose step has two parts (SAM); nothing is stepped.
            RuntimeError: the guard has a loss scale, but no loss was multiplied by it since the last step
                (neither :meth:`scale` nor :meth:`backward` was called), and a gradient is not 0. Nothing is
                changed. Not with a ``process_group``, of which one rank alone may have a loss.
            NonFiniteError: the configured number of steps in a row was skipped, this one included.
            ReplicasPartedError: with ``check_replicas_every``, the ranks that hold copies of a parameter or
                of its state do not hold the same bits after the step.
        """
        if closure is not None:
            hint = "Call opt.backward(loss), then opt.step()."
            check_callable("closure", closure, "a function that returns the loss, or None", hint=hint)
        if self._guard.two_steps is not None:
            return self._step_in_two(closure)
        return self._whole_step(closure)

    def _whole_step(self, closure: Callable[[], Any] | None = None) -> Any:
        try:
            result = None if closure is None else self._run(closure)
            self._guard.step()
            return result
        finally:
            self._guard.loss = None
            self._beginnings.step_ended()
            if not torch.compiler.is_compiling():
                self._tell_schedulers()

    def _step_in_two(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            raise TypeError(
                f"step() of {type(self.inner).__name__} needs a closure, because its step has two parts. "
                "Write opt.first_step(zero_grad=True) after the backward pass, compute the loss again, "
                "opt.backward(loss), and opt.second_step(zero_grad=True); or opt.step(closure), which does "
                "all that. Nothing was changed."
            )
        self._first_step(zero_grad=True)
        result = self._run(closure)
        self._second_step()
        return result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; False before the first. Reading it waits for the device."""
        return bool(self._guard.state.skipped_in_a_row > 0)

    def hold(self, scheduler: S) -> S:
        """Make a scheduler stand still at a skipped step: its ``step()`` then does nothing.

        For schedulers that are stepped once after each step of this optimizer. Each of their steps waits for
        the device, which has to say whether the step was skipped.

        Args:
            scheduler: a scheduler made for this optimizer, or for the one inside. The object stays the same,
                and so does its state dict; its class becomes a subclass of the one it had.

        Returns:
            ``scheduler``.

        Raises:
            TypeError: ``scheduler`` is not a scheduler, or it is a ``ReduceLROnPlateau``, which is stepped
                once per evaluation.
            ValueError: ``scheduler`` belongs to another optimizer.

        Example:
            >>> import torch
            >>> w = torch.nn.Parameter(torch.ones(1))
            >>> opt = wrap(torch.optim.SGD([w], lr=1.0))
            >>> scheduler = opt.hold(torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
            >>> for factor in (1.0, float("nan"), 1.0):
            ...     opt.zero_grad()
            ...     opt.backward((factor * w).sum())
            ...     opt.step()
            ...     scheduler.step()
            >>> scheduler.get_last_lr()
            [0.25]
        """
        return hold(self, scheduler)

    def _run(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            result = closure()
        if isinstance(result, complex) or (isinstance(result, Tensor) and result.is_complex()):
            raise TypeError("closure must return a real loss; got a complex number. Return its real part.")
        known = result is None or hasattr(result, "__float__")
        if isinstance(result, (str, bytes)) or not (known or self._guard.loss is not None):
            hint = "Return the loss, or call opt.backward(loss) in the closure. Nothing was stepped."
            raise bad_type("closure's result", "a tensor, a number or None", result, hint=hint)
        if self._guard.loss is None and known and result is not None:
            # A plain number keeps its precision, whatever torch's default dtype and device are.
            plain = not isinstance(result, Tensor)
            loss = torch.as_tensor(result, dtype=torch.float64, device="cpu") if plain else result
            self._guard.loss = in_float32(loss.detach().sum())
        return result

    # --- explaining ----------------------------------------------------------------------------

    def explain(
        self,
        closure: Callable[..., Any],
        *args: Any,
        model: torch.nn.Module | None = None,
        rng_state: RngState | Tensor | None = None,
        **kwargs: Any,
    ) -> Report:
        """Replay the step that was just skipped and say what went wrong: which operation, where, and why.

        A skipped step changed nothing, so it can be run again: on the same batch, with the same loss scale,
        and with torch's random generators as they were when it began. Their states are kept whenever
        gradients are cleared and whenever a step ends, which takes a few microseconds, without a pass over
        the gradients or a wait for the device; a compiled step does not keep them. If random numbers are
        drawn between that moment and the forward pass (for the next batch), draw them in the closure too, or
        give ``rng_state``. Afterwards everything is as it was: see :func:`stablenum_torch.replay`.

        Args:
            closure: ``closure(*args, **kwargs)`` runs the forward pass on the batch that failed and returns
                the unscaled loss, or runs the backward pass itself. It need not step the optimizer.
            *args: arguments of ``closure``.
            model: gives modules their names; by default the model that the closure refers to.
            rng_state: the generators' state at the beginning of the step, if you have kept it.
            **kwargs: arguments of ``closure``.

        Raises:
            TypeError: ``closure``, ``model`` or ``rng_state`` has a wrong type.

        Returns:
            A report, as :func:`stablenum_torch.replay` returns it.

        Example:
            >>> import torch
            >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
            >>> opt = wrap(torch.optim.SGD([w], lr=0.1))
            >>> loss = w.log().sum()
            >>> opt.backward(loss)
            >>> opt.step()
            >>> report = opt.explain(lambda: w.log().sum())
            >>> report.findings[0].operation, report.verdict.cause.value
            ('log', 'domain')
        """
        check_callable("closure", closure, "a function that runs the forward pass and returns the loss")
        beginnings = (rng_state,) if rng_state is not None else self._beginnings.of_last_step or (None,)
        return self._explain_step(beginnings, functools.partial(closure, *args, **kwargs), model)

    # --- reading -------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without scaling. Reading it waits for the device."""
        return float(self._guard.state.loss_scale.scale)

    @property
    def last(self) -> Metrics:
        """What happened in the last step. Reading it waits for the device.

        Keys: applied, reason, grad_norm, loss_scale (the one it ran with), clip_coefficient, skipped_total,
        skipped_in_a_row, worst, step, loss.
        """
        return self._guard.last()

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """Return the last step as plain numbers for a logger. Reading them waits for the device.

        Keys: loss (left out if it was not given), grad_norm, loss_scale, clip_coefficient, applied (1 or 0),
        reason (:class:`stablenum.Reason`), skipped_total, skipped_in_a_row, and worst_rank where several
        ranks decide together and one of them can be named. Loss and norm are NaN or inf if they were so in
        the step.

        Args:
            prefix: put in front of each key, such as ``"guard/"``.

        Raises:
            TypeError: ``prefix`` is not a string.

        Example:
            >>> import torch
            >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
            >>> opt = wrap(torch.optim.SGD([w], lr=1.0), clip=1.0)
            >>> opt.backward((w * w).sum() / 2)
            >>> opt.step()
            >>> opt.scalars("guard/")["guard/grad_norm"]
            5.0
        """
        return scalars(self.last, prefix)

    def history(self) -> list[StepRecord]:
        """Return the last 128 steps, oldest first, each as in :attr:`last` without the counters.

        Reading them waits for the device. Steps that the log has yet to write are written.
        """
        self._guard.write_log()
        return history(self._guard.state, self._guard.names())

    @property
    def guard_state(self) -> GuardState:
        """The guard's live tensors.

        Reading ``guard_state.skipped_total`` as a tensor needs no wait. A tensor stays the same one as long
        as the guard lives, except that new settings or parameters change the shape of some rules' statistics,
        and a model that moves to another device takes all along.
        """
        self._guard.fit()
        return self._guard.state

    def parameter_names(self) -> list[str]:
        """Return a name for each parameter, in the order of the groups."""
        return self._guard.parameters.names()

    @property
    def scales_loss(self) -> bool:
        """Whether the guard has a loss scale, by which gradients are multiplied until the step."""
        return self._guard.config.loss_scale is not None
