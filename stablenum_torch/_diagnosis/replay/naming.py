"""Map the names of aten operations and public functions to the names that a diagnosis uses."""

from __future__ import annotations

from collections.abc import Mapping

from stablenum.diagnosis.replay.operations import MOVING

__all__ = ["PUBLIC", "operation_name"]


def _table(**groups: str) -> Mapping[str, str]:
    return {name: operation.rstrip("_") for operation, names in groups.items() for name in names.split()}


# operation -> aten's names for it, without leading and trailing underscores. Others keep aten's names.
_ATEN: Mapping[str, str] = _table(
    add="add_relu foreach_add_scalar_list",
    arctanh="atanh",
    avg_pool="adaptive_avg_pool2d avg_pool2d",
    attention=(
        "scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu "
        "scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention "
        "scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention_math "
        "native_multi_head_attention"
    ),
    batch_norm=(
        "native_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training "
        "native_batch_norm_legit_functional batch_norm_with_update batch_norm_no_update cudnn_batch_norm "
        "miopen_batch_norm batch_norm_elemt"
    ),
    binary_cross_entropy="binary_cross_entropy_with_logits",
    broadcast="expand expand_copy expand_as",
    cast="to_copy",
    clamp="clamp_min clamp_max hardtanh threshold relu6 clip",
    clone="contiguous",
    conv=(
        "convolution convolution_overrideable mkldnn_convolution cudnn_convolution thnn_conv2d "
        "slow_conv2d_forward slow_conv3d_forward conv_depthwise2d"
    ),
    copy="copy copy_from",
    cross_entropy="nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d",
    ctc_loss="cudnn_ctc_loss",
    div="true_divide divide addcdiv",
    dropout="native_dropout fused_dropout bernoulli",
    embedding="embedding_bag embedding_bag_forward_only",
    full=(
        "full_like new_full scalar_tensor ones zeros ones_like zeros_like new_ones new_zeros arange eye "
        "linspace fill zero efficientzerotensor"
    ),
    gather="index_select take take_along_dim",
    group_norm="native_group_norm",
    index_put="unsafe_index_put index_put_impl index_fill index_copy",
    kl_div="kl_div",
    layer_norm="native_layer_norm",
    log_softmax="log_softmax",
    masked_fill="masked_scatter",
    matmul="mm bmm addmm baddbmm addbmm dot vdot mv addmv ger addr addmm_activation linear",
    maximum="fmax",
    median="nanmedian",
    max_pool="max_pool2d_with_indices adaptive_max_pool2d",
    mean="nanmean",
    minimum="fmin",
    mul="multiply addcmul",
    norm=(
        "linalg_vector_norm norm_except_dim linalg_matrix_norm cdist_forward "
        "euclidean_dist pdist_forward"
    ),
    pad="constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d",
    reshape=(
        "view unsafe_view reshape reshape_alias unsqueeze squeeze flatten as_strided alias detach "
        "detach_copy lift_fresh lift lift_fresh_copy view_as_real view_as_complex values sparse_mask"
    ),
    rms_norm="fused_rms_norm",
    scatter="scatter_src scatter_value select_scatter slice_scatter diagonal_scatter as_strided_scatter",
    scatter_add="index_add scatter_add scatter_reduce index_reduce embedding_dense_backward",
    slice="select narrow split split_with_sizes unbind diagonal unfold chunk",
    softmax="safe_softmax sparse_softmax masked_softmax",
    solve_triangular="triangular_solve",
    std="std_mean",
    sub="rsub subtract",
    transpose="t permute transpose_copy movedim flip roll",
    var="var_mean",
    weight_norm="weight_norm_interface",
    where="masked_select",
    xlogy="special_xlogy",
)  # fmt: skip

# Public functions that consist of several aten operations. A failure inside is reported under their names.
PUBLIC: Mapping[str, str] = _table(
    attention="scaled_dot_product_attention",
    batch_norm="batch_norm instance_norm",
    binary_cross_entropy="binary_cross_entropy binary_cross_entropy_with_logits",
    cosine_similarity="cosine_similarity cosine_embedding_loss",
    cross_entropy="cross_entropy nll_loss",
    ctc_loss="ctc_loss",
    embedding="embedding embedding_bag",
    gaussian_nll="gaussian_nll_loss",
    group_norm="group_norm",
    kl_div="kl_div",
    layer_norm="layer_norm",
    log_softmax="log_softmax",
    logsumexp="logsumexp",
    norm="norm vector_norm linalg_norm linalg_vector_norm matrix_norm pairwise_distance cdist",
    normalize="normalize",
    mean="nanmean",
    one_hot="one_hot",
    poisson_nll="poisson_nll_loss",
    rms_norm="rms_norm",
    softmax="softmax softmin",
    std="std std_mean",
    var="var var_mean",
)


def operation_name(aten: str, public: str = "") -> str:
    """Return the name by which a user knows this operation.

    Operations that only move or select values keep their own name inside public functions, so that a mask in
    an attention is reported as a mask.

    Args:
        aten: the name without namespace and overload: ``_softmax``, ``add_``.
        public: the public function that called it, "" if none is known.

    Example:
        >>> operation_name("_softmax"), operation_name("div", "cosine_similarity"), operation_name("sub_")
        ('softmax', 'cosine_similarity', 'sub')
        >>> operation_name("masked_fill", "scaled_dot_product_attention")
        'masked_fill'
    """
    plain = aten.strip("_").removeprefix("foreach_")
    if plain not in _ATEN:
        plain = plain.removeprefix("linalg_").removeprefix("special_").removesuffix("_ex")
    own = _ATEN.get(plain, plain)
    return own if own in MOVING or own == "cast" else PUBLIC.get(public, own)
