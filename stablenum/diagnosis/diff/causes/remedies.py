"""The vocabulary of causes, and how to mend each."""

from __future__ import annotations

__all__ = ["EPSILON_OF_BATCH_NORM", "REMEDIES", "REMEDIES_OF_UPDATES"]

EPSILON_OF_BATCH_NORM = "Give both batch norms the same epsilon; the default is 1e-5 in torch and flax."

REMEDIES = {
    "epsilon_value": "Give both the same epsilon; the defaults are 1e-5 in torch and 1e-6 in flax.",
    "epsilon_placement": "Put the epsilon in the same place: inside the root, or added to it.",
    "gelu_variant": "Choose one: F.gelu(x, approximate='tanh') or jax.nn.gelu(x, approximate=False).",
    "silu_variant": "Use the same function: silu(x) = x sigmoid(x), not its piecewise linear form.",
    "variance_correction": "Divide by the same count: torch.var has correction=1, jnp.var has ddof=0.",
    "norm_axis": "Normalise over the same axes.",
    "running_statistics": "Normalise by the batch on both sides in training (use_running_average=False).",
    "flipped_kernel": "Flip the kernel: linen.ConvTranspose(transpose_kernel=True) is like torch's layer.",
    "transposed_weight": "Transpose the weight on one side.",
    "head_split_order": "Reshape to (heads, width) in the same order, and swap the axes back before merging.",
    "entry_order": "Put the entries in the same order: look for a flatten in another layout (NCHW, NHWC), "
    "a roll, a flip, or exchanged operands.",
    "other_input": "Give the operation the same value on both sides.",
    "rotary_layout": "Rotate the same pairs: neighbours (interleaved) or halves.",
    "scale": "Apply the same factor on both sides.",
    "mask_missing": "Mask the same positions on both sides.",
    "mask_shifted": "Shift the mask by one.",
    "mask_added": "Fill the masked scores with -inf, or add the same bias.",
    "padding": "Give the padding explicitly: with strides, 'SAME' pads more at the end than at the start.",
    "pooling_count": "Count the padding in both or in neither: count_include_pad is True in both by default.",
    "resize_mode": "Use the same method; jax.image.resize has antialias=True and half-pixel centres.",
    "softmax_axis": "Take the softmax over the same axis.",
    "reduction": "Reduce in the same way: mean or sum, over the same entries.",
    "label_shift": "Predict the next token: compare logits[:-1] with labels[1:].",
    "label_smoothing": "Give both losses the same label smoothing.",
    "ignored_labels": "Leave out the same labels; divide by how many remain, or by the sum of their weights.",
    "dropout": "Turn dropout off on both sides, or give both the same mask.",
    "stopped_gradient": "Look for detach, no_grad or stop_gradient on one side only.",
    "straight_through_missing": "Write x + stop_gradient(q(x) - x), so that the gradient passes.",
    "accumulation": "Add up all parts, and divide by the same number: of micro-batches, or of all tokens.",
    "adam_epsilon_placement": "optax's eps is outside the root as in torch, eps_root inside.",
    "bias_correction": "Correct both moments for their start at zero.",
    "decay_coupling": "Use the same kind and amount of decay; the default is 1e-2 in torch, 1e-4 in optax.",
    "decay_excluded": "Exclude the same parameters from decay (mask= in optax, param_groups in torch).",
    "betas": "Give both the same betas (b1 and b2 in optax); the defaults are 0.9 and 0.999 in both.",
    "momentum": "Give both the same momentum.",
    "momentum_dampening": "torch's SGD has dampening; optax.trace has none.",
    "nesterov": "Set nesterov the same way on both sides.",
    "schedule_offset": "Start both schedules at the same count: optax counts from 0.",
    "clip_missing": "Clip on both sides, before the optimizer.",
    "clip_per_tensor": "Clip by the global norm on both sides, or per tensor on both.",
    "clip_epsilon": "torch divides by norm + 1e-6, optax by the norm.",
    "loss_scale_left_in": "Divide the gradients by the loss scale before they are clipped and used.",
    "compute_format": "Compute in the same format.",
    "accumulation_format": "Accumulate in the same format.",
    "rounding_order": "Nothing needs mending: the sums are rounded in another order.",
    "other_function": "Use the same function on both sides.",
    "missing_operation": "Add the operation.",
    "extra_operation": "Remove the operation.",
}  # fmt: skip
# Those that read otherwise where updates differ.
REMEDIES_OF_UPDATES = REMEDIES | {
    "epsilon_value": "Give both optimizers the same epsilon; the default of Adam is 1e-8 in torch and optax.",
}
