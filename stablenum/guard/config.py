"""``GuardConfig``: the settings of a guard, as plain values."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, SupportsFloat, TypedDict, TypeVar, cast

from stablenum._support.partners import of_extra
from stablenum._support.pickled_fields import pickled_by_name
from stablenum._support.settings_checks import check_choice, check_int, check_number
from stablenum.errors import bad_field, either
from stablenum.rules.clipping import (
    CLIP_RULES,
    AdaptiveGradClip,
    ClipByNorm,
    ClipByValue,
    ClipRule,
    ClipUpdateRMS,
    as_clip_rules,
)
from stablenum.rules.escalation import EscalatePrecision
from stablenum.rules.loss_scale import (
    LARGEST_SCALE,
    LOSS_SCALES,
    SMALLEST_SCALE,
    DynamicLossScale,
    LossScale,
    StaticLossScale,
)
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard, SpikeRule, as_spike_rule

__all__ = ["GuardConfig", "Settings", "make_config", "settings_shown"]

_SPIKE_RULES = (SpikeGuard, MeanStdSpikeGuard)
_RULES: dict[str, dict[str, type[Any]]] = {
    field: {rule.__name__: rule for rule in rules}
    for field, rules in (
        ("clip", CLIP_RULES),
        ("loss_scale", LOSS_SCALES),
        ("spike", _SPIKE_RULES),
        ("escalate", (EscalatePrecision,)),
    )
}
# TOML has no null, so a field that is None is left out. If None is not the field's default, this string is
# written instead.
_NONE = "none"


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """The settings of a guard. The default skips a non-finite step entirely and records it.

    Args:
        clip: None, a number (``1.0`` is ``ClipByGlobalNorm(1.0)``), a clip rule, or a sequence of
            rules applied in order. The config stores a tuple of rules.
        loss_scale: None (no scaling), ``"dynamic"`` (``DynamicLossScale()``), a number
            (``StaticLossScale(scale=number)``), a rule, or one of jmp's loss scales.
        spike: None, ``"skip"`` or ``"clip"`` (``SpikeGuard(action=...)``), or a spike rule. A skipped spike
            counts as a skipped step but never stops the training, because it is finite.
        escalate: None, or :class:`stablenum.EscalatePrecision`: after several non-finite steps in a row,
            compute in a wider format for a while. The guard makes the decision; ``opt.autocast()`` (torch)
            and ``stablenum_jax.value_and_grad(..., policy=...)`` apply it.
        on_nonfinite: ``"skip"``, or ``"raise"`` to stop with :class:`stablenum.NonFiniteError` at
            the first non-finite step. An overflow that a dynamic loss scale answers by coming down does not
            stop the training; one at the smallest scale does, as a non-finite loss does at any scale.
        max_skips_in_a_row: stop with ``NonFiniteError`` when this many steps in a row have been skipped
            because they were not finite; None never stops. A skipped step is never applied later, whatever
            the count.
        exact_norms: compute gradient norms without rounding on the way, so that they have the same bits
            however the gradients are divided among devices; for runs that must repeat on another number of
            devices. Norms of units (AdaptiveGradClip) and of updates (ClipUpdateRMS) are not included.

    Raises:
        ValueError: a field has none of the values listed above; the message names the field.

    Example:
        >>> GuardConfig(clip=1.0).clip
        (ClipByGlobalNorm(max_norm=1.0),)
        >>> GuardConfig.from_dict({"clip": 1.0, "loss_scale": "dynamic"}) == GuardConfig(
        ...     clip=1.0, loss_scale="dynamic")
        True
    """

    clip: Any = None
    loss_scale: Any = None
    spike: Any = None
    escalate: EscalatePrecision | None = None
    on_nonfinite: Literal["skip", "raise"] = "skip"
    max_skips_in_a_row: int | None = None
    exact_norms: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", as_clip_rules(self.clip))
        object.__setattr__(self, "loss_scale", _as_loss_scale(self.loss_scale))
        object.__setattr__(self, "spike", as_spike_rule(self.spike))
        if self.escalate is not None and not isinstance(self.escalate, EscalatePrecision):
            raise bad_field("escalate", "None or an EscalatePrecision", self.escalate)
        check_choice("on_nonfinite", self.on_nonfinite, ("skip", "raise"))
        if self.max_skips_in_a_row is not None:
            count = check_int("max_skips_in_a_row", self.max_skips_in_a_row, at_least=1)
            object.__setattr__(self, "max_skips_in_a_row", count)
        if not isinstance(self.exact_norms, bool):
            raise bad_field("exact_norms", "True or False", self.exact_norms)

    @property
    def clip_rules(self) -> tuple[ClipRule, ...]:
        """``clip`` with the type of its stored form, a tuple of rules."""
        return cast("tuple[ClipRule, ...]", self.clip)

    @property
    def spike_rule(self) -> SpikeRule | None:
        """``spike`` with the type of its stored form, a rule or None."""
        return cast("SpikeRule | None", self.spike)

    @property
    def shrinks_spikes(self) -> bool:
        """Whether a spike is applied with its gradients shrunk instead of being skipped."""
        return self.spike_rule is not None and self.spike_rule.action == "clip"

    @property
    def per_tensor(self) -> bool:
        """Whether decisions carry one multiplier per tensor instead of one for all tensors."""
        return any(rule.per_tensor for rule in self.clip_rules)

    @property
    def needs_single_norms(self) -> bool:
        """Whether a rule needs the norms of single parameters, and not only the joint one.

        This is so if it treats each parameter by itself, or follows :class:`AdaptiveGradClip`.
        """
        on_norms = [rule for rule in self.clip_rules if not isinstance(rule, (ClipByValue, ClipUpdateRMS))]
        return self.per_tensor or (self.unit_rule is not None and len(on_norms) > 1)

    @property
    def joins_again(self) -> bool:
        """Whether a rule needs the joint norm that is left by a rule with several factors."""
        apart = False
        for rule in self.clip_rules:
            alone = isinstance(rule, (ClipByNorm, ClipByValue, ClipUpdateRMS, AdaptiveGradClip))
            if apart and not alone:
                return True
            apart = apart or rule.per_tensor or isinstance(rule, AdaptiveGradClip)
        return False

    @property
    def max_value(self) -> float | None:
        """The bound on each element after unscaling and clipping by norm; None without a ``ClipByValue``."""
        return next(
            (float(rule.max_value) for rule in self.clip_rules if isinstance(rule, ClipByValue)), None
        )

    @property
    def unit_rule(self) -> AdaptiveGradClip | None:
        """The clip rule that needs ``Observation.units``; None if there is none."""
        return next((rule for rule in self.clip_rules if isinstance(rule, AdaptiveGradClip)), None)

    @property
    def update_rule(self) -> ClipUpdateRMS | None:
        """The clip rule that acts on the optimizer's update; None if there is none."""
        return next((rule for rule in self.clip_rules if isinstance(rule, ClipUpdateRMS)), None)

    @property
    def one_factor(self) -> bool:
        """Whether all gradients are multiplied by one factor, with no bound on their elements."""
        return not self.per_tensor and self.unit_rule is None and self.max_value is None

    @property
    def needs(self) -> frozenset[str]:
        """The fields of :class:`stablenum.Observation` that must be measured besides the norms."""
        return frozenset() if self.loss_scale is None else self.loss_scale.needs

    @property
    def skip_limit(self) -> int | None:
        """The number of non-finite steps in a row at which training stops; None for no limit."""
        return 1 if self.on_nonfinite == "raise" else self.max_skips_in_a_row

    @property
    def changes_gradients(self) -> bool:
        """Whether an applied step's gradients can differ from the raw ones."""
        on_gradients = len(self.clip_rules) - (self.update_rule is not None)
        return on_gradients > 0 or self.loss_scale is not None or self.shrinks_spikes

    def compute_format(self, level: int, own: str | None = None) -> str:
        """Return the format in which a step computes.

        Args:
            level: how many formats wider than the first format of ``escalate`` the step computes. Beyond the
                last format, as in a state that was saved with more of them, it is the last.
            own: the format of the user's policy. By default it is the first format of ``escalate``; without
                ``escalate``, it is float16 if there is a loss scale and bfloat16 if not.

        Example:
            >>> config = GuardConfig(escalate=EscalatePrecision(formats=("bfloat16", "float32")))
            >>> config.compute_format(0), config.compute_format(1), GuardConfig().compute_format(0)
            ('bfloat16', 'float32', 'bfloat16')
        """
        if self.escalate is not None and (level or own is None):
            return self.escalate.formats[min(level, len(self.escalate.formats) - 1)]
        return own or ("bfloat16" if self.loss_scale is None else "float16")

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain dicts, lists, numbers and strings. Fields that are None are left out,
        because TOML has no null."""
        plain: dict[str, Any] = {
            "clip": [_rule_to_dict(rule) for rule in self.clip_rules] or None,
            "loss_scale": self.loss_scale and _rule_to_dict(self.loss_scale),
            "spike": self.spike and _rule_to_dict(self.spike),
            "escalate": self.escalate and _rule_to_dict(self.escalate),
            "on_nonfinite": self.on_nonfinite,
            "max_skips_in_a_row": self.max_skips_in_a_row,
            "exact_norms": self.exact_norms or None,
        }
        return {name: value for name, value in plain.items() if value is not None}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> GuardConfig:
        """Return the config written by :meth:`to_dict`, or by hand in the same form.

        A rule is given as a mapping with the rule's name under ``"rule"``; the constructor's short forms
        (``1.0``, ``"dynamic"``) are allowed too.

        Raises:
            ValueError: a field or rule is unknown, or the constructor rejects a value.
        """
        if not isinstance(plain, Mapping):
            raise bad_field("config", "a mapping of GuardConfig's fields", plain)
        _known_fields("config", cls, plain)
        made = dict(plain)
        clip = made.get("clip")
        if isinstance(clip, (list, tuple)):
            made["clip"] = tuple(_rule_from_dict("clip", rule) for rule in clip)
        else:
            made["clip"] = _rule_from_dict("clip", clip)
        for name in ("loss_scale", "spike", "escalate"):
            made[name] = _rule_from_dict(name, made.get(name))
        return cls(**made)

    def to_json(self) -> str:
        """Return the config as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> GuardConfig:
        """Return the config written by :meth:`to_json`.

        Raises:
            ValueError: the text is not JSON, or :meth:`from_dict` rejects its content.
        """
        return cls.from_dict(_parsed(json.loads, "JSON", text))

    def to_toml(self) -> str:
        """Return the config as TOML text. This needs the package ``tomli-w`` (extra ``demo``).

        Raises:
            ImportError: ``tomli-w`` is not installed.
        """
        text: str = of_extra("GuardConfig.to_toml", "tomli_w", "tomli-w").dumps(self.to_dict())
        return text

    @classmethod
    def from_toml(cls, text: str) -> GuardConfig:
        """Return the config written by :meth:`to_toml`.

        Raises:
            ValueError: the text is not TOML, or :meth:`from_dict` rejects its content.
        """
        import tomllib

        return cls.from_dict(_parsed(tomllib.loads, "TOML", text))


