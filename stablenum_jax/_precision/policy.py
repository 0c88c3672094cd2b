"""Precision policies over pytrees, under jmp's names: the public face is ``stablenum_jax.policy``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import stablenum
from stablenum.precision.policy import PolicyRule, parse_format
from stablenum_jax._precision.casts import cast_floating, cast_leaves

__all__ = [
    "Policy",
    "as_policy",
    "cast_to_full",
    "cast_to_half",
    "dtype_to_names",
    "get_policy",
    "half_dtype",
]

Tree = TypeVar("Tree")

# The names of each format in jmp's strings, the short one first.
dtype_to_names = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
    jnp.float8_e4m3fn: ("fp8", "e4m3", "float8_e4m3fn"),
    jnp.float8_e5m2: ("e5m2", "float8_e5m2"),
}
_SHORT = {jnp.dtype(dtype): names[0] for dtype, names in dtype_to_names.items()}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of stored parameters, of the computation and of its results, as in jmp's ``Policy``.

    The casts accept any pytree and change only its floating-point arrays (see ``cast_floating``). If a rule
    matches the module of a leaf (the path of dict keys, attributes and indices to it, without a leading
    ``params``), the leaf is cast to that rule's dtype. Rules have the grammar and precedence of
    :class:`stablenum.Policy`.

    Args:
        param_dtype: the dtype of stored parameters.
        compute_dtype: the dtype of the computation. An 8-bit dtype means quantized products (see
            :func:`stablenum_jax.fp8_dot`), for which arrays are cast to bfloat16.
        output_dtype: the dtype of results.
        rules: as in :class:`stablenum.Policy`, such as ``{"*norm*": "float32"}``.

    Raises:
        ValueError: a dtype is not a floating-point format, or has 8 bits for parameters or outputs.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> policy = Policy(jnp.float32, jnp.bfloat16, jnp.float32, rules={"*norm*": "float32"})
        >>> params = {"norm": {"scale": jnp.ones(2)}, "mlp": {"kernel": jnp.ones((2, 2))}}
        >>> jax.tree.map(lambda leaf: leaf.dtype.name, policy.cast_to_compute(params))
        {'mlp': {'kernel': 'bfloat16'}, 'norm': {'scale': 'float32'}}
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any
    rules: tuple[PolicyRule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", self.core.rules)

    @property
    def core(self) -> stablenum.Policy:
        """The same policy as plain data."""
        return stablenum.Policy(
            params=parse_format(self.param_dtype),
            compute=parse_format(self.compute_dtype),
            output=parse_format(self.output_dtype),
            rules=self.rules,
        )

    def at(self, path: str) -> Policy:
        """Return the policy of the module at ``path``, without rules."""
        return _from_core(self.core.at(path))

    def cast_to_param(self, x: Tree) -> Tree:
        """Cast floating-point arrays to their module's dtype for storage."""
        return self._cast(x, lambda here: here.params)

    def cast_to_compute(self, x: Tree) -> Tree:
        """Cast floating-point arrays to their module's dtype for computing (bfloat16 for an 8-bit one)."""
        return self._cast(x, lambda here: here.carrier)

    def cast_to_output(self, x: Tree) -> Tree:
        """Cast floating-point arrays to the output dtype."""
        return cast_floating(x, self.core.output)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """Return the policy with another dtype for results."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def _cast(self, tree: Tree, part: Callable[[stablenum.Policy], str]) -> Tree:
        core = self.core
        if not core.rules:
            return cast_floating(tree, part(core))
        return cast_leaves(tree, lambda path: jnp.dtype(part(core.at(path))))

    def __str__(self) -> str:
        parts = (self.param_dtype, self.compute_dtype, self.output_dtype)
        text = ",".join(f"{k}={_SHORT[jnp.dtype(dtype)]}" for k, dtype in zip("pco", parts, strict=True))
        return text + str(self.core).removeprefix(str(self.core.at("")))


def get_policy(policy_name: str, *, rules: Any = ()) -> Policy:
    """Return a policy from words: ``"params=float32,compute=half,output=float32"``, ``"c=bf16"``, ``"half"``.

    Args:
        policy_name: jmp's grammar, see :meth:`stablenum.Policy.parse`.
        rules: rules for modules by path, as in :class:`stablenum.Policy`.

    Raises:
        ValueError: a dtype or part is unknown.

    Example:
        >>> str(get_policy("c=bf16,o=full"))
        'p=full,c=bf16,o=full'
    """
    half = jnp.dtype(half_dtype()).name
    try:
        return _from_core(stablenum.Policy.parse(policy_name, half=half, rules=rules))
    except ValueError as error:
        raise ValueError(f"Unknown dtype or part in policy {policy_name!r}: {error}") from None


def as_policy(policy: Any) -> Policy:
    """Return a :class:`Policy` from a policy of this package, of the core or of jmp, or from words.

    Raises:
        TypeError: ``policy`` is none of these.
        ValueError: ``policy`` is a text that describes no policy.

    Example:
        >>> as_policy(stablenum.Policy(compute="bfloat16")).compute_dtype is jnp.bfloat16
        True
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, stablenum.Policy):
        return _from_core(policy)
    if isinstance(policy, str):
        return get_policy(policy)
    parts = [getattr(policy, f"{part}_dtype", None) for part in ("param", "compute", "output")]
    if None in parts or isinstance(policy, type):
        raise TypeError(
            "policy must be a string such as 'params=float32,compute=bfloat16', a stablenum.Policy, a "
            f"stablenum_jax.policy.Policy or a jmp.Policy; got {policy!r}."
        )
    param, compute, output = parts
    return Policy(param, compute, output)


def cast_to_full(tree: Tree) -> Tree:
    """Cast floating-point arrays to float32.

    Example:
        >>> cast_to_full({"h": jnp.ones(1, jnp.float16)})["h"].dtype
        dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: Tree) -> Tree:
    """Cast floating-point arrays to this machine's half precision, see :func:`half_dtype`.

    Example:
        >>> cast_to_half({"n": 1, "w": jnp.ones(1)})["w"].dtype.itemsize
        2
    """
    return cast_floating(tree, half_dtype())


def half_dtype() -> Any:
    """Return bfloat16 on a TPU, float16 elsewhere.

    Example:
        >>> jnp.dtype(half_dtype()).name in ("float16", "bfloat16")
        True
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def _from_core(core: stablenum.Policy) -> Policy:
    param, compute, output = (getattr(jnp, part) for part in (core.params, core.compute, core.output))
    return Policy(param, compute, output, core.rules)
