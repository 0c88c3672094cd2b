"""Cross-entropy with probabilities as targets, of logits that are masked with -inf."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    def loss(logits, target):
        logits = logits.masked_fill(torch.tensor([False, False, True]), float("-inf"))
        return functional.cross_entropy(logits, target)  # BAD

    return program(loss, torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([0.0, 1.0, 0.0]))


def in_jax():
    import jax.numpy as jnp
    import optax

    def loss(logits, target):
        logits = jnp.where(jnp.array([False, False, True]), -jnp.inf, logits)
        return optax.softmax_cross_entropy(logits, target)  # BAD

    return program(loss, jnp.array([0.1, 0.2, 0.3]), jnp.array([0.0, 1.0, 0.0]))


CASE = Case(
    cause="mask",
    operation={"torch": "cross_entropy", "jax": ("cross_entropy", "mul")},
    primitive={"torch": "mul"},
)
