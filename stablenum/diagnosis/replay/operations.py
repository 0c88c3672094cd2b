"""Tables of operations, under the names by which users call them.

Adapters translate their primitives to these names: ``aten._softmax`` and the subtraction inside
``jax.nn.softmax`` are both "softmax".
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ADVICE", "ANSWERING", "BOUNDARIES", "CLIPPING", "DEFAULT_AXIS", "EXACT", "INSIDE", "MASKED", "MATRICES",
    "MOVING", "OF_A_DISTRIBUTION", "REMEDIES", "ROWS", "SELECTING", "UNSEEN_WRITE", "ZERO_WEIGHT", "Remedy",
]  # fmt: skip

# What made a value whose memory was written without the framework.
UNSEEN_WRITE = "a write without torch, as through NumPy,"

# Operations that choose between values element by element; values that are not chosen get gradient 0.
SELECTING = frozenset({"where", "masked_fill", "clamp", "maximum", "minimum", "relu"})

# Those of them that cut values at a bound.
CLIPPING = frozenset({"clamp", "maximum", "minimum", "relu"})

# Operations that move or place values without computing: an infinity that first appears here was put there.
MOVING = SELECTING | {
    "broadcast", "cat", "clone", "constant", "copy", "full", "gather", "index", "index_put", "pad",
    "reshape", "scatter", "slice", "stack", "transpose",
}  # fmt: skip

# Operations whose results are never rounded, besides those that move values.
EXACT = frozenset({
    "abs", "amax", "amin", "argmax", "argmin", "ceil", "cummax", "cummin", "floor", "max", "max_pool", "min",
    "neg", "round", "sign", "sort", "top_k", "topk", "trunc",
})  # fmt: skip

# Operations on whole rows: if a whole row is masked, nothing is left to sum.
MASKED = frozenset({"softmax", "log_softmax", "logsumexp", "cross_entropy", "attention", "logcumsumexp"})

# Functions of a distribution, which return a constant for a value outside its support.
OF_A_DISTRIBUTION = frozenset({
    "cdf", "isf", "log_cdf", "log_prob", "logcdf", "logpdf", "logpmf", "logsf", "pdf", "pmf", "ppf", "sf",
})  # fmt: skip

# Operations that return an infinity or NaN themselves, for example for a fully masked row, a singular matrix
# or a probability of 0.
ANSWERING = OF_A_DISTRIBUTION | {
    "exp1",
    "expi",
    "expm",
    "expn",
    "gamma",
    "kl_div",
    "lgamma",
    "logdet",
    "logit",
    "logsumexp",
    "ndtri",
    "polygamma",
    "slogdet",
    "xlogy",
    "zeta",
}

# Operations on matrices.
MATRICES = frozenset(
    {"cholesky", "cond", "det", "eig", "eigh", "inv", "logdet", "qr", "slogdet", "solve", "svd"}
)

# Arguments at which a function or its derivative is infinite or undefined.
BOUNDARIES = {
    "acos": "an argument of 1 or -1 (infinite slope) or beyond (undefined)",
    "acosh": "an argument of 1 (infinite slope) or below (undefined)",
    "arctanh": "an argument of 1 or -1 or beyond",
    "asin": "an argument of 1 or -1 (infinite slope) or beyond (undefined)",
    "atan2": "both arguments 0",
    "batch_norm": "a variance below 0, or a batch of which a mask leaves nothing",
    "binary_cross_entropy": "a probability or a target outside 0 to 1",
    "cholesky": "a matrix that is not positive definite",
    "cholesky_solve": "a factor with 0 on its diagonal",
    "cosine_similarity": "a vector of zeros",
    "cross_entropy": "no valid target, or a class of probability 0",
    "cond": "a singular matrix",
    "ctc_loss": "a target that does not fit into its input",
    "det": "a singular matrix",
    "digamma": "an argument of 0 or a negative integer",
    "div": "a divisor of 0",
    "eig": "equal eigenvalues, where eigenvectors have no derivative",
    "eigh": "equal eigenvalues, where eigenvectors have no derivative",
    "entr": "an argument of 0 (infinite slope) or below (undefined)",
    "erfinv": "an argument of 1 or -1 (inf) or beyond (undefined)",
    "exp1": "an argument of 0 (inf) or below (undefined)",
    "expi": "an argument of 0, where it is -inf",
    "expm": "a matrix so large that it would have to be squared more than max_squarings times",
    "expn": "an argument of 0 (inf) or below (undefined)",
    "fmod": "a divisor of 0",
    "gamma": "an argument of 0 or a negative integer",
    "gaussian_nll": "a variance of 0",
    "group_norm": "a group of equal numbers, with eps 0",
    "hypot": "both arguments 0, where it has no derivative",
    "igamma": "a parameter of 0 or below, or an argument of 0 or below",
    "igammac": "a parameter of 0 or below, or an argument of 0 or below",
    "inv": "a singular matrix",
    "kl_div": "a probability of 0",
    "layer_norm": "a row of equal numbers, with eps 0",
    "lgamma": "an argument of 0 or a negative integer",
    "log": "an argument of 0 (-inf) or below (NaN)",
    "log10": "an argument of 0 (-inf) or below (NaN)",
    "log1p": "an argument of -1 (-inf) or below (NaN)",
    "log2": "an argument of 0 (-inf) or below (NaN)",
    "logaddexp": "both arguments -inf",
    "logcumsumexp": "terms that are all -inf",
    "logdet": "a matrix with a determinant of 0 (-inf) or below (NaN)",
    "logit": "an argument of 0 or 1 (infinite) or beyond (undefined)",
    "logsumexp": "a row of which every term is -inf",
    "mean": "no elements to take the mean of",
    "median": "no elements to take the median of",
    "multinomial": "no probability above 0, or one below",
    "ndtri": "an argument of 0 or 1 (infinite) or beyond (undefined)",
    "norm": "a vector of zeros, where the norm has no derivative",
    "normalize": "a vector of zeros, with an eps that is 0 in its format",
    "poisson_nll": "a rate of 0 or below",
    "pow": "a base of 0 with a negative exponent or one below 1, or a negative base",
    "polygamma": "an argument of 0 or a negative integer",
    "qr": "a matrix whose columns are not independent, where the factors have no derivative",
    "reciprocal": "an argument of 0",
    "regularized_incomplete_beta": "a parameter of 0 or below, or an argument of 0 or 1 or beyond",
    "remainder": "a divisor of 0",
    "rms_norm": "a row of zeros, with eps 0",
    "rsqrt": "an argument of 0 or below",
    "slogdet": "a singular matrix",
    "solve": "a singular matrix",
    "solve_triangular": "a matrix with 0 on its diagonal",
    "sqrt": "an argument of 0 (infinite slope) or below (NaN)",
    "std": "fewer than two elements, or all equal (infinite slope)",
    "svd": "equal singular values, where singular vectors have no derivative",
    "var": "fewer than two elements",
    "weight_norm": "a row of zeros, which it divides by its length",
    "xlog1py": "a y of -1 while x is not 0",
    "xlogy": "a y of 0 while x is not 0",
    "zeta": "an argument of 1 (inf) or below (undefined)",
}
BOUNDARIES |= dict.fromkeys(
    OF_A_DISTRIBUTION,
    "a value at or beyond the edge of the distribution's support, or a parameter out of range",
)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A safe function and a line of code that calls it, in which ``{ns}`` stands for the adapter and
    ``{axis}`` for its word for an axis."""

    name: str
    code: str


