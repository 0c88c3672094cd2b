"""Safe functions: the correct value and gradient at every edge case, in every float format.

The functions are written once over the array namespace ``xp`` and differentiated by the framework. Use them
through ``stablenum_torch.numerics`` and ``stablenum_jax.numerics``, which fill in ``xp``.

For inputs in formats narrower than float32, the computation is in float32 and the result is rounded once, to
the input's format. NaN stays NaN. No finite input, and no masked input, gives NaN in the value or in the
gradient.
"""

from stablenum._support.public_names import present
from stablenum.numerics.elementary import (
    arccos,
    arctan2,
    arctanh,
    divide,
    power,
    reciprocal,
    rsqrt,
    soft_cap,
    sqrt,
)
from stablenum.numerics.logarithms import (
    cumulative_logsumexp,
    log,
    log1mexp,
    log1pexp,
    log_sigmoid,
    log_softmax,
    logaddexp,
    logsubexp,
    logsumexp,
    softmax,
    softplus,
    xlogy,
)
from stablenum.numerics.norms import layer_norm, norm, normalize, rms_norm, std, variance

__all__ = [
    "arccos",
    "arctan2",
    "arctanh",
    "cumulative_logsumexp",
    "divide",
    "layer_norm",
    "log",
    "log1mexp",
    "log1pexp",
    "log_sigmoid",
    "log_softmax",
    "logaddexp",
    "logsubexp",
    "logsumexp",
    "norm",
    "normalize",
    "power",
    "reciprocal",
    "rms_norm",
    "rsqrt",
    "soft_cap",
    "softmax",
    "softplus",
    "sqrt",
    "std",
    "variance",
    "xlogy",
]


__dir__ = present(globals())
