"""Losses with the right value and the right gradient at every edge, as functions and as modules.

Losses of inputs narrower than float32 are computed in float32. The result has the input's format; under
autocast it is float32, as with torch's own losses; ``dtype`` overrides both. A batch with no valid items
gives a loss of 0 and a gradient of 0. All losses work under ``torch.compile(fullgraph=True)`` and
``torch.func``, and are twice differentiable.
"""

from stablenum._support.public_names import present
from stablenum_torch.losses.functions import (
    binary_cross_entropy,
    binary_focal,
    cosine_embedding,
    cosine_similarity,
    cross_entropy,
    focal,
    gaussian_nll,
    hinge,
    huber,
    info_nce,
    js_divergence,
    kl_divergence,
    log_cosh,
    negative_binomial_nll,
    poisson_nll,
)
from stablenum_torch.losses.modules import (
    BCEWithLogitsLoss,
    BinaryFocalLoss,
    CosineEmbeddingLoss,
    CrossEntropyLoss,
    FocalLoss,
    GaussianNLLLoss,
    HingeLoss,
    HuberLoss,
    InfoNCELoss,
    JSDivLoss,
    KLDivLoss,
    LogCoshLoss,
    NegativeBinomialNLLLoss,
    PoissonNLLLoss,
)

__all__ = [
    "BCEWithLogitsLoss",
    "BinaryFocalLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "FocalLoss",
    "GaussianNLLLoss",
    "HingeLoss",
    "HuberLoss",
    "InfoNCELoss",
    "JSDivLoss",
    "KLDivLoss",
    "LogCoshLoss",
    "NegativeBinomialNLLLoss",
    "PoissonNLLLoss",
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
