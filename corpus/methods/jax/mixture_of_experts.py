"""A sparse mixture of experts with top-2 routing and a balance loss."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class MoE(nn.Module):
    dim: int = 32
    hidden: int = 64
    experts: int = 6
    top: int = 2

    @nn.compact
    def __call__(self, x):
        p = jax.nn.softmax(nn.Dense(self.experts, use_bias=False)(x))
        weight, index = jax.lax.top_k(p, self.top)
        weight = weight / weight.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(index, self.experts)
        gate = (chosen * weight[..., None]).sum(1)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        up = self.param("up", init, (self.experts, self.dim, self.hidden))
        down = self.param("down", init, (self.experts, self.hidden, self.dim))
        h = nn.gelu(jnp.einsum("nd,edh->neh", x, up))
        out = jnp.einsum("neh,ehd,ne->nd", h, down, gate)
        share = chosen.sum(1).mean(0) / self.top
        return out, self.experts * (share * p.mean(0)).sum(), share


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(32)(x)
        out, balance, share = MoE()(nn.LayerNorm()(h))
        return nn.Dense(1)(h + out)[:, 0], balance, share


def data(key, n, centres, maps):
    """Each cluster has a map of its own."""
    a, b = jax.random.split(key)
    kind = jax.random.randint(a, (n,), 0, len(centres))
    x = centres[kind] + 0.5 * jax.random.normal(b, (n, centres.shape[1]))
    return x, jnp.sin((x * maps[kind]).sum(1))


def main(steps=800):
    a, b, key = jax.random.split(jax.random.key(0), 3)
    centres, maps = 1.5 * jax.random.normal(a, (6, 10)), jax.random.normal(b, (6, 10)) / 3
    net = Net()
    params = net.init(key, jnp.zeros((1, 10)))
    tx = optax.adamw(3e-3, weight_decay=0.01)
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
        x, y = data(key, 256, centres, maps)

        def loss_fn(params):
            out, balance, share = net.apply(params, x)
            return jnp.mean((out - y) ** 2) + 0.01 * balance, (balance, share)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, *aux

    for i in range(steps):
        key, sub = jax.random.split(key)
        params, state, loss, balance, share = step(params, state, sub)
        if i % 100 == 0:
            print(f"{i:4d} loss {float(loss):.4f} balance {float(balance):.3f} least used {float(share.min()):.3f}")
    x, y = data(key, 2000, centres, maps)
    out, _, share = net.apply(params, x)
    print(f"r2 {float(1 - jnp.mean((out - y) ** 2) / y.var()):.3f} shares {[round(float(s), 2) for s in share]}")


if __name__ == "__main__":
    main()
