"""One name for an operation that users, autograd, ATen and JAX call by different names."""

from __future__ import annotations

import re

__all__ = ["plain_name"]

# name -> other names of the same operation.
_SAME = {
    "abs": "absolute",
    "acos": "arccos",
    "acosh": "arccosh",
    "arctanh": "atanh",
    "asin": "arcsin",
    "atan2": "arctan2",
    "batch_norm": "native_batch_norm cudnn_batch_norm",
    "cast": "to_copy to convert convert_element_type astype",
    "clamp": "clip clamp_min clamp_max",
    "cross_entropy": "nll_loss nll_loss_forward nll_loss2d_forward",
    "div": "divide true_divide truediv addcdiv",
    "erfinv": "erf_inv",
    "full": "full_like",
    "gather": "index_select take take_along_axis",
    "group_norm": "native_group_norm",
    "index_put": "scatter_update dynamic_update_slice",
    "layer_norm": "native_layer_norm",
    "lgamma": "gammaln",
    "logcumsumexp": "cumlogsumexp",
    "matmul": "mm bmm addmm baddbmm dot mv linear einsum dot_general",
    "max": "amax maximum reduce_max",
    "min": "amin minimum reduce_min",
    "mul": "multiply addcmul",
    "norm": "vector_norm",
    "pow": "power integer_pow square",
    "prod": "reduce_prod",
    "scatter": "scatter_add",
    "sigmoid": "logistic",
    "std": "std_mean",
    "sub": "rsub subtract",
    "sum": "reduce_sum",
    "var": "var_mean",
    "weight_norm": "weight_norm_interface",
    "where": "select_n",
}
_PLAIN = {other: name for name, others in _SAME.items() for other in others.split()}


def plain_name(operation: str) -> str:
    """The name under which two names of an operation are compared.

    Example:
        >>> plain_name("SqrtBackward0"), plain_name("aten._to_copy.default"), plain_name("integer_pow")
        ('sqrt', 'cast', 'pow')
    """
    name = re.sub(r"Backward\d*$", "", operation)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    parts = name.split(".")
    name = parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]
    name = name.strip("_").removeprefix("linalg_").removeprefix("special_")
    return _PLAIN.get(name, name)
