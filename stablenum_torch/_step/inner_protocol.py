"""What torch asks of an optimizer, answered by the optimizer inside a guard.

These are its groups and its state, hooks, pickles and state dicts, and what a ``GradScaler`` or a scheduler
expects. What the guard adds for its users is in ``optimizer.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.interrupts import and_then
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum_torch._devices.direct_step import is_observed
from stablenum_torch._devices.generators import Beginnings
from stablenum_torch._devices.groups import Groups, restored_group, saved_group
from stablenum_torch._devices.uncompiled import uncompiled, uncompiled_before_2_12
from stablenum_torch._step.buffers import KeptBuffers
from stablenum_torch._step.carried import KEY, carrying, make_room, taken
from stablenum_torch._step.checks import check_state_dict, state_dict_of, two_loss_scales
from stablenum_torch._step.guard import Guard
from stablenum_torch._step.schedulers import remember
from stablenum_torch._step.two_steps import PARTS, TwoSteps

__all__ = ["PassThrough", "observed_when_asked", "put_in_place_of_scaler", "take_lost_rules"]

P = ParamSpec("P")
T = TypeVar("T")

_ALONE = Groups()


class PassThrough(Optimizer):
    """An optimizer around another one, to which it passes on what torch asks.

    Attributes:
        inner: the optimizer inside.
    """

    inner: Optimizer
    _guard: Guard

    _in_place_of_scaler = False

    def __init__(
        self,
        optimizer: Optimizer,
        config: GuardConfig,
        names: Mapping[Tensor, str],
        groups: Groups = _ALONE,
        buffers: KeptBuffers | None = None,
        check_replicas_every: int | None = None,
    ) -> None:
        # Optimizer.__init__ would copy the groups into a new list. __setstate__, which torch calls after
        # unpickling, sets up hooks and profiling around the existing ones.
        self.__setstate__(
            {
                "inner": optimizer,
                "config": config,
                "_names": dict(names),
                "_process_group": groups.parts,
                "_loss_group": groups.loss,
                "_state": None,
                "_buffers": buffers,
                "_check_replicas_every": check_replicas_every,
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        guard = self._guard
        return {  # the keys are a file format
            "inner": self.inner,
            "config": guard.config,
            "_names": guard.parameters.given,
            "_process_group": saved_group(guard.groups.parts),
            "_loss_group": saved_group(guard.groups.loss),
            "_state": guard.state,
            "_buffers": guard.buffers,
            "_check_replicas_every": None if guard.replicas is None else guard.replicas.every,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]
        make_room(self.inner)
        self._guard = Guard(
            self.inner,
            state["config"],
            state["_names"],
            Groups(restored_group(state["_process_group"]), restored_group(state["_loss_group"])),
            state["_state"],
            state["_buffers"],
            state["_check_replicas_every"],
        )
        self._beginnings = Beginnings()
        super().__setstate__({})
        remember(self)

    def __getattr__(self, name: str) -> Any:
        # Extras of unusual optimizers: schedule-free's train() and eval(), the _get_lr() of transformers'
        # Adafactor. But never the private protocol between an optimizer and torch.
        known = "inner" in self.__dict__ and not (name.startswith("_") and not _defines(self.inner, name))
        if known and name in PARTS and self._guard.two_steps is not None:
            return self._first_step if name == PARTS[0] else self._second_step
        missing = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not known:
            raise AttributeError(missing, name=name, obj=self)
        try:
            return getattr(self.inner, name)
        except AttributeError as error:
            # The first line of the user's own property may have failed, so that its error is reported, too.
            raise AttributeError(
                f"{missing}, nor has what it guards: {error}", name=name, obj=self
            ) from error

    # --- a step in two parts, such as that of SAM --------------------------------------------------

    @torch.no_grad()
    def _first_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the first part of a step, unless its gradient or loss is not finite."""
        two_steps = self._in_two_steps()
        clears, first = _clears(self.inner.first_step, args, kwargs)
        result = self._guard.climb(two_steps, first)
        if clears:
            self.inner.zero_grad()
        return result

    @torch.no_grad()
    def _second_step(self, *args: Any, **kwargs: Any) -> None:
        """Measure the second gradient, decide, and go back and step, or go back alone."""
        two_steps = self._in_two_steps()
        if not two_steps.climbed:
            raise RuntimeError(
                "second_step() must follow first_step(); got none since the last step. Write "
                "opt.backward(loss), opt.first_step(zero_grad=True), opt.backward(loss_of_the_same_batch), "
                "opt.second_step(zero_grad=True). Nothing was changed."
            )
        clears, two_steps.second = _clears(self.inner.second_step, args, kwargs)
        self._whole_step()
        if two_steps.climbed:  # there was no gradient at all
            two_steps.go_back()
        if clears:
            self.zero_grad()

    def _in_two_steps(self) -> TwoSteps:
        two_steps = self._guard.two_steps
        assert two_steps is not None  # __getattr__ has looked
        return two_steps

    def _whole_step(self) -> None:
        """Take a step of the guard."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._guard.config}, {self.inner!r})"

    # --- shared with the inner optimizer -------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own list."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's own state, keyed by parameter."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's own defaults; none for an optimizer without them."""
        if not hasattr(self.inner, "defaults"):
            self.inner.defaults = {}
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. The statistics that rules keep per parameter grow with it."""
        before = len(self.inner.param_groups)
        self.inner.add_param_group(param_group)
        try:
            self._guard.fit()
        except (TypeError, ValueError):  # a guard refuses the group
            del self.inner.param_groups[before:]
            raise
        self._guard.warn_of_kernels()

    @uncompiled_before_2_12
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients and the loss that :meth:`scale` recorded for this step.

        To drop a batch after :meth:`scale`, call this method, not the model's: the loss of that batch would
        otherwise count in the next step.
        """
        self._guard.notice_other_steps(ends=True)
        self._guard.loss = self._guard.found_inf = self._guard.versions = None
        self.inner.zero_grad(*args, **kwargs)
        self._beginnings.gradients_cleared()

    # --- beside a GradScaler and schedulers --------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Torch's protocol. If it is True, a GradScaler sets grad_scale on this object before it drops a step
        # itself: the one moment at which a second loss scale can be found in time. If it is False, the
        # GradScaler unscales the gradients, because the inner kernel would not see a grad_scale set here.
        return self._guard.config.loss_scale is not None and not self._in_place_of_scaler

    @property
    def grad_scale(self) -> Tensor:
        raise AttributeError("grad_scale is never set on a guarded optimizer.")

    @grad_scale.setter
    def grad_scale(self, scale: Tensor | None) -> None:
        raise two_loss_scales(self._guard.config)

    def _tell_schedulers(self) -> None:
        """Tell a scheduler that was made for the inner optimizer of a step, even if it was skipped.

        It would otherwise warn that it was called too early.
        """
        if hasattr(self.inner.step, "_wrapped_by_lr_sched"):
            self.inner._opt_called = True

    # --- saving --------------------------------------------------------------------------------

    def guard_state_dict(self) -> dict[str, Any]:
        """Return the guard's state as JSON values, the same as ``stablenum_jax`` writes."""
        return self._guard.to_dict()

    def load_guard_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`guard_state_dict` wrote, here or in another framework.

        Raises:
            ValueError: ``state`` is not a guard's state, or has another shape; nothing is changed.

        Warns:
            StatisticsNotLoadedWarning: ``state`` has no statistics that fit a rule; the rule keeps its own.
        """
        self._guard.load(self._guard.parsed(state))

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with the guard's under the key ``"stablenum"``.

        A plain torch optimizer can load it, too. The first parameter group has the guard's state once more,
        as text under the same key: ``torch.distributed.checkpoint.state_dict`` keeps only what is in groups
        or belongs to a parameter.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        guard = self.guard_state_dict()
        state = carrying(self.inner.state_dict(), guard) | {KEY: guard}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    @uncompiled
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state dict of a guarded optimizer, or of a plain one: the guard then keeps its state.

        Raises:
            ValueError: the dict does not fit this optimizer; nothing is changed.
            TypeError: ``state_dict`` is not a mapping; nothing is changed.

        Warns:
            StatisticsNotLoadedWarning: a rule has no saved statistics; in the first step, if the dict has no
                guard's state and the guard has rules that learn from steps.
        """
        state = state_dict_of(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state)
            state = state if replaced is None else dict(replaced)
        check_state_dict(state)
        state, carried = taken(state)
        missing = KEY not in state and carried is None
        guard = None if missing else self._guard.parsed(state.pop(KEY, carried))
        self._load_both(state, guard)
        self._guard.left_out = guard is None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_both(self, state: dict[str, Any], guard: GuardState | None) -> None:
        """Load the inner optimizer's state and the guard's: both or, after an interrupt, neither."""

        def load() -> None:
            self.inner.load_state_dict(state)
            make_room(self.inner)

        if guard is None:
            load()
        else:
            and_then(load, functools.partial(self._guard.load, guard))


