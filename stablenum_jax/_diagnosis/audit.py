"""``audit`` and ``repair``: report the risks in an optimizer's state, and reset poisoned elements.

Both run on the host, outside ``jit``: each array is read once, in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import array_api_compat.numpy as xp
import jax
import jax.numpy as jnp
import numpy as np

from stablenum._support.settings_checks import check_number
from stablenum.diagnosis.audit import (
    Audit,
    Measured,
    Role,
    Row,
    UpdateFormula,
    eps_is_lost,
    join_blocks,
    measure_block,
    poisoned,
)
from stablenum.precision.rounding import compensated_value
from stablenum_jax._diagnosis.optax_states import Group, Part, find_groups
from stablenum_jax._trees.leaves import check_state, is_measurable
from stablenum_jax._trees.names import path_name

__all__ = ["audit", "repair", "state_problems"]

PyTree: TypeAlias = Any

_CORRECTED = ("adam", "amsgrad", "adabelief", "novograd")
# In optax, AMSGrad takes its maximum over bias-corrected moments, and the denominators of Novograd, Adan and
# SM3 are other sums, so the eps of these optimizers cannot be compared with sqrt(v).
_DENOMINATORS = ("adam", "adabelief", "rmsprop", "adagrad", "adadelta")
_AVERAGES = ("adam", "amsgrad", "adabelief", "novograd", "adan", "rmsprop", "adadelta")
_SQUARED_GRADIENTS = ("adam", "rmsprop", "adagrad", "adadelta")
_AT_A_TIME = 2**15


def audit(
    opt_state: PyTree,
    params: PyTree,
    grads: PyTree | None = None,
    updates: PyTree | None = None,
    learning_rate: float | None = None,
    *,
    b1: float | None = None,
    b2: float | None = None,
    eps: float | None = None,
) -> Audit:
    """Report on the state of an optax optimizer, parameter by parameter, sorted by risk.

    The audit finds the moments inside ``chain``, ``masked``, ``partition``, ``MultiSteps``,
    ``inject_hyperparams``, a flax ``TrainState`` and an ``nnx.Optimizer``. Per parameter, the report has the
    RMS of the update, max abs(dw)/abs(w), frac(v == 0 and m != 0), the counts of inf and negative second
    moments and of NaN, sqrt(v) compared with eps, RMS(g^2/v), and frac(w + dw == w). An optax state does not
    contain the hyperparameters of its optimizer. A hyperparameter that neither the arguments nor
    ``inject_hyperparams`` provide is unknown, and values that depend on it are None ("-" in the table).

    Args:
        opt_state: what ``tx.init`` or ``tx.update`` returned.
        params: the parameters that the optimizer trains.
        grads: unscaled gradients, a tree like ``params``, from which RMS(g^2/v) is computed.
        updates: what ``tx.update`` returned, a tree like ``params``.
        learning_rate: states that the optimizer is Adam or AdamW, whose update is then computed with
            ``b1``, ``b2`` and ``eps``. For NAdam, RAdam, Adamax and Yogi, for which optax uses the same
            state, leave it out and give ``updates``.
        b1, b2, eps: the optimizer's hyperparameters. Leave them out for Adamax, whose state contains a norm
            where Adam's contains a second moment.

    Raises:
        TypeError: ``opt_state`` is not a state, ``grads`` or ``updates`` holds whole numbers; or called under
            ``jit``.
        ValueError: ``grads`` or ``updates`` is not a tree like ``params``; no moment fits ``params``; a
            hyperparameter is not a finite number in its range.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones(3)}
        >>> tx = optax.adam(1e-3)
        >>> updates, opt_state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
        >>> audit(opt_state, params, updates=updates).ok
        True
        >>> broken = opt_state[0]._replace(nu={"w": jnp.asarray([1.0, -1.0, 1.0])})
        >>> report = audit((broken, *opt_state[1:]), params)
        >>> print(report.risks[0])
        w: state of 1 of 3 elements is poisoned: 1 with a negative second moment (its root is NaN)
        >>> audit(repair((broken, *opt_state[1:]), report), params).ok
        True
    """
    _check_concrete(opt_state, params, grads, updates)
    check_state("opt_state", opt_state)
    leaves = {
        path_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if is_measurable(path, leaf) and hasattr(leaf, "dtype")
    }
    gradients, given = _as_params(grads, leaves, "grads"), _as_params(updates, leaves, "updates")
    numbers = _checked_numbers(learning_rate, b1, b2, eps)
    groups = _joined(find_groups(opt_state, frozenset(leaves)))
    _check_fit(groups, leaves)
    if not groups and find_groups(params, frozenset()):
        raise ValueError("opt_state must come before params; got params that hold moments. Swap the two.")
    rows = []
    for name, leaf in leaves.items():
        for i, group in enumerate(groups.get(name) or [Group(name, "", (), None, {})]):
            formula = _formula(group, numbers)
            title = name if not i else f"{name} ({i + 1})"
            rows.append(_row(title, leaf, group, formula, gradients.get(name), given.get(name)))
    notes = _notes(rows, groups, gradients)
    return Audit.of(_called(groups), rows, notes=notes)


def state_problems(opt_state: PyTree, params: PyTree) -> tuple[str, ...]:
    """Describe each problem in an optimizer's state that can make the next update wrong, the worst first.

    Parameters are not judged, and warnings are left out: see :func:`audit`.
    """
    return audit(opt_state, params).problems()


def repair(opt_state: PyTree, audit: Audit) -> PyTree:
    """Return ``opt_state`` with the poisoned elements of its moments set to 0; all other values stay bit for
    bit.

    An element is poisoned if one of its moments is not finite, or a second moment is negative. All its
    moments are reset. Step counts stay, so bias correction treats the element as late in training: the first
    update of such an element is lr (1 - b1) / sqrt(1 - b2), which is 3.2 lr with Adam's defaults, and later
    updates settle. Parameters are not changed, even if they are not finite.

    Args:
        opt_state: the audited state.
        audit: the result of :func:`audit` for it.

    Raises:
        TypeError: ``audit`` is not an audit, or the call is under ``jit``.
        ValueError: the audit names a parameter for which the state contains no poisoned moments, so it is
            the audit of another state.
    """
    if not isinstance(audit, Audit):
        raise TypeError(
            f"audit must be what stablenum_jax.audit(opt_state, params) returned; got {type(audit).__name__}."
        )
    _check_concrete(opt_state)
    check_state("opt_state", opt_state)
    shapes = {row.name.partition(" (")[0]: row.shape for row in audit.rows if row.measured.poisoned}
    leaves, structure = jax.tree.flatten(opt_state)
    # The state with numbers in place of its leaves: the parts found in it show where to write.
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    found = set()
    for name, groups in _joined(find_groups(numbered, frozenset())).items():
        for group in groups if name in shapes else ():
            places = [part.leaf for part in group.parts]
            parts = [part._replace(leaf=leaves[part.leaf]) for part in group.parts]
            known = [
                (place, part)
                for place, part in zip(places, parts, strict=True)
                if _is_elementwise(part, shapes[name])
            ]
            if not known:
                continue
            mask = poisoned([(part.role, _wide(_host(part.leaf))) for _, part in known], xp=xp)
            if mask.any():
                found.add(name)
                for place, part in known:
                    leaves[place] = jnp.where(mask, jnp.zeros((), part.leaf.dtype), part.leaf)
    missing = sorted(set(shapes) - found)
    if missing:
        raise ValueError(
            f"audit must be of this opt_state; it names {missing[0]!r}, which has no poisoned moment here. "
            "Audit the state that you want to repair."
        )
    return jax.tree.unflatten(structure, leaves)


# --- arguments -------------------------------------------------------------------------------


def _check_concrete(*trees: PyTree) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees)):
        raise TypeError(
            "audit and repair read values on the host: call them outside jit, grad, vmap and scan."
        )


def _as_params(tree: PyTree | None, leaves: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Map names to the leaves of a tree, which must fit the parameters."""
    if tree is None:
        return {}
    found = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for name, leaf in found.items():
        if name in leaves and not _is_inexact(leaf) and getattr(leaf, "dtype", None) != jax.dtypes.float0:
            got = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"{what} must hold floating-point arrays; {name!r} is {got}.")
    found = {name: leaf for name, leaf in found.items() if _is_inexact(leaf)}
    if leaves and not found:
        raise ValueError(f"{what} must be a tree like params, or None; got no floating-point array.")
    for name, leaf in found.items():
        if name not in leaves:
            raise ValueError(f"{what} must be a tree like params; it has {name!r}, which is not in params.")
        if jnp.shape(leaf) != jnp.shape(leaves[name]):
            raise ValueError(
                f"{what} must have the shapes of params; {name!r} has shape {jnp.shape(leaf)}, "
                f"but the parameter has {jnp.shape(leaves[name])}."
            )
    return found