def _parsed(loads: Callable[[str], Any], form: str, text: str) -> Any:
    """Return what a text holds.

    Raises:
        ValueError: it is not in that form, or nested more deeply than Python reads.
    """
    try:
        return loads(text)
    except RecursionError:
        raise ValueError(
            f"config must be {form} as to_{form.lower()}() writes it; got text that is nested too "
            "deeply to be read."
        ) from None


class _JmpLossScale(Protocol):
    def scale(self, tree: Any, /) -> Any: ...
    def unscale(self, tree: Any, /) -> Any: ...
    def adjust(self, grads_finite: Any, /) -> Any: ...


class Settings(TypedDict, total=False):
    """The fields of :class:`GuardConfig` as keywords, so that editors and type checkers know them."""

    clip: SupportsFloat | ClipRule | Sequence[SupportsFloat | ClipRule] | None
    loss_scale: Literal["dynamic"] | SupportsFloat | LossScale | _JmpLossScale | None
    spike: Literal["skip", "clip"] | SpikeRule | None
    escalate: EscalatePrecision | None
    on_nonfinite: Literal["skip", "raise"]
    max_skips_in_a_row: int | None
    exact_norms: bool


# What settings are called in torch, HF Trainer, Lightning, DeepSpeed, Megatron and optax.
_ELSEWHERE = {
    **dict.fromkeys(
        (
            "max_norm", "max_grad_norm", "gradient_clip_val", "gradient_clipping", "clip_grad", "clip_norm",
            "clip_grad_norm", "grad_clip", "clip_by_global_norm",
        ),
        "clip",
    ),
    **dict.fromkeys(("fp16", "grad_scaler", "scaler", "init_scale", "scale", "amp"), "loss_scale"),
    **dict.fromkeys(("max_consecutive_errors", "max_skips", "patience"), "max_skips_in_a_row"),
}  # fmt: skip