def observed_when_asked(step: Callable[P, T]) -> Callable[P, T]:
    """Return a step of an optimizer that runs torch's hooks, and its entry in a profile, where there is one.

    torch puts that around the ``step`` of every optimizer, whether or not anyone looks.
    """
    observed = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def stepped(*args: P.args, **kwargs: P.kwargs) -> T:
        looks = torch.compiler.is_compiling() or is_observed(cast("Optimizer", args[0]))
        return (observed if looks else step)(*args, **kwargs)

    stepped.hooked = True  # type: ignore[attr-defined]  # torch puts nothing around it then
    return stepped


def _clears(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Callable[[], Any]]:
    """Return whether a call of a part of a step is to clear the gradients, and the call itself."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return bool(bound.arguments.get("zero_grad", False)), functools.partial(method, *args, **kwargs)


def take_lost_rules(optimizer: PassThrough) -> list[str] | None:
    """Return the rules that begin from scratch beside a loaded optimizer, of which no warning follows then.

    This is for integrations that know why the guard's state is missing. None if it is not, or if a step has
    been taken.
    """
    return optimizer._guard.take_lost_rules()


def put_in_place_of_scaler(optimizer: PassThrough, yes: bool) -> None:
    """Say whether an optimizer is stepped by code that calls ``unscale_`` as if it had a ``GradScaler``.

    This is for integrations that put the guard where a partner has its scaler.
    """
    optimizer._in_place_of_scaler = yes


def _defines(optimizer: Optimizer, name: str) -> bool:
    """Return whether a class of the optimizer that is not torch's own defines an attribute."""
    if name.startswith("__"):
        return False
    classes = (cls for cls in type(optimizer).__mro__ if cls.__module__.partition(".")[0] != "torch")
    return any(name in vars(cls) for cls in classes)
