"""Masks of -inf and a bound of inf pass through jitted functions: nothing is wrong."""

import functools

import jax
import jax.numpy as jnp

mask = jax.jit(lambda n: jnp.where(jnp.arange(4) < n, 0.0, -jnp.inf))


@jax.jit
def step(w, best, n):
    loss, grad = jax.value_and_grad(lambda w: (jax.nn.softmax(w + mask(n)) ** 2).sum())(w)
    return w - 0.1 * grad, jnp.minimum(best, loss), jax.nn.log_softmax(w + mask(n))


class Counter:
    by = 1

    @functools.partial(jax.jit, static_argnums=0)
    def plus(self, x):
        return x + self.by


w, best = jnp.zeros(4), jnp.inf
for _ in range(3):
    mask(2)
    w, _, log_p = step(w, best, 2)
assert Counter().plus(1) == 2
assert step.lower(w, best, 2).compile() is not None
assert step.__name__ == "step"