# The arguments of the safe functions over rows, besides the arrays: one axis ("axis") or several ("axes").
ROWS = {
    "losses.cosine_similarity": ("axis",),
    "numerics.log_softmax": ("axis",),
    "numerics.logsumexp": ("axis", "keepdims"),
    "numerics.norm": ("axes", "keepdims"),
    "numerics.normalize": ("axis",),
    "numerics.rms_norm": ("axes",),
    "numerics.softmax": ("axis",),
    "numerics.std": ("axes", "correction", "keepdims"),
    "numerics.variance": ("axes", "correction", "keepdims"),
}

# Stands in the code below for the axis of the user's call, as long as that is not known.
DEFAULT_AXIS = ", {axis}=-1"

_SOFTMAX = Remedy("numerics.softmax", "{ns}.numerics.softmax(x, {axis}=-1, mask=mask)")

REMEDIES = {
    "acos": Remedy("numerics.arccos", "{ns}.numerics.arccos(x)"),
    "arctanh": Remedy("numerics.arctanh", "{ns}.numerics.arctanh(x)"),
    "atan2": Remedy("numerics.arctan2", "{ns}.numerics.arctan2(y, x)"),
    "attention": _SOFTMAX,
    "binary_cross_entropy": Remedy(
        "losses.binary_cross_entropy",
        "{ns}.losses.binary_cross_entropy(logits, y)  # without a sigmoid before it",
    ),
    "cosine_similarity": Remedy("losses.cosine_similarity", "{ns}.losses.cosine_similarity(x, y, {axis}=-1)"),
    "cross_entropy": Remedy("losses.cross_entropy", "{ns}.losses.cross_entropy(logits, targets)"),
    "div": Remedy("numerics.divide", "{ns}.numerics.divide(x, y, fill=0.0)"),
    "gaussian_nll": Remedy("losses.gaussian_nll", "{ns}.losses.gaussian_nll(mean, y, var)"),
    "kl_div": Remedy("losses.kl_divergence", "{ns}.losses.kl_divergence(p, q)"),
    "layer_norm": Remedy("numerics.layer_norm", "{ns}.numerics.layer_norm(x, weight=weight, bias=bias)"),
    "log": Remedy("numerics.log", "{ns}.numerics.log(x)  # for a probability: log_softmax(logits) instead"),
    "log_softmax": Remedy("numerics.log_softmax", "{ns}.numerics.log_softmax(x, {axis}=-1, mask=mask)"),
    "logaddexp": Remedy("numerics.logaddexp", "{ns}.numerics.logaddexp(a, b)"),
    "logcumsumexp": Remedy("numerics.cumulative_logsumexp", "{ns}.numerics.cumulative_logsumexp(x)"),
    "logsumexp": Remedy("numerics.logsumexp", "{ns}.numerics.logsumexp(x, {axis}=-1)"),
    "norm": Remedy("numerics.norm", "{ns}.numerics.norm(x, {axis}=-1)"),
    "normalize": Remedy("numerics.normalize", "{ns}.numerics.normalize(x, {axis}=-1)"),
    "poisson_nll": Remedy("losses.poisson_nll", "{ns}.losses.poisson_nll(log_rate, y)"),
    "pow": Remedy("numerics.power", "{ns}.numerics.power(x, exponent)"),
    "reciprocal": Remedy("numerics.reciprocal", "{ns}.numerics.reciprocal(x, fill=0.0)"),
    "rms_norm": Remedy("numerics.rms_norm", "{ns}.numerics.rms_norm(x, weight=weight)"),
    "rsqrt": Remedy("numerics.rsqrt", "{ns}.numerics.rsqrt(x, fill=0.0)"),
    "sigmoid_focal_loss": Remedy("losses.binary_focal", "{ns}.losses.binary_focal(logits, y)"),
    "softmax": _SOFTMAX,
    "sqrt": Remedy("numerics.sqrt", "{ns}.numerics.sqrt(x)"),
    "std": Remedy("numerics.std", "{ns}.numerics.std(x, {axis}=-1)"),
    "var": Remedy("numerics.variance", "{ns}.numerics.variance(x, {axis}=-1)"),
    "xlogy": Remedy("numerics.xlogy", "{ns}.numerics.xlogy(x, y)"),
}

