"""The name of an equation: the library function that the user called, else its primitive."""

from __future__ import annotations

from collections.abc import Iterable

from stablenum.diagnosis.replay.operations import OF_A_DISTRIBUTION

__all__ = ["answering_name", "function_name", "operation_name", "primitive_name"]

# Library functions, by the last part of their name or by "Class.method".
_FUNCTIONS = {
    "softmax": "softmax", "log_softmax": "log_softmax", "logsumexp": "logsumexp", "norm": "norm",
    "std": "std", "var": "var", "nanstd": "std", "nanvar": "var", "mean": "mean", "nanmean": "mean",
    "average": "mean", "sum": "sum",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "log": "log", "log1p": "log1p", "log2": "log2",
    "log10": "log10", "logaddexp": "logaddexp", "logaddexp2": "logaddexp", "cumlogsumexp": "logcumsumexp",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "power": "pow", "float_power": "pow",
    "arccos": "acos", "acos": "acos", "arcsin": "asin", "asin": "asin", "arctan2": "atan2",
    "atan2": "atan2", "arctanh": "arctanh", "atanh": "arctanh", "arccosh": "acosh", "acosh": "acosh",
    "cbrt": "cbrt", "reciprocal": "reciprocal", "hypot": "hypot", "sinc": "sinc", "xlogy": "xlogy",
    "xlog1py": "xlog1py", "ndtri": "ndtri", "logit": "logit", "exp1": "exp1", "expi": "expi",
    "expn": "expn", "gamma": "gamma", "zeta": "zeta",
    "entr": "xlogy", "rel_entr": "kl_div", "kl_div": "kl_div", "gammaln": "lgamma",
    "digamma": "digamma", "polygamma": "polygamma", "remainder": "remainder", "mod": "remainder",
    "fmod": "fmod", "true_divide": "div", "divide": "div", "_operator_truediv": "div",
    "_operator_pow": "pow", "matmul": "matmul", "dot": "matmul", "einsum": "matmul",
    "tensordot": "matmul", "vdot": "matmul", "inner": "matmul", "cumsum": "cumsum", "cumprod": "cumprod",
    "prod": "prod", "det": "det", "slogdet": "slogdet", "inv": "inv", "solve": "solve",
    "cholesky": "cholesky", "expm": "expm", "eig": "eig", "eigh": "eigh",
    "svd": "svd", "qr": "qr", "where": "where", "_where": "where",
    "clip": "clamp", "take_along_axis": "gather", "take": "gather", "sigmoid": "sigmoid",
    "softplus": "softplus", "gelu": "gelu", "silu": "silu", "relu": "relu", "elu": "elu",
    "log_sigmoid": "log_sigmoid", "standardize": "layer_norm", "one_hot": "one_hot",
    "dot_product_attention": "attention", "multi_head_attention": "attention",
    "dot_product_attention_weights": "attention", "cosine_similarity": "cosine_similarity",
    "cosine_distance": "cosine_similarity", "softmax_cross_entropy": "cross_entropy",
    "softmax_cross_entropy_with_integer_labels": "cross_entropy",
    "safe_softmax_cross_entropy": "cross_entropy", "sigmoid_binary_cross_entropy": "binary_cross_entropy",
    "kl_divergence": "kl_div", "kl_divergence_with_log_targets": "kl_div",
    "sigmoid_focal_loss": "sigmoid_focal_loss", "global_norm": "norm", "tree_norm": "norm",
    "tree_l2_norm": "norm", "safe_norm": "norm", "normalize": "normalize",
    "cross_entropy": "cross_entropy", "rms_norm": "rms_norm", "layer_norm": "layer_norm",
    "LayerNorm.__call__": "layer_norm", "RMSNorm.__call__": "rms_norm",
    "BatchNorm.__call__": "batch_norm", "GroupNorm.__call__": "group_norm",
    "InstanceNorm.__call__": "instance_norm", "Embed.__call__": "embedding",
    "Embedding.__call__": "embedding", "Dropout.__call__": "dropout", "Softmax.__call__": "softmax",
}  # fmt: skip

_PRIMITIVES = {
    "select_n": "where", "reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min",
    "reduce_prod": "prod", "dot_general": "matmul", "integer_pow": "pow", "broadcast_in_dim": "broadcast",
    "convert_element_type": "cast", "conv_general_dilated": "conv", "dynamic_slice": "slice",
    "dynamic_update_slice": "index_put", "scatter": "index_put", "scatter-add": "index_put",
    "scatter_add": "index_put", "concatenate": "cat", "squeeze": "reshape", "expand_dims": "reshape",
    "rev": "index", "add_any": "add", "logistic": "sigmoid", "max": "maximum", "min": "minimum",
    "custom_lin": "custom_vjp", "cumlogsumexp": "logcumsumexp", "stop_gradient": "clone",
    "copy_p": "clone", "copy": "clone", "optimization_barrier": "clone", "iota": "constant",
    "atanh": "arctanh", "device_put": "clone", "sharding_constraint": "clone", "name": "clone",
    "pvary": "clone", "reduce_precision": "cast", "triangular_solve": "solve", "linear_solve": "solve",
    "custom_linear_solve": "solve", "split": "slice", "reduce_and": "all", "reduce_or": "any",
    "gather": "gather", "psum": "sum", "psum_invariant": "sum", "reduce_scatter": "sum", "pmax": "max",
    "pmin": "min", "all_gather": "cat", "all_gather_invariant": "cat", "all_to_all": "cat",
    "ppermute": "clone", "pbroadcast": "clone", "pure_callback": "callback", "io_callback": "callback",
    "ffi_call": "ffi_call", "pallas_call": "pallas_call", "square": "pow", "erf_inv": "erfinv",
    "cond": "branch", "unstack": "slice", "stack": "stack",
    "reduce_window_sum": "avg_pool", "reduce_window_max": "max_pool",
}  # fmt: skip

# Primitives that only move values; they are named by what they do, whatever function called them.
_CARRYING = frozenset({
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "dynamic_slice",
    "concatenate", "copy", "copy_p", "stop_gradient", "rev", "pad", "dynamic_update_slice",
    "split", "device_put", "sharding_constraint", "name", "optimization_barrier",
})  # fmt: skip


def function_name(functions: Iterable[str]) -> str:
    """Return the name of the outermost library function in the table; "" if there is none."""
    for function in functions:
        parts = function.split(".")
        name = _FUNCTIONS.get(".".join(parts[-2:])) or _FUNCTIONS.get(parts[-1])
        if name is None and parts[-1].startswith("_"):
            name = _FUNCTIONS.get(parts[-1].strip("_").removesuffix("_deprecated"))
        if name:
            return name
    return ""


def answering_name(functions: Iterable[str]) -> str:
    """Return the name of the outermost library function of a distribution; "" if there is none."""
    return next((n for f in functions if (n := f.rpartition(".")[2]) in OF_A_DISTRIBUTION), "")


def primitive_name(primitive: str, exponent: object = None) -> str:
    """Return the usual name of a primitive outside JAX."""
    if primitive == "integer_pow" and exponent == -1:
        return "reciprocal"
    return _PRIMITIVES.get(primitive, primitive)


def operation_name(functions: Iterable[str], primitive: str, exponent: object = None) -> str:
    """Return the function's name, or the primitive's if the equation only moves values."""
    if primitive in _CARRYING:
        return primitive_name(primitive)
    return function_name(functions) or primitive_name(primitive, exponent)
