"""The parameters that a guard tracks: their names, and which of them the rule for units applies to."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, overload

import array_api_compat.torch as torch_namespace
from torch import Tensor
from torch.optim import Optimizer

from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState, init_guard
from stablenum.guard.statedict import StatisticsNotLoadedWarning, state_from_dict, state_to_dict
from stablenum_torch._step.changed import few_of

__all__ = ["NamesOnDemand", "TakingPart", "TrackedParameters", "names_of"]


def names_of(optimizer: Optimizer, given: Mapping[Tensor, str]) -> list[str]:
    """Return a name for each parameter in the order of the groups: the given one, the group's, or its
    place."""
    found: list[str] = []
    for g, group in enumerate(optimizer.param_groups):
        found += (_name(given, group, g, i) for i in range(len(group["params"])))
    return found


def _name(given: Mapping[Tensor, str], group: Mapping[str, Any], g: int, i: int) -> str:
    of_group = group.get("param_names")
    fallback = of_group[i] if of_group else f"param_groups[{g}].params[{i}]"
    return given.get(group["params"][i], fallback)


class NamesOnDemand(Sequence[str]):
    """The names of all parameters, of which only those are built that are asked for."""

    def __init__(self, parameters: TrackedParameters) -> None:
        self._parameters = parameters

    def __len__(self) -> int:
        return len(self._parameters.known)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._parameters.names()[index]
        return self._parameters.name(index)


class TakingPart:
    """Notices parameters that have a gradient for the first time in a while.

    Attributes:
        step: the number of steps so far.
    """

    def __init__(self) -> None:
        self._now: list[bool] = []
        self._last: dict[int, int] = {}  # by the parameter's index, the last step in which it took part
        self.step = 0

    def joined(self, now: list[bool], window: int) -> list[int]:
        """Return the indices of parameters that take part in this step, and in none of the last ``window``.

        In the first step, and where there are more parameters than before, none is returned.

        Args:
            now: for each parameter, whether it takes part.
            window: how many steps a while is.
        """
        self.step += 1
        before, self._now = self._now, now
        if now == before or len(now) != len(before):
            return []
        found = []
        for i, (was, takes_part) in enumerate(zip(before, now, strict=True)):
            if was and not takes_part:
                self._last[i] = self.step - 1
            elif takes_part and not was and self.step - self._last.get(i, -window) > window:
                found.append(i)
        return found


class TrackedParameters:
    """The parameters of the optimizer's groups, in order.

    Attributes:
        given: the names that the user gave.
        known: the tracked parameters.
        few: some of the parameters, for looks that must cost nothing.
        included: for each parameter, whether the rule for units, if there is one, applies to it.
    """

    included: tuple[bool, ...]

    def __init__(self, optimizer: Optimizer, config: GuardConfig, given: Mapping[Tensor, str]) -> None:
        self._optimizer, self._config, self.given = optimizer, config, given
        self.known = self.now()
        self.few = few_of(self.known)
        self.included = self._inclusion()

    def now(self) -> list[Tensor]:
        """Return the optimizer's current parameters."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def are(self, params: list[Tensor]) -> bool:
        """Return whether these are the tracked parameters."""
        known = self.known
        return len(known) == len(params) and not any(map(operator.is_not, known, params))

    def looked_up_again(self, config: GuardConfig) -> TrackedParameters:
        """Return the optimizer's current parameters, tracked under these settings."""
        return TrackedParameters(self._optimizer, config, self.given)

    def extended(self, state: GuardState, to: TrackedParameters) -> GuardState:
        """Return the state for the parameters and the settings of ``to``, with the statistics known so far.

        This waits for the device, but is called rarely.
        """
        params, device = to.known, state.step.device
        fresh = init_guard(to._config, len(params), xp=torch_namespace, device=device)
        saved = state_to_dict(state, [str(id(p)) for p in self.known])
        with warnings.catch_warnings():
            # New parameters and new rules have none, of course.
            warnings.simplefilter("ignore", StatisticsNotLoadedWarning)
            names = [str(id(p)) for p in params]
            return state_from_dict(saved, fresh, xp=torch_namespace, names=names, device=device)

    def names(self) -> list[str]:
        """Return a name for each parameter."""
        return names_of(self._optimizer, self.given)

    def name(self, index: int) -> str:
        """Return the name of one parameter."""
        for g, group in enumerate(self._optimizer.param_groups):
            n = len(group["params"])
            if index < n:
                return _name(self.given, group, g, index)
            index -= n
        raise IndexError(index)

    def names_if_known(self) -> list[str] | None:
        """Return the names; None if no parameter was named, so that statistics are matched by position."""
        of_groups = any(group.get("param_names") for group in self._optimizer.param_groups)
        return self.names() if self.given or of_groups else None

    def _inclusion(self) -> tuple[bool, ...]:
        rule, names = self._config.unit_rule, self.names()
        return (True,) * len(names) if rule is None else rule.included(names)
