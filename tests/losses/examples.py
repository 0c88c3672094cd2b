"""One ordinary call of every loss: arrays, options, and the arrays to differentiate."""

from __future__ import annotations

from typing import Any

import numpy as np

_R = np.random.default_rng(7)
N, C = 6, 5
Z = _R.normal(size=N) * 3
LOGITS = _R.normal(size=(N, C)) * 3
OTHER = _R.normal(size=(N, C))
SOFT = np.exp(OTHER) / np.exp(OTHER).sum(1, keepdims=True)
INDEX = _R.integers(0, C, N)
LABELS = np.asarray([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
COUNTS = np.asarray([0.0, 1.0, 4.0, 2.0, 0.0, 9.0])
POSITIVE = np.exp(_R.normal(size=N))

Call = tuple[list[np.ndarray], dict[str, Any], tuple[int, ...]]
EXAMPLES: dict[str, Call] = {
    "binary_cross_entropy": ([Z, LABELS], {}, (0, 1)),
    "binary_focal": ([Z, LABELS], {"gamma": 0.5, "alpha": 0.25}, (0,)),
    "cross_entropy": ([LOGITS, INDEX], {"label_smoothing": 0.1, "z_loss": 1e-2}, (0,)),
    "cross_entropy soft": ([LOGITS, SOFT], {"label_smoothing": 0.1, "axis": 1}, (0, 1)),
    "focal": ([LOGITS, INDEX], {"gamma": 0.5}, (0,)),
    "kl_divergence": ([LOGITS, SOFT], {}, (0, 1)),
    "js_divergence": ([LOGITS, OTHER], {}, (0, 1)),
    "gaussian_nll": ([Z, LABELS, POSITIVE], {"full": True}, (0, 1, 2)),
    "poisson_nll": ([Z, COUNTS], {"full": True}, (0,)),
    "negative_binomial_nll": ([Z, COUNTS, POSITIVE], {"full": True}, (0, 2)),
    "huber": ([Z, LABELS], {"delta": 0.5}, (0, 1)),
    "log_cosh": ([Z, LABELS], {}, (0, 1)),
    "hinge": ([Z, 2 * LABELS - 1], {"squared": True}, (0,)),
    "cosine_embedding": ([LOGITS, OTHER, LABELS], {"margin": -0.5}, (0, 1)),
    "info_nce": ([LOGITS, OTHER], {"symmetric": True}, (0, 1)),
}
MASK = np.asarray([True, False, True, True, False, True])
MASKABLE = [name for name in EXAMPLES if name != "info_nce"]
