"""A gated recurrence whose normaliser is a running sum that starts at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(keys, values):
        numerator, total, out = torch.zeros(2), torch.zeros(()), []
        for k, v in zip(keys, values):
            weight = torch.relu(k)
            numerator, total = numerator + weight * v, total + weight
            out.append(numerator / total)  # BAD
        return torch.stack(out).sum()

    return program(loss, torch.tensor([-1.0, 1.0, 2.0], requires_grad=True), torch.ones(3, 2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(keys, values):
        def cell(carry, kv):
            weight = jax.nn.relu(kv[0])
            numerator, total = carry[0] + weight * kv[1], carry[1] + weight
            out = numerator / total  # BAD
            return (numerator, total), out

        return jax.lax.scan(cell, (jnp.zeros(2), 0.0), (keys, values))[1].sum()

    return program(loss, jnp.array([-1.0, 1.0, 2.0]), jnp.ones((3, 2)))


CASE = Case(cause="domain", operation="div", where="iteration 0 of scan")
