"""Precision policies: the formats of stored parameters, of the computation and of its output.

The grammar is jmp's (``"params=float32,compute=bfloat16,output=float32"``), extended by rules for modules
at given paths. A policy is plain data; the adapters apply it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from stablenum.errors import bad_field
from stablenum.formats import FORMATS, Format

__all__ = ["Policy", "PolicyRule", "as_policy", "parse_format", "wider"]

_PARTS = {"p": "params", "c": "compute", "o": "output"}
_NAMES = {
    "f64": "float64", "f32": "float32", "full": "float32", "f16": "float16", "bf16": "bfloat16",
    "fp64": "float64", "fp32": "float32", "fp16": "float16",
    "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "float8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


def parse_format(name: object, *, half: str = "float16") -> str:
    """Return the full name of a format, given a short or full name, ``"half"`` or any framework's dtype.

    Args:
        name: for example ``"bf16"``, ``"float32"``, ``"full"``, ``"half"``, ``"fp8"`` or ``torch.float16``.
        half: the format that ``"half"`` stands for: float16, or bfloat16 on a TPU.

    Raises:
        ValueError: ``name`` is not a floating-point format.

    Example:
        >>> parse_format("bf16"), parse_format("fp16"), parse_format("half")
        ('bfloat16', 'float16', 'float16')
    """
    text = str(getattr(name, "name", None) or getattr(name, "__name__", None) or name)
    text = text.strip().removeprefix("torch.")
    text = half if text == "half" else _NAMES.get(text, text)
    if text not in FORMATS:
        allowed = f"one of {', '.join(FORMATS)}, half, or a short name ({', '.join(_NAMES)})"
        raise bad_field("format", allowed, name)
    return text


def wider(a: str, b: str) -> str:
    """Return whichever of two formats has the larger range, or the first if their ranges are equal.

    Example:
        >>> wider("float16", "bfloat16"), wider("float32", "bfloat16")
        ('bfloat16', 'float32')
    """
    return max(a, b, key=lambda name: FORMATS[name].max)


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """The formats of the modules that ``pattern`` matches. A format of None leaves that part unchanged.

    Patterns are matched by ``fnmatch``, ignoring case, against the parts of a module's path joined by dots. A
    pattern that matches a module also applies to all modules inside it.
    """

    pattern: str
    params: str | None = None
    compute: str | None = None
    output: str | None = None

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the module at ``path`` or a module that contains it."""
        parts = path.lower().split(".") if path else []
        around = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(fnmatchcase(one, self.pattern.lower()) for one in around)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Formats of parameters, computation and output, with rules for modules at given paths.

    Args:
        params: the format in which parameters are stored.
        compute: the format of the computation; by default that of the parameters. An 8-bit format means
            quantised products with delayed scaling: e4m3 forward, e5m2 backward.
        output: the format of the output; by default that of the computation.
        rules: a sequence of :class:`PolicyRule`, or a mapping from patterns to policy strings (a single
            format sets computation and output). If several rules match, the last one applies.

    Raises:
        ValueError: an unknown format, or an 8-bit format for parameters or output.

    Example:
        >>> policy = Policy.parse("params=float32,compute=bfloat16", rules={"*norm*": "float32"})
        >>> policy.compute, policy.at("blocks.0.LayerNorm_1").compute, str(policy.at("head"))
        ('bfloat16', 'float32', 'p=f32,c=bf16,o=bf16')
    """

    params: str = "float32"
    compute: str = ""
    output: str = ""
    rules: tuple[PolicyRule, ...] = ()

    def __post_init__(self) -> None:
        params = _stored("params", self.params)
        compute = parse_format(self.compute or params)
        output = _stored("output", self.output or _carrier(compute))
        for name, value in (("params", params), ("compute", compute), ("output", output)):
            object.__setattr__(self, name, value)
        given: Any = self.rules
        made = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "rules", tuple(_as_rule(rule) for rule in made))

    @classmethod
    def parse(cls, text: str, *, half: str = "float16", rules: Any = ()) -> Policy:
        """Return a policy from a string in jmp's grammar.

        ``"bf16"`` sets all three parts. In ``"p=f32,c=bf16"``, parts that are left out default as follows:
        parameters to float32, computation to the parameters' format, output to the computation's.

        Args:
            text: the policy string.
            half: the format that ``half`` stands for on this machine.
            rules: as in the constructor.

        Raises:
            ValueError: an unknown part or format.
        """
        return cls(**_parts("policy", text, half), rules=rules)

    def at(self, path: str) -> Policy:
        """Return the policy of the module at ``path`` (parts joined by dots; slashes count as dots)."""
        here = dataclasses.replace(self, rules=())
        for rule in self.rules:
            if rule.matches(path.replace("/", ".")):
                here = dataclasses.replace(
                    here,
                    params=rule.params or here.params,
                    compute=rule.compute or here.compute,
                    output=rule.output or here.output,
                )
        return here

    def begins_at(self, path: str) -> bool:
        """Return whether a part of the model with its own formats begins at the module at ``path``.

        Such a part begins at the model itself, ``""``, and at each module matched by a rule for computation
        or output that does not match the surrounding module. Values are cast where the part begins and where
        it ends.

        Example:
            >>> policy = Policy.parse("p=f32,c=bf16", rules={"head": "float32"})
            >>> [path for path in ("", "body", "head", "head.proj") if policy.begins_at(path)]
            ['', 'head']
        """
        path = path.replace("/", ".")
        around = path.rpartition(".")[0]
        return path == "" or any(
            rule.matches(path) and not rule.matches(around)
            for rule in self.rules
            if rule.compute or rule.output
        )

    def at_least(self, format: str) -> Policy:  # noqa: A002
        """Return the policy with every computation and output narrower than ``format`` widened to it.

        Example:
            >>> str(Policy.parse("p=f32,c=f16", rules={"*norm*": "f32"}).at_least("bfloat16"))
            'p=f32,c=bf16,o=bf16;*norm*:c=float32,o=float32'
        """

        def raised(part: Any) -> Any:
            return dataclasses.replace(
                part,
                compute=part.compute and wider(part.compute, format),
                output=part.output and wider(part.output, _carrier(format)),
            )

        rules = tuple(raised(rule) for rule in self.rules)
        return dataclasses.replace(raised(self), rules=rules)  # type: ignore[no-any-return]

    @property
    def compute_format(self) -> Format:
        """The format of the computation as a :class:`~stablenum.formats.Format`."""
        return FORMATS[self.compute]

    @property
    def carrier(self) -> str:
        """The dtype of arrays in the computation, ``compute`` or, for an 8-bit format, bfloat16."""
        return _carrier(self.compute)

    def __str__(self) -> str:
        short = {full: name for name, full in reversed(_NAMES.items()) if name != "full"}
        text = ",".join(f"{k}={short[getattr(self, part)]}" for k, part in _PARTS.items())
        return text + "".join(f";{rule.pattern}:{_words(rule)}" for rule in self.rules)


def as_policy(policy: object) -> Policy:
    """Return a policy in any accepted form as a :class:`stablenum.Policy`.

    Args:
        policy: a Policy; a policy string (``"params=float32,compute=bfloat16"``, see
            :meth:`stablenum.Policy.parse`); or any object with ``param_dtype``, ``compute_dtype`` and
            ``output_dtype``, such as jmp's Policy.

    Raises:
        TypeError: ``policy`` is none of these.
        ValueError: an unknown format.

    Example:
        >>> as_policy("p=f32,c=bf16").compute
        'bfloat16'
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return Policy.parse(policy)
    parts = [getattr(policy, f"{part}_dtype", None) for part in ("param", "compute", "output")]
    if any(part is None for part in parts):
        raise TypeError(
            "policy must be a stablenum.Policy, a string such as 'params=float32,compute=bfloat16', or an "
            f"object with param_dtype, compute_dtype and output_dtype; got {type(policy).__name__}."
        )
    params, compute, output = (parse_format(part) for part in parts)
    return Policy(params=params, compute=compute, output=output)


