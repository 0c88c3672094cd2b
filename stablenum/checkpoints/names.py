"""What an entry of a state is, as far as its name tells; for what has no objects to ask."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from stablenum.checkpoints.finiteness import Kind

__all__ = [
    "in_optimizer",
    "is_factor",
    "is_record",
    "is_setting",
    "is_training",
    "kind_of_number",
    "may_be_mask",
]

# What the arrays are called that frameworks' layers train.
_TRAINED = frozenset(("bias", "beta", "embedding", "gamma", "kernel", "scale", "weight"))
_FACTORS = frozenset(("learning_rate", "lr", "momentum", "weight_decay"))
_COUNTS = frozenset(("count", "step"))
# The names under which programs keep an optimizer's state and what is no state of the training.
_OPTIMIZERS = re.compile(r"(opt|optim|optimizer|optimizers|optimiser|tx)(_?states?(_dict)?|_dict)?")
_RECORDS = re.compile(
    r"extras?|metrics?|histor(y|ies)|logs?|callbacks?|loops?|args|hparams|hyper_?parameters|config"
    r"|(lr_?)?schedulers?(_state(_dict)?)?|(grad_?)?scalers?(_state(_dict)?)?|__metadata__"
)
_SCALARS = re.compile(r"best(_\w+)?|(\w+_)?(loss|losses|score|metric|metrics|accuracy)")
# With one of these at the top, a checkpoint is that of a training, and what is beside them is no parameter.
_MODELS = re.compile(r"params|model(_state(_dict)?)?|state_dict")


def may_be_mask(name: str) -> bool:
    """Return whether the name of an entry allows it to be a mask.

    Example:
        >>> may_be_mask("model.attention.mask"), may_be_mask("params.dense.kernel")
        (True, False)
    """
    return re.split(r"[./]", name)[-1] not in _TRAINED


def is_setting(keys: Sequence[str]) -> bool:
    """Return whether an entry is a setting of an optimizer, such as its learning rate."""
    return bool({"param_groups", "hyperparams"} & set(keys))


def is_factor(keys: Sequence[str]) -> bool:
    """Return whether an entry is a setting with which steps multiply.

    Example:
        >>> is_factor(("optimizer", "param_groups", "0", "lr")), is_factor(("scheduler", "lr"))
        (True, False)
    """
    return is_setting(keys) and bool(_FACTORS & set(keys[-2:]))


def in_optimizer(keys: Sequence[str]) -> bool:
    """Return whether an entry is under the name of an optimizer's state."""
    return any(_OPTIMIZERS.fullmatch(key.lower()) for key in keys[:-1])


def is_training(paths: Iterable[Sequence[str]]) -> bool:
    """Return whether there is a model or an optimizer under a key of its own.

    Args:
        paths: the keys of each entry.
    """
    tops = {path[0].lower() for path in paths if len(path) > 1}
    return any(_MODELS.fullmatch(top) or _OPTIMIZERS.fullmatch(top) for top in tops)


def is_record(keys: Sequence[str], *, beside_model: bool) -> bool:
    """Return whether an entry is no state that training computes with, such as the best loss so far.

    Args:
        keys: its path.
        beside_model: whether it is by itself at the top of what :func:`is_training` calls a training.

    Example:
        >>> is_record(("metrics", "loss"), beside_model=False), is_record(("scale",), beside_model=False)
        (True, False)
    """
    top = keys[0].lower()
    return beside_model or bool(_RECORDS.fullmatch(top) or (len(keys) == 1 and _SCALARS.fullmatch(top)))


def kind_of_number(keys: Sequence[str], *, optimizer: bool) -> Kind:
    """Return the kind of one number, plain or in an array, that is not in a model.

    Args:
        keys: its path.
        optimizer: whether it belongs to an optimizer.

    Example:
        >>> kind_of_number(("optimizer", "param_groups", "0", "max_norm"), optimizer=True)
        'number'
        >>> kind_of_number(("optimizer", "param_groups", "0", "lr"), optimizer=True)
        'array'
    """
    return "array" if is_factor(keys) or (optimizer and keys[-1] in _COUNTS) else "number"
