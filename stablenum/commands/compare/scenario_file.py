"""Scenario files: settings of the guard and your own streams, in TOML.

[guard]                      # fields of GuardConfig, which replace those of every scenario
clip = 1.0
loss_scale = "dynamic"

[[scenario]]                 # as many as you like; fields of Stream
name = "mine"
steps = 100
magnitude = 0.1
drift = 1.001                # and jitter: how the norms move from step to step
optimizer = "sgd"            # or { name = "adam", lr = 1e-3 }
tensors = [{ shape = [8, 5], dtype = "float16" }]
events = [
  { step = 30, tensor = 0, value = inf },                    # replaces the first element
  { step = 50, tensor = "loss", value = nan },
  { step = 60, until = "end", tensor = "all", factor = 5 },  # multiplies all elements
]
expected = { guarded = "survives", skips = 2 }
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from stablenum._support.partners import of_extra
from stablenum.commands.compare.scenarios import (
    Event,
    Expected,
    OptimizerSpec,
    Outcome,
    Scenario,
    Stream,
    TensorSpec,
    Tolerance,
    Training,
    check_guard_names,
)
from stablenum.commands.compare.scenarios.training_data import initial_params
from stablenum.errors import bad_field, either
from stablenum.formats import get_format
from stablenum.guard.config import GuardConfig
from stablenum.recovery.settings import RecoveryPolicy, Response

__all__ = ["ScenarioFile", "read_scenario_file", "to_toml", "with_guard"]


class ScenarioFile(NamedTuple):
    """The contents of a file.

    Attributes:
        guard: the fields of ``[guard]``, checked; empty if the file has no ``[guard]``.
        scenarios: the scenarios of the file, whose own guard settings replace those of ``guard``.
    """

    guard: dict[str, Any]
    scenarios: list[Stream]


def read_scenario_file(path: Path) -> ScenarioFile:
    """Read and check a whole file before anything is run.

    Raises:
        ValueError: the file cannot be read, is not valid TOML or has an error; the message names the
            file, the scenario, the field and the allowed values.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # invalid TOML, text that is not UTF-8, or an integer that is too long
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    try:
        return _file(plain)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_toml(streams: Iterable[Stream]) -> str:
    """Return the text of a scenario file that reads back as these streams, built-in or made in Python.

    The streams read back compare equal to the given ones, except for events with a NaN, which equals nothing.

    Raises:
        ImportError: ``tomli-w`` is not installed (extra ``demo``).

    Example:
        >>> print(to_toml([Stream(name="mine", events=(Event(step=3, tensor="all", factor=50.0),))]))
        [[scenario]]
        name = "mine"
        events = [
            { step = 3, factor = 50.0, tensor = "all" },
        ]
        <BLANKLINE>
        [scenario.tolerance]
        ...
    """
    # The default tolerance of a file depends on the formats, so the tolerance is always written.
    tables = [_plain(stream) | {"tolerance": dataclasses.asdict(stream.tolerance)} for stream in streams]
    text: str = of_extra("to_toml", "tomli_w", "tomli-w").dumps({"scenario": tables})
    return text


def with_guard(scenario: Scenario, guard: Mapping[str, Any]) -> Scenario:
    """Return the scenario with these fields of its guard replaced.

    Raises:
        ValueError: the guard names a tensor that the scenario does not have.

    Example:
        >>> with_guard(Stream(name="mine"), {"clip": 2.0}).guard.clip
        (ClipByGlobalNorm(max_norm=2.0),)
    """
    made = dataclasses.replace(scenario, guard=dataclasses.replace(scenario.guard, **guard))
    if isinstance(made, Training):  # a stream has already checked the names of its tensors
        check_guard_names(made.guard, len(initial_params(made)))
    return made


def _plain(value: Any) -> Any:
    """Return a dataclass as a table of the fields that differ from their defaults."""
    if isinstance(value, GuardConfig):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return str(value) if isinstance(value, Outcome) else value
    table = {}
    for f in dataclasses.fields(value):
        made = getattr(value, f.name)
        usual = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if made != usual:
            table[f.name] = _plain(made)
    return table


def _file(plain: dict[str, Any]) -> ScenarioFile:
    _known("the file", plain, ("guard", "scenario"))
    guard = _guard_fields("guard", plain.get("guard", {}))
    listed = plain.get("scenario", [])
    if not isinstance(listed, list):
        raise bad_field("scenario", "a list of tables, each under [[scenario]]", listed)
    scenarios = [_scenario(i, table, guard) for i, table in enumerate(listed)]
    names = [s.name for s in scenarios]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two scenarios have the name {name!r}; names must differ.")
    return ScenarioFile(guard, scenarios)