_REGULAR = "add a small multiple of the identity to the matrix"
_DISTINCT = (
    "differentiate only through the values, or keep them apart: add a small diagonal of distinct numbers"
)
_DIAGONAL = "keep the diagonal away from 0: give it by an exponential or a softplus, or add a small number"
ZERO_WEIGHT = (
    "initialise the weight with numbers other than 0, of which it takes the direction; for a layer that "
    "starts at 0, set the gain to 0 instead (parametrizations.weight.original0 or weight_g), or multiply its "
    "output by a scale of 0"
)
INSIDE = "clamp the argument slightly inside the domain before the call"
_IN_SUPPORT = (
    "keep the parameters of the distribution inside their range (a scale or a rate at 1e-6 or more), and the "
    "values inside its open support: clip a proportion or a probability to [1e-6, 1 - 1e-6] and a positive "
    "number to at least 1e-6, or leave out values on the edge; a sample can be rounded to the edge, too"
)

# The remedies for operations without a safe function.
ADVICE = {
    "acosh": INSIDE,
    "asin": INSIDE,
    "batch_norm": (
        "leave out a batch of which a mask leaves nothing, before the forward pass, because it enters the "
        "running statistics; otherwise find out what wrote the running variance: it must not be below 0"
    ),
    "cholesky": _REGULAR,
    "cholesky_solve": _DIAGONAL,
    "cond": _REGULAR,
    "ctc_loss": "leave out targets that are longer than their input (torch: zero_infinity=True)",
    "det": _REGULAR,
    "digamma": INSIDE,
    "eig": _DISTINCT,
    "eigh": _DISTINCT,
    "entr": INSIDE,
    "erfinv": INSIDE,
    "exp1": INSIDE,
    "expi": INSIDE,
    "expm": (
        "bring the matrix to a smaller norm: look at its largest factor, such as a time in another unit, or "
        "call it with more squarings (max_squarings=48)"
    ),
    "expn": INSIDE,
    "fmod": INSIDE,
    "gamma": INSIDE,
    "group_norm": "use an eps that its format can represent (1e-5)",
    "hypot": "add a small number inside the root: (x * x + y * y + 1e-12).sqrt()",
    "igamma": INSIDE,
    "igammac": INSIDE,
    "inv": _REGULAR,
    "lgamma": INSIDE,
    "log10": INSIDE,
    "log1p": INSIDE,
    "log2": INSIDE,
    "logdet": (
        "where the determinant may be negative, as in a flow, take the logarithm of its magnitude: "
        "torch.linalg.slogdet(A).logabsdet; for a covariance, add a small multiple of the identity"
    ),
    "logit": INSIDE,
    "mean": "divide the sum by max(count, 1)",
    "median": "leave out the call, or give it a value of its own, where nothing is selected",
    "multinomial": "give it probabilities from a softmax, or leave out rows without any",
    "ndtri": INSIDE,
    "polygamma": INSIDE,
    "qr": "factor a matrix of full rank: start from random numbers, or add a small multiple of the identity",
    "regularized_incomplete_beta": INSIDE,
    "remainder": INSIDE,
    "slogdet": _REGULAR,
    "solve": _REGULAR,
    "solve_triangular": _DIAGONAL,
    "svd": _DISTINCT,
    "weight_norm": ZERO_WEIGHT,
    "xlog1py": INSIDE,
    "zeta": INSIDE,
}
ADVICE |= dict.fromkeys(OF_A_DISTRIBUTION, _IN_SUPPORT)
