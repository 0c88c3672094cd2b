"""The names under which optimizers keep their moments, with the role of each, and what the names tell.

The tables are those of ``torch.optim`` and ``optax``. They are in the core because a checkpoint is judged by
these names alone, without the framework that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stablenum.diagnosis.audit.update_formulas import Role, UpdateFormula

__all__ = ["OPTAX_STATES", "TORCH_ROLES", "torch_formula", "torch_kind"]

# The entries that torch's optimizers, and others with the same names, store per parameter.
TORCH_ROLES: dict[str, Role] = {
    "exp_avg": Role.FIRST,
    "exp_avg_sq": Role.SECOND,
    "max_exp_avg_sq": Role.SECOND_MAX,
    "exp_inf": Role.NORM,
    "square_avg": Role.SECOND,
    "grad_avg": Role.MEAN,
    "acc_delta": Role.ACCUMULATOR,
    "momentum_buffer": Role.BUFFER,
    "kahan_comp": Role.COMPENSATION,
    "compensation": Role.COMPENSATION,
}

# The name of a state's class -> the kind of optimizer ("" if several share the class, or it has no moments)
# and the roles of its fields. optax uses one class for Adam, NAdam, RAdam, Adamax and Yogi.
OPTAX_STATES: dict[str, tuple[str, dict[str, Role]]] = {
    "ScaleByAdamState": ("adam", {"mu": Role.FIRST, "nu": Role.SECOND}),
    "ScaleByAmsgradState": ("amsgrad", {"mu": Role.FIRST, "nu": Role.SECOND, "nu_max": Role.SECOND_MAX}),
    "ScaleByBeliefState": ("adabelief", {"mu": Role.FIRST, "nu": Role.SECOND}),
    "ScaleByNovogradState": ("novograd", {"mu": Role.BUFFER, "nu": Role.SECOND}),
    "ScaleByAdanState": (
        "adan", {"m": Role.BUFFER, "v": Role.BUFFER, "n": Role.SECOND, "g": Role.BUFFER},
    ),
    "ScaleByRmsState": ("rmsprop", {"nu": Role.SECOND}),
    "ScaleByRmsWithCountState": ("rmsprop", {"nu": Role.SECOND}),
    "ScaleByRStdDevState": ("rmsprop", {"mu": Role.MEAN, "nu": Role.SECOND}),
    "ScaleByRStdDevWithCountState": ("rmsprop", {"mu": Role.MEAN, "nu": Role.SECOND}),
    "ScaleByRssState": ("adagrad", {"sum_of_squares": Role.SECOND}),
    "ScaleByAdaDeltaState": ("adadelta", {"e_g": Role.SECOND, "e_x": Role.ACCUMULATOR}),
    "ScaleByLionState": ("lion", {"mu": Role.BUFFER}),
    "TraceState": ("momentum", {"trace": Role.BUFFER}),
    "EmaState": ("ema", {"ema": Role.BUFFER}),
    "FactoredState": ("adafactor", {"v": Role.SECOND, "v_row": Role.OTHER, "v_col": Role.OTHER}),
    "KahanState": ("", {"compensation": Role.COMPENSATION}),
    "ScaleBySM3State": ("sm3", {"mu": Role.OTHER, "nu": Role.OTHER}),
}  # fmt: skip

_CORRECTED = ("adam", "nadam", "radam", "adamax", "sparse adam")
# What tells torch's optimizers apart in a state dict, which does not name the class: an entry of the state
# and a setting of the group. Adam and AdamW are alike; RAdam has their entries but not ``amsgrad``.
_SIGNS = (
    ("adamax", "exp_inf", "betas"),
    ("nadam", "mu_product", "momentum_decay"),
    ("adam", "exp_avg_sq", "amsgrad"),
    ("rmsprop", "square_avg", "alpha"),
    ("adadelta", "acc_delta", "rho"),
    ("adagrad", "sum", "lr_decay"),
    ("sgd", "momentum_buffer", "nesterov"),
)


def torch_kind(entries: Mapping[str, object], group: Mapping[str, object]) -> str:
    """Return the kind of the optimizer that wrote a state dict; "" if what it keeps does not tell.

    Args:
        entries: what the state holds for one parameter, by name.
        group: the settings of the parameter's group, by name.

    Example:
        >>> torch_kind({"step": 3, "square_avg": None}, {"alpha": 0.99, "eps": 1e-8})
        'rmsprop'
    """
    return next((kind for kind, entry, setting in _SIGNS if entry in entries and setting in group), "")


def torch_formula(
    kind: str,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    number: Callable[[Any], float | None],
) -> UpdateFormula:
    """Return the update formula of a parameter from the settings of its group in ``torch.optim``.

    Args:
        kind: as in :class:`UpdateFormula`; the formula of an unknown kind is empty.
        group: the settings of the parameter's group.
        state: what the optimizer keeps for the parameter, of which the step count is read.
        number: returns a value as a float, or None if it is not a number.
    """
    if not kind:
        return UpdateFormula()
    beta1, beta2 = (number(b) for b in group.get("betas", (None, None)))
    decoupled = group.get("decoupled_weight_decay", False)
    return UpdateFormula(
        kind=kind,
        lr=number(group.get("lr")),
        beta1=beta1,
        beta2=number(group.get("alpha", group.get("rho"))) if beta2 is None else beta2,
        eps=number(group.get("eps")),
        step=number(state.get("step")),
        momentum=number(group.get("momentum")) or 0.0,
        nesterov=bool(group.get("nesterov")),
        weight_decay=0.0 if decoupled else number(group.get("weight_decay")) or 0.0,
        maximize=bool(group.get("maximize")),
        corrected=kind in _CORRECTED,
        rate_decay=number(group.get("momentum_decay", group.get("lr_decay"))) or 0.0,
        momentum_product=number(state.get("mu_product")),
    )