F = TypeVar("F", bound=Callable[..., Any])


def settings_shown(function: F) -> F:
    """Let ``help()`` show the settings that a function takes as ``**overrides``, each with its default.

    Example:
        >>> @settings_shown
        ... def train(steps, **overrides):
        ...     pass
        >>> list(inspect.signature(train).parameters)[:3]
        ['steps', 'clip', 'loss_scale']
    """
    own = inspect.signature(function)
    shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for field in dataclasses.fields(GuardConfig):
        hint = Settings.__annotations__[field.name]
        hint = getattr(hint, "__forward_arg__", hint)
        shown.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint
            )
        )
    # Python reads it from any function, but the type of a callable does not have it.
    function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def make_config(config: GuardConfig | None, overrides: Settings) -> GuardConfig:
    """Return ``config`` with some fields replaced by ``overrides``.

    Raises:
        TypeError: ``config`` is not a GuardConfig, or an override is not a field of GuardConfig.
        ValueError: a field has a value that is not allowed.
    """
    if config is not None and not isinstance(config, GuardConfig):
        raise TypeError(
            f"config must be a GuardConfig or None; got {type(config).__name__}. "
            "Single fields may be given by name, as in clip=1.0."
        )
    names = [field.name for field in dataclasses.fields(GuardConfig)]
    for name in overrides:
        if name not in names:
            meant = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, names, 1)
            hint = f": did you mean {meant[0]}=?" if meant else ";"
            raise TypeError(f"unknown setting {name!r}{hint} GuardConfig has {', '.join(names)}.")
    return dataclasses.replace(config or GuardConfig(), **overrides)


