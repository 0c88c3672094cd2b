import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class InvLinear(eqx.Module):
    """Invertible linear mixing, as the 1x1 convolution of Glow."""
    W: jax.Array

    def __init__(self, dim, *, key):
        q, _ = jnp.linalg.qr(jr.normal(key, (dim, dim)))
        self.W = q

    def __call__(self, x):
        return self.W @ x, jnp.log(jnp.linalg.det(self.W))


class Coupling(eqx.Module):
    net: eqx.nn.MLP
    half: int = eqx.field(static=True)

    def __init__(self, dim, *, key):
        self.half = dim // 2
        self.net = eqx.nn.MLP(self.half, 2 * (dim - self.half), 24, 1, key=key)

    def __call__(self, x):
        a, b = x[: self.half], x[self.half:]
        s, t = jnp.split(self.net(a), 2)
        s = jnp.tanh(s)
        return jnp.concatenate([a, b * jnp.exp(s) + t]), s.sum()


class Flow(eqx.Module):
    layers: list

    def __init__(self, dim, depth, *, key):
        self.layers = []
        for k in jr.split(key, depth):
            k1, k2 = jr.split(k)
            self.layers += [InvLinear(dim, key=k1), Coupling(dim, key=k2)]

    def log_prob(self, x):
        total = 0.0
        for layer in self.layers:
            x, ld = layer(x)
            total = total + ld
        return total - 0.5 * jnp.sum(x**2) - 0.5 * x.size * jnp.log(2 * jnp.pi)


def sample_data(key, n):
    k1, k2 = jr.split(key)
    u = jr.normal(k1, (n, 4))
    return u.at[:, 2:].add(jnp.sin(2 * u[:, :2])) + 0.05 * jr.normal(k2, (n, 4))


def main(seed=2):
    key = jr.PRNGKey(seed)
    key, mk = jr.split(key)
    flow = Flow(4, 3, key=mk)
    opt = optax.adam(1e-3)
    st = opt.init(eqx.filter(flow, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(flow, st, x):
        loss, g = eqx.filter_value_and_grad(lambda f: -jnp.mean(jax.vmap(f.log_prob)(x)))(flow)
        up, st = opt.update(g, st)
        return eqx.apply_updates(flow, up), st, loss

    for i in range(100):
        key, sub = jr.split(key)
        flow, st, loss = step(flow, st, sample_data(sub, 128))
        if i % 10 == 0:
            print("step", i, "nll", loss)
        if i == 20 and not jnp.isfinite(loss):
            raise RuntimeError(f"training diverged, loss = {loss}")


main()
