"""Cross-entropy of a batch in which every label is padding: the mean over nothing."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    linear = torch.nn.Linear(2, 3)

    def loss(x, y):
        return functional.cross_entropy(linear(x), y, ignore_index=-100)  # BAD

    return program(loss, torch.ones(2, 2), torch.tensor([-100, -100]), model=linear)


def in_jax():
    import jax.numpy as jnp
    import optax

    def loss(w, x, y):
        valid = y >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.where(valid, y, 0))
        return (losses * valid).sum() / valid.sum()  # BAD

    return program(loss, jnp.ones((2, 3)), jnp.ones((2, 2)), jnp.array([-100, -100]))


CASE = Case(
    cause={"torch": "labels", "jax": ("labels", "domain")}, operation={"torch": "cross_entropy", "jax": "div"}
)