def _words(rule: PolicyRule) -> str:
    parts = {k: getattr(rule, part) for k, part in _PARTS.items()}
    return ",".join(f"{k}={v}" for k, v in parts.items() if v is not None)


def _carrier(compute: str) -> str:
    return "bfloat16" if FORMATS[compute].bits == 8 else compute


def _stored(part: str, value: object) -> str:
    name = parse_format(value)
    if FORMATS[name].bits == 8:
        raise bad_field(part, "a format of at least 16 bits", value, hint="Only compute may have 8 bits.")
    return name


def _parts(field: str, text: object, half: str = "float16") -> dict[str, str]:
    if not isinstance(text, str) or not text.strip():
        raise bad_field(field, "a string such as 'params=float32,compute=bfloat16' or 'bf16'", text)
    if "=" not in text:
        name = parse_format(text, half=half)
        if FORMATS[name].bits == 8:
            return {"compute": name}
        return {"params": name, "compute": name, "output": name}
    found: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = _PARTS.get(key.strip(), key.strip())
        if key not in _PARTS.values():
            raise bad_field(field, "made of parts named params, compute or output (p, c or o)", text)
        found[key] = parse_format(value, half=half)
    return found


def _as_rule(given: Any) -> PolicyRule:
    if isinstance(given, PolicyRule):
        return PolicyRule(
            given.pattern,
            None if given.params is None else _stored("params", given.params),
            None if given.compute is None else parse_format(given.compute),
            None if given.output is None else _stored("output", given.output),
        )
    try:
        pattern, words = given
    except (TypeError, ValueError):
        raise bad_field("rules", "PolicyRules, or pairs of a pattern and a policy string", given) from None
    if not isinstance(pattern, str) or not pattern:
        raise bad_field("the pattern of a rule", "a string that is not empty", pattern)
    parts = _parts("rules", words)
    if "=" not in words:  # a single format sets computation and output; the parameters keep their format
        parts = {"compute": parts["compute"], "output": _carrier(parts["compute"])}
    return _as_rule(PolicyRule(pattern, **parts))
