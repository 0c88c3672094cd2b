"""Losses with the correct value and gradient at every edge case, in every float format.

The losses are written once over the array namespace ``xp`` and differentiated by the framework. Use them
through ``stablenum_torch.losses`` and ``stablenum_jax.losses``, which fill in ``xp``.

These rules hold for all losses:

- For inputs in formats narrower than float32, items are computed and summed in float32 and the result is
  rounded once. It has the format of the first argument, as in torch and optax, unless ``dtype`` is given.
- "mean" divides by the number of valid items; a batch with no valid items gives a loss of 0 and a gradient of
  0, not NaN.
- Masked items have no effect, whatever their values: masking an item is the same as removing it. NaN in a
  valid item gives NaN. No finite input gives NaN in the value or in the gradient.
- Targets are never broadcast silently: if they do not have the documented shape, a ValueError is raised.
"""

from stablenum._support.public_names import present
from stablenum.losses.binary import binary_cross_entropy, binary_focal
from stablenum.losses.classes import cross_entropy, focal
from stablenum.losses.divergence import js_divergence, kl_divergence
from stablenum.losses.likelihoods import gaussian_nll, negative_binomial_nll, poisson_nll
from stablenum.losses.regression import hinge, huber, log_cosh
from stablenum.losses.similarity import cosine_embedding, cosine_similarity, info_nce

__all__ = [
    "binary_cross_entropy",
    "binary_focal",
    "cosine_embedding",
    "cosine_similarity",
    "cross_entropy",
    "focal",
    "gaussian_nll",
    "hinge",
    "huber",
    "info_nce",
    "js_divergence",
    "kl_divergence",
    "log_cosh",
    "negative_binomial_nll",
    "poisson_nll",
]


__dir__ = present(globals())