def _checked_numbers(
    learning_rate: float | None, b1: float | None, b2: float | None, eps: float | None
) -> dict[str, float | None]:
    """Return the hyperparameters that were given, by their names in an update formula.

    Raises:
        ValueError: one is not a finite number in its range.
    """
    bounds: dict[str, Any] = {
        "learning_rate": (learning_rate, {"at_least": 0.0}),
        "b1": (b1, {"at_least": 0.0, "at_most": 1.0}),
        "b2": (b2, {"at_least": 0.0, "at_most": 1.0}),
        "eps": (eps, {"at_least": 0.0}),
    }
    numbers = [None if v is None else check_number(name, v, **kept) for name, (v, kept) in bounds.items()]
    return dict(zip(("lr", "beta1", "beta2", "eps"), numbers, strict=True))


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _joined(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Map each parameter to its groups, joined if they share no role (RMSprop's average and its momentum)."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        mine = found.setdefault(group.parameter, [])
        for i, other in enumerate(mine):
            if not _roles(other) & _roles(group):
                formula = other if other.kind and Role.BUFFER not in _roles(other) else group
                kind = formula.kind or other.kind or group.kind
                mine[i] = formula._replace(kind=kind, parts=other.parts + group.parts)
                break
        else:
            mine.append(group)
    return found


def _check_fit(groups: Mapping[str, Sequence[Group]], leaves: Mapping[str, Any]) -> None:
    """Check that the state belongs to the parameters.

    Raises:
        ValueError: there are moments, and none of them belongs to one of the parameters; or a first moment
            has another shape than its parameter.
    """
    for name, mine in groups.items():
        for part in (part for group in mine for part in group.parts if part.role is Role.FIRST):
            if name in leaves and jnp.shape(part.leaf) != jnp.shape(leaves[name]):
                raise ValueError(
                    f"params must be the parameters of opt_state, whose moment of {name!r} has shape "
                    f"{jnp.shape(part.leaf)}; got shape {jnp.shape(leaves[name])}."
                )
    if groups and not set(groups) & set(leaves):
        raise ValueError(
            f"params must be the parameters of opt_state, which has moments of {next(iter(groups))!r}, "
            f"but params have {next(iter(leaves), 'no leaf')!r}."
        )


def _roles(group: Group) -> set[Role]:
    return {part.role for part in group.parts} - {Role.OTHER}


def _formula(group: Group, numbers: Mapping[str, float | None]) -> UpdateFormula:
    """Return the hyperparameters that were given, else those in the state of ``inject_hyperparams``."""

    kind, count = group.kind, group.count
    # optax.adamax keeps a norm where Adam keeps a second moment, under the same name. Unlike Adam it has eps
    # but no eps_root. Yogi has no eps_root either, so its hyperparameters are left unknown too.
    like_adam = kind != "adam" or "eps_root" in group.hyperparams

    def number(given: str, *injected: str) -> float | None:
        if numbers.get(given) is not None:
            return float(numbers[given] or 0.0)
        for name in injected if like_adam else ():
            value = group.hyperparams.get(name)
            if value is not None and jnp.shape(value) == () and _is_real_number(value):
                return float(value)
        return None

    return UpdateFormula(
        kind=kind if kind != "adam" or numbers["lr"] is not None else "adam or the like",
        lr=numbers["lr"],
        beta1=number("beta1", "b1"),
        beta2=number("beta2", "b2", "decay", "rho") if kind in _AVERAGES else None,
        eps=number("eps", "eps") if kind in _DENOMINATORS else None,
        eps_root=number("", "eps_root") or 0.0,
        step=None if count is None else float(count),
        corrected=kind in _CORRECTED,
    )


def _is_real_number(value: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(value).dtype, jnp.floating)


# --- one parameter ---------------------------------------------------------------------------


def _row(name: str, leaf: Any, group: Group, formula: UpdateFormula, gradient: Any, update: Any) -> Row:
    parts = [part for part in group.parts if _is_looked_at(part)]
    same = [part for part in parts if _is_elementwise(part, leaf.shape)]
    rest = [part for part in parts if not _is_elementwise(part, leaf.shape)]
    second_dtype = next((str(p.leaf.dtype) for p in same if p.role.squared), None)
    lost = eps_is_lost(formula.eps, second_dtype)
    comparable = gradient if group.kind in _SQUARED_GRADIENTS else None
    return Row(
        name=name,
        shape=tuple(jnp.shape(leaf)),
        dtype=str(leaf.dtype),
        state_dtypes={p.entry: str(p.leaf.dtype) for p in parts},
        law=formula,
        measured=_measure(
            _whole(leaf, same), same, comparable, update, formula, 0.0 if lost else formula.eps
        ),
        others=_bad_elements(rest),
        second_dtype=second_dtype,
        eps_lost=lost,
    )


def _measure(
    leaf: Any, parts: Sequence[Part], gradient: Any, update: Any, formula: UpdateFormula, eps: float | None
) -> Measured:
    weights = _host(leaf).reshape(-1)
    values = [(part.role, _host(part.leaf).reshape(-1)) for part in parts]
    flat, moved = (None if x is None else _host(x).reshape(-1) for x in (gradient, update))
    narrow = _rounding(weights.dtype)
    blocks = []
    with np.errstate(all="ignore"):  # non-finite elements are counted
        for start in range(0, weights.size, _AT_A_TIME):
            cut = slice(start, start + _AT_A_TIME)
            parts_of_block = measure_block(
                _wide(weights[cut]),
                [(role, _wide(v[cut])) for role, v in values],
                None if flat is None else _wide(flat[cut]),
                None if moved is None else _wide(moved[cut]),
                formula,
                eps=eps,
                narrow=narrow,
                xp=xp,
            )
            blocks.append({name: float(part) for name, part in parts_of_block.items()})
    return join_blocks(blocks)


def _host(leaf: Any) -> np.ndarray:
    """Return the array on the host.

    Raises:
        ValueError: parts of the array belong to other processes.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            "an audit reads whole arrays, but one is spread over several processes; gather it first with "
            "jax.experimental.multihost_utils.process_allgather(tree, tiled=True)."
        )
    return np.asarray(leaf)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def _rounding(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.astype(dtype).astype(x.dtype)


def _bad_elements(parts: Sequence[Part]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        bad = int(np.count_nonzero(~np.isfinite(_wide(_host(part.leaf)))))
        found[part.entry] = found.get(part.entry, 0) + bad
    return found


def _is_elementwise(part: Part, shape: tuple[int, ...]) -> bool:
    """Return whether a leaf has a known role, and an element for each element of a parameter of this
    shape."""
    return part.role is not Role.OTHER and _is_looked_at(part) and part.leaf.shape == tuple(shape)


def _is_looked_at(part: Part) -> bool:
    """Return whether a leaf contains numbers to measure; a compensation is an integer number of units."""
    return _is_inexact(part.leaf) or (part.role is Role.COMPENSATION and hasattr(part.leaf, "dtype"))


def _whole(leaf: Any, parts: Sequence[Part]) -> Any:
    """Return the parameter with its compensation added, if there is one."""
    kept = next((part.leaf for part in parts if part.role is Role.COMPENSATION), None)
    if kept is None or kept.dtype != jnp.int16:
        return leaf
    return compensated_value(_host(leaf), _host(kept), xp=xp)


# --- in words --------------------------------------------------------------------------------


def _called(groups: Mapping[str, Sequence[Group]]) -> str:
    kinds = dict.fromkeys(g.kind for mine in groups.values() for g in mine if g.kind)
    return f"the optax state ({', '.join(kinds)})" if kinds else "the optax state"


def _notes(
    rows: Sequence[Row], groups: Mapping[str, Sequence[Group]], gradients: Mapping[str, Any]
) -> list[str]:
    notes = []
    bad = [row.name for row in rows if row.measured.gradient_bad]
    if bad:
        notes.append(f"gradients are not finite: {', '.join(bad[:4])}; replay the step to see why")
    adam = [row for row in rows if row.law.corrected]
    if adam and any(row.law.beta2 is None for row in adam) and gradients:
        notes.append("RMS(g^2/v) needs b2 for the bias correction: audit(..., b2=0.999)")
    if any(row.law.eps is None and row.law.kind.startswith(_DENOMINATORS) for row in rows):
        notes.append("eps is not in the state: audit(..., b2=0.999, eps=1e-8) compares it with sqrt(v)")
    if not groups:
        notes.append("no moments were found in opt_state")
    return notes
