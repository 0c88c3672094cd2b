"""An online softmax whose first block is fully masked: -inf - -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(scores, keep):
        best, total = torch.tensor(float("-inf")), torch.tensor(0.0)
        for block, kept in zip(scores, keep):
            block = block.masked_fill(~kept, float("-inf"))
            new = torch.maximum(best, block.max())
            total = total * torch.exp(best - new) + torch.exp(block - new).sum()  # BAD
            best = new
        return torch.log(total) + best

    keep = torch.tensor([[False, False], [True, True]])
    return program(loss, torch.tensor([[0.1, 0.2], [0.3, 0.4]], requires_grad=True), keep)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, keep):
        def block(carry, block):
            best, total = carry
            scores = jnp.where(block[1], block[0], -jnp.inf)
            new = jnp.maximum(best, scores.max())
            total = total * jnp.exp(best - new) + jnp.exp(scores - new).sum()  # BAD
            return (new, total), None

        (best, total), _ = jax.lax.scan(block, (-jnp.inf, 0.0), (scores, keep))
        return jnp.log(total) + best

    keep = jnp.array([[False, False], [True, True]])
    return program(loss, jnp.array([[0.1, 0.2], [0.3, 0.4]]), keep)


CASE = Case(cause="mask", operation="sub", where="iteration 0 of scan")