def _guard_fields(where: str, plain: Any) -> dict[str, Any]:
    """Return the fields that are given, in the form in which GuardConfig stores them."""
    try:
        config = GuardConfig.from_dict(_table(where, plain))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return {name: getattr(config, name) for name in plain}


def _scenario(index: int, plain: Any, guard: Mapping[str, Any]) -> Stream:
    where = f"scenario {index + 1}"
    made = dict(_table(where, plain))
    if "name" in made:
        where += f" ({made['name']!r})"
    try:
        _known("a scenario", made, [f.name for f in dataclasses.fields(Stream)])
        if "name" not in made:
            raise ValueError("name is missing; it must be one word without spaces.")
        made["guard"] = GuardConfig(**(dict(guard) | _guard_fields("guard", made.get("guard", {}))))
        for name, convert in _CONVERT.items():
            if name in made:
                made[name] = convert(made[name])
        if not isinstance(made.get("about", ""), str):
            raise bad_field("about", "a sentence", made["about"])
        stream = Stream(**made)
        return stream if "tolerance" in made else dataclasses.replace(stream, tolerance=_usual(stream))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _usual(stream: Stream) -> Tolerance:
    """Return the tolerance that applies if the file has none: some roundings of the narrowest format."""
    eps = max((get_format(tensor.dtype).eps for tensor in stream.tensors), default=0.0)
    if eps > get_format("float32").eps:
        return Tolerance(params=8 * eps, why="the parameters are rounded to a narrow format at every step")
    return Tolerance() if stream.optimizer.name == "sgd" else Tolerance(params=1e-4)


def _optimizer(plain: Any) -> OptimizerSpec:
    return _made("optimizer", OptimizerSpec, {"name": plain} if isinstance(plain, str) else plain)


def _tensors(plain: Any) -> tuple[TensorSpec, ...]:
    tensors = []
    for i, table in enumerate(_list("tensors", plain)):
        where = f"tensors[{i}]"
        table = dict(_table(where, table))
        table["shape"] = tuple(_list(f"{where}.shape", table.get("shape")))
        tensors.append(_made(where, TensorSpec, table))
    return tuple(tensors)


def _events(plain: Any) -> tuple[Event, ...]:
    return tuple(_made(f"events[{i}]", Event, table) for i, table in enumerate(_list("events", plain)))


def _recovery(plain: Any) -> RecoveryPolicy:
    table = dict(_table("recovery", plain))
    if "responses" in table:
        listed = enumerate(_list("recovery.responses", table["responses"]))
        table["responses"] = tuple(_made(f"recovery.responses[{i}]", Response, given) for i, given in listed)
    try:
        return cast("RecoveryPolicy", _made("recovery", RecoveryPolicy, table))
    except TypeError as error:
        raise ValueError(f"recovery: {error}") from error


def _expected(plain: Any) -> Expected:
    made = dict(_table("expected", plain))
    for name in ("plain", "guarded"):
        if name in made:
            try:
                made[name] = Outcome(made[name])
            except ValueError as error:
                raise bad_field(f"expected.{name}", f"one of {either(Outcome)}", made[name]) from error
    return _made("expected", Expected, made)


def _tolerance(plain: Any) -> Tolerance:
    return _made("tolerance", Tolerance, plain)


_CONVERT = {
    "optimizer": _optimizer,
    "tensors": _tensors,
    "events": _events,
    "recovery": _recovery,
    "expected": _expected,
    "tolerance": _tolerance,
}


def _made(where: str, cls: type[Any], plain: Any) -> Any:
    """Return a dataclass made from a table. Error messages name the place of the error."""
    table = _table(where, plain)
    _known(where, table, [f.name for f in dataclasses.fields(cls)])
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in table
    ]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing.")
    try:
        return cls(**table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _table(where: str, plain: Any) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise bad_field(where, "a table", plain)
    return plain


def _list(where: str, plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise bad_field(where, "a list", plain)
    return plain


def _known(where: str, plain: Mapping[str, Any], names: Any) -> None:
    for name in plain:
        if name not in names:
            raise ValueError(f"{where} has no field {name!r}; it has {', '.join(names)}.")
