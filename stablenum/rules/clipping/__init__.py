"""Clip rules: how far to shrink the gradients of one step. One rule per file.

A rule gets the norms of the *unscaled* gradients, never the gradients themselves, so clipping needs no pass
of its own. Each rule is a frozen dataclass with ``init(n_tensors, xp=, device=)`` and
``multiplier(state, norms, total, applied=, xp=) -> (factor, state)``; what changes during training is in the
state. Three rules work differently: ``ClipByValue`` (on elements) and ``ClipUpdateRMS`` (on the optimizer's
update) are applied by the adapter, and ``AdaptiveGradClip`` works on the units of a weight (see
``chain.py``).
"""

from __future__ import annotations

from typing import TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.errors import bad_field
from stablenum.rules.clipping.adagc import AdaGC, AdaGCState
from stablenum.rules.clipping.adaptive import AdaptiveGradClip, OutputAxis
from stablenum.rules.clipping.autoclip import AutoClip
from stablenum.rules.clipping.by_norm import ClipByGlobalNorm, ClipByNorm
from stablenum.rules.clipping.by_value import ClipByValue
from stablenum.rules.clipping.chain import Clipped, FlatUnits, Units, clip_in_order
from stablenum.rules.clipping.update_rms import ClipUpdateRMS
from stablenum.rules.clipping.zclip import ZClip

__all__ = [
    "CLIP_RULES",
    "PER_TENSOR_STATES",
    "AdaGC",
    "AdaptiveGradClip",
    "AutoClip",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipRule",
    "ClipUpdateRMS",
    "Clipped",
    "FlatUnits",
    "OutputAxis",
    "Units",
    "ZClip",
    "as_clip_rules",
    "clip_in_order",
]

ClipRule: TypeAlias = (
    AdaGC | AdaptiveGradClip | AutoClip | ClipByGlobalNorm | ClipByNorm | ClipByValue | ClipUpdateRMS | ZClip
)
CLIP_RULES = (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    ZClip,
)
# Rule states in which every array has one row per parameter. When such a state is loaded, its rows are
# matched by name.
PER_TENSOR_STATES = (AdaGCState,)


def as_clip_rules(value: object) -> tuple[ClipRule, ...]:
    """Return a value of ``GuardConfig.clip`` in the form in which it is stored: a tuple of rules.

    Args:
        value: None, a number (the ``max_norm`` of a :class:`ClipByGlobalNorm`), a rule, or a
            sequence of rules, applied in order.

    Raises:
        ValueError: ``value`` is anything else, or the rules cannot work in this order.
    """
    if value is None:
        return ()
    rules = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    made = tuple(_as_rule(rule) for rule in rules)
    _check_order(made, value)
    return made


def _as_rule(value: object) -> ClipRule:
    if isinstance(value, CLIP_RULES):
        return value
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        allowed = "None, a positive number (a global norm), a clip rule or a sequence of clip rules"
        hint = f"Call the class to make a rule: {value.__name__}()." if isinstance(value, type) else ""
        raise bad_field("clip", allowed, value, hint=hint)
    return ClipByGlobalNorm(check_number("clip", value, above=0.0))


def _check_order(rules: tuple[ClipRule, ...], value: object) -> None:
    on_gradients = [rule for rule in rules if not isinstance(rule, ClipUpdateRMS)]
    if rules[: len(on_gradients)] != tuple(on_gradients) or len(rules) - len(on_gradients) > 1:
        raise bad_field(
            "clip",
            "a sequence with at most one ClipUpdateRMS, at the end",
            value,
            hint="ClipUpdateRMS acts on the optimizer's update, after all rules that act on gradients.",
        )
    if any(isinstance(rule, ClipByValue) for rule in on_gradients[:-1]):
        raise bad_field(
            "clip",
            "a sequence with at most one ClipByValue, after all rules that use norms",
            value,
            hint="The norm after an element-wise clamp is unknown without another pass over the gradients.",
        )
    if sum(isinstance(rule, AdaptiveGradClip) for rule in rules) > 1:
        raise bad_field("clip", "a sequence with at most one AdaptiveGradClip", value)