def _as_loss_scale(value: object) -> LossScale | None:
    if value is None or isinstance(value, LOSS_SCALES):
        return value
    if isinstance(value, str) and value == "dynamic":
        return DynamicLossScale()
    if _is_jmp_loss_scale(value):
        return _from_jmp(value)
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        rules = either(rule.__name__ for rule in LOSS_SCALES)
        hint = f"Call the class to make a rule: {value.__name__}()." if isinstance(value, type) else ""
        raise bad_field(
            "loss_scale", f"None, 'dynamic', a positive number or one of {rules}", value, hint=hint
        )
    scale = check_number("loss_scale", value, at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)
    return StaticLossScale(scale=scale)


def _is_jmp_loss_scale(value: object) -> bool:
    """Return whether ``value`` has the interface of jmp's loss scales, which the loss scales of
    ``stablenum_jax.policy`` have too."""
    methods = ("scale", "unscale", "adjust")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def _from_jmp(value: Any) -> LossScale | None:
    """Return the rule that is equivalent to jmp's object, except that jmp has no ``max_scale``."""
    if type(value).__name__ == "NoOpLossScale":
        return None
    scale = check_number(
        "loss_scale.loss_scale", value.loss_scale, at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE
    )
    if not hasattr(value, "period"):
        return StaticLossScale(scale=scale)
    factor = check_number("loss_scale.factor", value.factor, above=1.0)
    floor = check_number("loss_scale.min_loss_scale", value.min_loss_scale, at_least=0.0)
    return DynamicLossScale(
        init_scale=scale,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=value.period,
        min_scale=min(max(floor, SMALLEST_SCALE), scale),
        max_scale=max(scale, DynamicLossScale().max_scale),
    )


def _rule_to_dict(rule: ClipRule | LossScale | SpikeRule | EscalatePrecision) -> dict[str, Any]:
    plain: dict[str, Any] = {"rule": type(rule).__name__}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if value is not None:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
        elif field.default is not None:
            plain[field.name] = _NONE
    return plain


def _rule_from_dict(field: str, plain: object) -> object:
    if not isinstance(plain, Mapping):
        return plain  # a short form or a rule: the constructor checks it
    values = {name: None if value == _NONE else value for name, value in plain.items()}
    name = values.pop("rule", None)
    rules = _RULES[field]
    if not isinstance(name, str) or name not in rules:
        raise bad_field(f"{field}.rule", f"one of {either(rules)}", name)
    rule = rules[name]
    _known_fields(f"{field} ({name})", rule, values)
    try:
        return rule(**values)
    except TypeError as error:
        raise ValueError(f"{field} ({name}): {error}") from error


def _known_fields(where: str, cls: type[Any], plain: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    for name in plain:
        if name not in names:
            raise ValueError(f"{where} has no field {name!r}; it has {', '.join(names)}.")
