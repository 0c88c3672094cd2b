"""The guard of one optimizer, and its step: measure the gradients, decide in the core, apply or skip.

Two paths lead to the same decision. Reading values costs nothing on a CPU, so the host may branch on them
(``on_host.py``). On an accelerator, everything stays on the device (``on_device.py``).
``docs/how-it-works.md``, "Where the decision is made", compares all the ways in which a decision is computed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.interrupts import finish
from stablenum._support.user_warnings import warn
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState, init_guard
from stablenum.guard.faults import BadSetting
from stablenum.guard.observation import Fault
from stablenum.guard.readout import Metrics, Names, StepRecord, metrics
from stablenum.guard.reasons import Reason
from stablenum.guard.restored import follow_config, learning_rules
from stablenum.guard.statedict import StatisticsNotLoadedWarning, state_from_dict, state_to_dict
from stablenum.rules.spikes import forget_norms, joined, watches_norms
from stablenum.runlog.lines import Rewind
from stablenum.runlog.writing import LogFile
from stablenum_torch._devices.groups import Groups
from stablenum_torch._devices.host_decide import HostGuard
from stablenum_torch._devices.joint import Joint, joint_of
from stablenum_torch._devices.kernels.device_guard import DeviceGuard
from stablenum_torch._devices.ranks import initialized, several_ranks
from stablenum_torch._devices.state import copy_into, in_memory_of, moved_to
from stablenum_torch._devices.uncompiled import uncompiled
from stablenum_torch._devices.waits import HaltWatch, LevelWatch, StepWatch, capturing
from stablenum_torch._step.apply import multiply_gradients
from stablenum_torch._step.buffers import KeptBuffers
from stablenum_torch._step.by_kernels import can_launch
from stablenum_torch._step.changed import Versions, have_moved, largest_elements, versions, writes_to
from stablenum_torch._step.checks import (
    check_can_unscale,
    check_parameters,
    check_rules,
    check_stages,
    check_unscaled,
    warn_of_forgotten_elements,
    warn_of_other_elements,
    warn_of_other_steps,
)
from stablenum_torch._step.faults import Settings, fault
from stablenum_torch._step.first_look import FirstLook
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import gradient_norms_without_wait
from stablenum_torch._step.measure.together import widths
from stablenum_torch._step.on_device import apply_on_device, decided_on_device, step_by_kernels
from stablenum_torch._step.on_host import step_on_host
from stablenum_torch._step.parameters import NamesOnDemand, TakingPart, TrackedParameters
from stablenum_torch._step.replicas import ReplicaCheck
from stablenum_torch._step.run_log import Logged, StepLog
from stablenum_torch._step.two_steps import TwoSteps, parts_of

__all__ = ["Guard", "on_device_path"]


_QUIET = 1000  # steps between messages about parameters that have joined

_logger = logging.getLogger("stablenum")


class Guard:
    """The guard of one optimizer: its state, and what the host keeps from step to step.

    Args:
        optimizer: the inner optimizer.
        config: the settings.
        names: the names of parameters that the user gave.
        groups: the groups of ranks that the user gave.
        state: the guard's tensors; by default a fresh state.
        buffers: a model's buffers, which a skipped step keeps too.
        check_replicas_every: after how many steps replicas are compared; None never compares.

    Attributes:
        parameters: the optimizer's parameters.
        replicas: the check of replicas, if there is one.
        on_host: whether steps are decided on the host; None means: if the tensors are on the host.
        loss: () the unscaled loss of the step in progress, if known. It is kept here, not in the wrapper,
            because torch.compile does not see a value that was assigned to an attribute of an optimizer.
        found_inf: () bool, whether a gradient was not finite when ``unscale`` was called for this step; None
            if it was not called.
        two_steps: what the guard keeps of an optimizer that steps in two parts; None for an ordinary one.
        versions: what the gradients were at the end of the backward pass, in the few steps in which changes
            by other code are looked at; otherwise None.
        bad_setting: the optimizer's setting that was not finite in the last step, if one was not.
        left_out: whether the optimizer's state was loaded last from a dict without the guard's.
        scaled: whether the gradients may be those of a scaled loss: one has been scaled since the last step,
            or the gradients are older than the guard.
    """

    on_host: bool | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        config: GuardConfig,
        names: Mapping[Tensor, str],
        groups: Groups,
        state: GuardState | None = None,
        buffers: KeptBuffers | None = None,
        check_replicas_every: int | None = None,
    ) -> None:
        self.buffers = buffers
        self.optimizer, self.config, self.groups = optimizer, config, groups
        self.parameters = TrackedParameters(optimizer, config, names)
        params = self.parameters.now()
        if state is None:
            state = init_guard(config, len(params), xp=torch_namespace, device=params[0].device)
        self.state = state
        # Created by the first step that needs one.
        self._host: HostGuard | None = None
        self._kernels: DeviceGuard | None = None
        self._joint: Joint | None = None
        # The first step finds out, because ranks have to find out together; without ranks it would only break
        # the graph of a compiled step.
        self._joint_known = not initialized()
        self._lost_loss = False
        self.replicas = None if check_replicas_every is None else ReplicaCheck(check_replicas_every)
        self._halted, self._level, self._watch = HaltWatch(), LevelWatch(), StepWatch()
        self.loss: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.versions: Versions | None = None
        self._writes: list[int] | None = None  # to parameters, when a loss was given for the step in progress
        self._told_of_steps = False
        self._watches_norms = watches_norms(config.spike_rule)
        self._taking_part = TakingPart()
        self._first_look = FirstLook()
        self._settings = Settings()
        self._joined_until = 0
        self.bad_setting: BadSetting | None = None
        self.two_steps = TwoSteps(optimizer) if parts_of(optimizer) else None
        # What a decision steps: the optimizer, or the second part of its step.
        self._stepped: Any = optimizer if self.two_steps is None else self.two_steps
        self.left_out = False
        self.scaled = any(p.grad is not None for p in params)
        self._warned = False
        self._log: StepLog | None = None

    def log_to(self, file: LogFile) -> None:
        """Write the record of each step to a file, from the next step until this guard is dropped."""
        self._log = StepLog(file)
        weakref.finalize(self, self._log.close)  # at the end of the program at the latest

    def _logged(self) -> Logged:
        own, settings = self.parameters.names, self.config.to_dict
        return Logged(self.state, self.names, own, self.parameters.now(), settings, self.optimizer)

    @uncompiled
    def _log_step(self) -> None:
        # A compiled step breaks its graph here.
        if self._log is not None:
            self._log.after_step(self.state, self._logged)

    @uncompiled
    def write_log(self) -> None:
        """Write all steps so far to the log, if there is one. The host waits for the device."""
        if self._log is not None:
            self._log.flush(self._logged())

    def log_rewind(self, rewind: Rewind, records: Sequence[StepRecord]) -> None:
        """Write to the log, if there is one, why this state was loaded; ``records`` is its history."""
        if self._log is not None:
            self._log.go_back(rewind, records)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale in place, so that the user can look at them and change them.

        Raises:
            RuntimeError: no loss was scaled since the last step, or this method was called since then.
            ValueError: a gradient is float16, in which it would lose most of its digits.
        """
        params = self.fit()
        check_can_unscale(params, self.scaled, self.found_inf is not None)
        norms = gradient_norms_without_wait(params, self.state.step.device)
        self.found_inf = torch.logical_not(torch.isfinite(norms.sum()))
        self._watch.by_hand = True
        multiply_gradients(params, 1.0 / self.state.loss_scale.scale)

    def warn_of_kernels(self) -> None:
        """Warn, once, if the optimizer's kernel leaves elements of its parameters unmoved or moves others."""
        self._warned = (
            self._warned
            or warn_of_forgotten_elements(self.optimizer)
            or warn_of_other_elements(self.optimizer, self._name_of)
        )

    def _name_of(self, parameter: Tensor) -> str:
        return next(self.parameters.name(i) for i, p in enumerate(self.parameters.known) if p is parameter)

    def notice_other_steps(self, *, ends: bool = False) -> None:
        """Warn, once, if parameters have moved since a loss was given, but not in a step of this guard.

        Args:
            ends: whether the loss that was given is dropped now; otherwise one is given.
        """
        if torch.compiler.is_compiling() or self._told_of_steps:
            return
        before, now = self._writes, writes_to(self.parameters.few)
        self._writes = None if ends else now
        if before is None or before == now or len(before) != len(now):
            return
        if have_moved(before, now):
            self._told_of_steps = True
            warn_of_other_steps(self.optimizer)

    def before_scaling(self) -> None:
        """Check that no gradient has been divided by the loss scale already: others would be added to it.

        Raises:
            RuntimeError: there is one. Nothing is changed.
        """
        self.notice_other_steps()
        if self.found_inf is None:
            return
        if any(p.grad is not None for p in self.parameters.now()):
            raise RuntimeError(
                "a loss was scaled after unscale_(): its gradients, multiplied by the loss scale, would be "
                "added to gradients that no longer are. Call unscale_() after the last backward pass of a "
                "step; to drop the gradients instead, call opt.zero_grad()."
            )
        self.found_inf = None  # the batch was dropped

    def after_backward(self) -> None:
        """Remember which gradients there are, if this step is one in which changes to them are looked at."""
        compiling = torch.compiler.is_compiling()
        if self.config.loss_scale is not None and not compiling and self._watch.looks_closer():
            self.versions = versions(self.parameters.now())

    def _look_closer(self, params: Sequence[Tensor]) -> None:
        """Look at gradients that other code has changed while they are multiplied by the loss scale."""
        before, self.versions = self.versions, None
        if before is None or self.found_inf is not None:
            return
        changed, scale = versions(params) != before, self.state.loss_scale.scale
        elements = largest_elements(params, scale.device) if changed else None
        self._watch.looked_closer(None if elements is None else torch.cat([elements, scale[None].double()]))

    def step(self) -> None:
        """Step the optimizer as the core decides, and bring the state up to date.

        The state is written last, whole, and as soon as the inner step has returned. An exception at any
        moment, Ctrl-C too, leaves the state of before with parameters that have not moved, or that of after
        with parameters that have; except in the inner step itself, where some parameters may have moved, and
        the state is that of before. If there is no gradient at all, nothing happens.

        Raises:
            RuntimeError: there is a loss scale, but no loss was multiplied by it. Not with a process group.
            ReplicasPartedError: replicas were compared after this step, and differ.
            NonFiniteError: the configured number of steps in a row could not be applied.
        """
        params = self.fit()
        joint = self._joint if self._joint_known else self._ranks_together()
        if self.left_out:
            self._warn_of_lost_state()
        # Even a rank without gradients has to take part in computing the joint norm.
        if joint is None and all(p.grad is None for p in params):
            return
        # In a pipeline of ranks, only the last one has a loss to scale.
        if self.config.loss_scale is not None and not self.scaled and self.groups.parts is None:
            check_unscaled(params)
        device = params[0].device
        if self.state.step.device != device:  # the model was moved after it was wrapped
            self.state = moved_to(self.state, device)
        if self.versions is not None and not torch.compiler.is_compiling():
            self._look_closer(params)
        # Each rank has its own loss, and only the gradients are the same on all ranks, so one bad loss would
        # make ranks disagree that do not decide together.
        apart = joint is None and several_ranks()
        if apart and self.loss is not None:
            self._tell_of_lost_loss()
        first = None if self.two_steps is None else self.two_steps.bad_loss  # it tells more than the second
        loss = self.loss if first is None else first
        loss = None if apart else loss
        found_inf = self._found_elsewhere(device, apart=apart)
        if self._watches_norms and not torch.compiler.is_compiling():
            self._notice_joined(params, joint)
        inputs = StepInputs(
            self.config,
            params,
            self.parameters.included,
            device,
            joint,
            loss,
            *self._faults(found_inf, joint),
            bad_at_first=self._bad_at_first(joint),
        )
        if self.found_inf is not None:
            # First, so that an interrupt leaves nothing to the gradients of a later step.
            self.found_inf = None
            multiply_gradients(params, self.state.loss_scale.scale)  # rules compare the scaled gradients
        on_host = self._in_host_memory(params) if self.on_host is None else self.on_host
        if on_host:
            host = self._host_guard()
            step_on_host(self._stepped, host, inputs, functools.partial(self._commit, host.write))
        else:
            self._step_on_device(inputs)
        if not torch.compiler.is_compiling():  # in a compiled step it would break the graph
            self._watch.after_step(self.state, self.names, decided_on_host=on_host)
        if self._log is not None:
            self._log_step()
        if self.replicas is not None:
            self._compare_replicas(self.replicas)
        if self.config.skip_limit is not None:
            self._raise_if_halted()

    def _step_on_device(self, inputs: StepInputs) -> None:
        commit = functools.partial(self._commit, self._write)
        measured = None
        kernels = self._own_kernels(len(inputs.params)) if can_launch(self.state.step) else None
        if kernels is not None:
            done, measured = step_by_kernels(self._stepped, kernels, inputs, commit)
            if done:
                return
        decided = decided_on_device(self._stepped, self.state, inputs, measured)
        apply_on_device(self._stepped, self.state, inputs, decided, commit)

    def _own_kernels(self, n: int) -> DeviceGuard | None:
        known = self._kernels
        if known is None or not known.is_for(self.config, self.state, n):
            if capturing():  # which a copy from the host would end
                return None
            known = self._kernels = DeviceGuard(self.config, self.state, n)
        return known

    def _write(self, after: GuardState | None) -> None:
        if after is not None:  # otherwise a kernel has written it
            copy_into(self.state, after)

    def climb(self, two_steps: TwoSteps, first: Callable[[], Any]) -> Any:
        """Take the first part of a step that has two; see :class:`TwoSteps`.

        Raises:
            RuntimeError: there is a loss scale, but no loss was multiplied by it. Nothing is changed.
        """
        params = self.fit()
        if self.config.loss_scale is not None and not self.scaled and self.groups.parts is None:
            check_unscaled(params)
        result = two_steps.climb(self.loss, self.found_inf, first)
        self._writes = None
        self.scaled, self.loss, self.found_inf, self.versions = False, None, None, None
        return result

    @uncompiled
    def _ranks_together(self) -> Joint | None:
        """Return the ranks that decide together; None if this process decides alone.

        Raises:
            ValueError: ranks have different settings, or groups or rules do not fit the parameters.
        """
        if not self._joint_known:
            params, included = self.parameters.now(), self.parameters.included
            each = widths(self.config, params, included)
            # Ranks that compare replicas after different numbers of steps would wait for each other forever.
            every = None if self.replicas is None else self.replicas.every
            settings = self.config.to_dict() | {"check_replicas_every": every}
            joint = joint_of(self.groups, params, settings, self.parameters.names(), each)
            if joint is not None and joint.apart:
                check_stages(self.config)
            self._joint, self._joint_known = joint, True
        return self._joint

    @uncompiled
    def _compare_replicas(self, check: ReplicaCheck) -> None:
        check.after_step(
            self._joint,
            self.groups,
            self.optimizer,
            self.parameters.now(),
            self.parameters.names,
            lambda: int(self.state.step) - 1,
        )

    @uncompiled
    def _tell_of_lost_loss(self) -> None:
        if not self._lost_loss:
            self._lost_loss = True
            _logger.warning(
                "Several ranks train here, and it is not known which of them decide together, so the loss "
                "has no say in what the guard decides, and is not recorded. In model.join() that is right. "
                "Otherwise pass names=model for DistributedDataParallel, loss_group= for ranks with equal "
                "gradients, or process_group= for stages of a pipeline and other ranks with different ones, "
                "which otherwise decide apart."
            )

    def _found_elsewhere(self, device: torch.device, *, apart: bool) -> Tensor | None:
        """Return whether something besides these gradients was not finite: () bool, or None if unknown.

        Each rank has buffers of its own, so they have a say only where ranks decide together, or one alone.
        """
        found = [
            self.found_inf,
            None if apart or self.buffers is None else self.buffers.poisoned(device),
            None if self.two_steps is None else self.two_steps.bad,
        ]
        known = [flag for flag in found if flag is not None]
        return torch.stack(known).any() if known else None

    def _notice_joined(self, params: Sequence[Tensor], joint: Joint | None) -> None:
        """Have the spike rule forget the norms of gradients without parameters that take part from now on.

        Ranks that decide together must forget alike, so there it counts which parameters are frozen, not
        which have a gradient on this rank; and ranks with different parameters never forget.
        """
        if joint is not None and joint.apart:
            return
        now = [p.grad is not None for p in params] if joint is None else [p.requires_grad for p in params]
        rule = self.config.spike_rule
        found = self._taking_part.joined(now, 0 if rule is None else rule.window)
        if found:
            self._forget_norms([self.parameters.name(i) for i in found])

    def _forget_norms(self, names: Sequence[str]) -> None:
        rule, spike = self.config.spike_rule, self.state.spike
        if rule is None or not self._watches_norms:
            return
        copy_into(self.state, self.state._replace(spike=forget_norms(spike, xp=torch_namespace)))
        step = self._taking_part.step
        if step > rule.min_samples and step >= self._joined_until:  # before, the rule judges nothing anyway
            self._joined_until = step + _QUIET
            _logger.warning(joined(rule, names))

    def _faults(self, found_inf: Tensor | None, joint: Joint | None) -> tuple[Tensor | None, Fault | None]:
        """Return what forbids this step besides its gradients: ``found_inf`` and ``fault`` of its inputs."""
        if torch.compiler.is_compiling():  # which takes settings for constants
            return found_inf, None
        setting = self._settings.first_bad(self.optimizer)
        if setting is None:
            self.bad_setting = None
            return found_inf, None
        if self.bad_setting is None or setting.place != self.bad_setting.place:
            _logger.warning(f"A step is skipped, because {setting}")
        self.bad_setting = setting
        if joint is None:
            return found_inf, fault(Reason.NONFINITE_SETTING, device=self.state.step.device)
        return torch.ones((), dtype=torch.bool, device=self.state.step.device), None

    def _bad_at_first(self, joint: Joint | None) -> Callable[[], set[int]] | None:
        if joint is not None or torch.compiler.is_compiling():  # then no parameter is looked at later either
            return None
        self._first_look.look(self.parameters.known)
        return self._first_look.bad

    def _commit(self, write: Callable[[Any], None], after: Any) -> None:
        """Complete a step: write the next state, restore the buffers of a skipped step, forget the loss.

        An interrupted call is completed by a second one.
        """
        write(after)
        if self.buffers is not None:
            self.buffers.after_step(self.state.skipped_in_a_row == 0)
        if self.two_steps is not None:
            self.two_steps.after_step(applied=bool(self.state.skipped_in_a_row == 0))
        self.scaled, self.loss, self._writes = False, None, None

    def _in_host_memory(self, params: Sequence[Tensor]) -> bool:
        """Return whether this process can read all that a decision needs, except other ranks' norms."""
        return not torch.compiler.is_compiling() and self.state.step.is_cpu and all(p.is_cpu for p in params)

    def _host_guard(self) -> HostGuard:
        if self._host is None or not self._host.is_for(self.config, self.state):
            self._host = HostGuard(self.config, self.state)
            self.warn_of_kernels()  # parameters may have been cast since the optimizer was wrapped
        return self._host

    @uncompiled
    def _raise_if_halted(self) -> None:
        # A compiled step breaks its graph here: only the host can raise.
        self._halted.after_step(self.state, self.names, self.config, self.bad_setting)

    def names(self) -> Names:
        """Return the parameters' names; where ranks decide together, those of each rank."""
        own = self.parameters.names()
        return own if self._joint is None else self._joint.names_by(own)

    def last(self) -> Metrics:
        """Return the last step. The host waits for the device."""
        names = NamesOnDemand(self.parameters) if self._joint is None else self.names()
        last = metrics(self.state, names)
        self._watch.after_read(self.state, last)
        return last

    def level(self) -> int:
        """Return the level of the next step, as far as the host knows: how many formats wider than the first
        it computes in."""
        return self._level.read(self.state.escalation.level)

    # --- the parameters --------------------------------------------------------------------------

    def fit(self) -> list[Tensor]:
        """Return all parameters, after extending the state by those that were added since the last call.

        Parameters may have been added to the inner optimizer directly.
        """
        params = self.parameters.now()
        if not self.parameters.are(params):
            self._follow(params)
        return params

    @uncompiled
    def _follow(self, params: list[Tensor]) -> None:
        check_parameters(self.optimizer)
        check_rules(self.config, self.optimizer, self.groups.parts)
        parameters, known = self.parameters.looked_up_again(self.config), set(self.parameters.known)
        self._go_on_with(self.parameters.extended(self.state, parameters), parameters, self.config)
        new = [parameters.name(i) for i, p in enumerate(params) if p not in known]
        if new:
            self._forget_norms(new)

    # --- saving --------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        self.fit()
        self.write_log()
        return state_to_dict(self.state, self.parameters.names_if_known())

    def parsed(self, saved: Mapping[str, Any]) -> GuardState:
        """Return the state that :meth:`to_dict` wrote, on this guard's device and in its shape.

        Raises:
            ValueError: ``saved`` is not a state, or has another shape.
        """
        self.fit()
        names, device = self.parameters.names_if_known(), self.state.step.device
        state = state_from_dict(saved, self.state, xp=torch_namespace, names=names, device=device)
        return self._following(self.config, state)

    @staticmethod
    def _following(config: GuardConfig, state: GuardState) -> GuardState:
        """Return a state that was made under other settings, with what is a setting taken from ``config``."""
        own = init_guard(config, 0, xp=torch_namespace, device=state.step.device).loss_scale
        return follow_config(config, own, state, state, xp=torch_namespace)

    @uncompiled
    def configure(self, config: GuardConfig) -> None:
        """Follow other settings from the next step on. Rules that stay keep their statistics.

        Raises:
            RuntimeError: a loss has been multiplied by the scale of the settings so far.
            ValueError: a rule cannot work with this optimizer. Nothing is changed.
        """
        # Gradients that were computed without a loss scale mean the same under any.
        may_be_scaled = self.scaled and self.config.loss_scale is not None
        waiting = may_be_scaled and any(p.grad is not None for p in self.parameters.now())
        if config.loss_scale != self.config.loss_scale and (waiting or self.loss is not None):
            raise RuntimeError(
                "config.loss_scale cannot change between the scaling of a loss and its step(): the gradients "
                "would be divided by another scale. Change it after step()."
            )
        check_rules(config, self.optimizer, self.groups.parts)
        self.fit()
        parameters = self.parameters.looked_up_again(config)
        state = self._following(config, self.parameters.extended(self.state, parameters))
        self._go_on_with(state, parameters, config)
        if self._log is not None:
            self._log.settings_changed(self._logged())

    def _go_on_with(self, state: GuardState, parameters: TrackedParameters, config: GuardConfig) -> None:
        """Replace the state, the parameters and the settings: all of them, even if Ctrl-C comes between.

        Tensors of the state that still fit keep their memory.
        """
        kept = in_memory_of(self.state, state)

        def replace() -> None:
            copy_into(kept, state)
            self.state, self.parameters, self.config, self._writes = kept, parameters, config, None
            self._joint_known = not initialized()
            self._watches_norms = watches_norms(config.spike_rule)

        finish(replace)

    def load(self, state: GuardState) -> None:
        """Continue from ``state``, copied into the memory of the present state."""
        self.write_log()  # of the steps that are gone then
        finish(functools.partial(copy_into, self.state, state))
        self.left_out, self._writes = False, None
        if self._log is not None:
            self._log.went_to(int(state.step))

    def take_lost_rules(self) -> list[str] | None:
        """Return the rules that begin from scratch beside an optimizer whose state was loaded.

        None if the optimizer begins from scratch too, and every time but the first.
        """
        lost = self.left_out and int(self.state.step) == 0
        self.left_out = False
        return learning_rules(self.config, self.state) if lost else None

    @uncompiled
    def _warn_of_lost_state(self) -> None:
        """Warn if rules that learn from steps begin from scratch beside an optimizer that does not.

        This is done in the first step, because the guard's state may be loaded after the optimizer's.
        """
        lost = self.take_lost_rules()
        if lost:
            warn(
                "The optimizer's state was loaded without the guard's. These rules start from scratch: "
                f"{', '.join(lost)}. If the run had no guard before, nothing is lost. Otherwise save all "
                "that opt.state_dict() returns; or opt.guard_state_dict() too, and call "
                "opt.load_guard_state_dict().",
                StatisticsNotLoadedWarning,
            )


@contextlib.contextmanager
def on_device_path() -> Iterator[None]:
    """While the context lasts, every guard takes the path of accelerators, even for CPU tensors.

    This is for tests and for counting operations.
    """
    before, Guard.on_host = Guard.on_host, False
    try:
        yield
    finally:
        Guard.on_host = before
