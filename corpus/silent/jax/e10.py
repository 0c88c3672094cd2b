import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax


def dense(key, n_in, n_out):
    w = jax.random.normal(key, (n_in, n_out)) * jnp.sqrt(2.0 / n_in)
    return {"w": w, "b": jnp.zeros(n_out)}


def expert_params(key, d, hidden, d_out):
    k1, k2 = jax.random.split(key)
    return {"up": dense(k1, d, hidden), "down": dense(k2, hidden, d_out)}


def moe_params(key, n_experts, d, hidden, d_out):
    template = expert_params(key, d, hidden, d_out)
    experts = jax.tree.map(lambda p: jnp.repeat(p[None], n_experts, axis=0), template)
    return {"experts": experts, "router": {"w": jnp.zeros((d, n_experts)), "b": jnp.zeros(n_experts)}}


def expert_apply(p, x):
    h = jax.nn.relu(x @ p["up"]["w"] + p["up"]["b"])
    return h @ p["down"]["w"] + p["down"]["b"]


def forward(params, x):
    gates = jax.nn.softmax(x @ params["router"]["w"] + params["router"]["b"], axis=-1)
    outs = jax.vmap(expert_apply, in_axes=(0, None))(params["experts"], x)
    return jnp.einsum("be,ebo->bo", gates, outs), gates


def loss_fn(params, x, y):
    out, gates = forward(params, x)
    mse = jnp.mean((out - y) ** 2)
    load = gates.mean(axis=0)
    balance = gates.shape[-1] * jnp.sum(load ** 2) - 1.0
    return mse + 1e-2 * balance, (mse, load)


def piecewise_task(n, d, d_out, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)).astype(np.float32)
    region = (x[:, 0] > 0).astype(int) * 2 + (x[:, 1] > 0)
    maps = rng.standard_normal((4, d, d_out)) / np.sqrt(d)
    y = np.einsum("nd,ndo->no", x, maps[region])
    return x, y.astype(np.float32)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--experts", type=int, default=8)
    ap.add_argument("--hidden", type=int, default=6)
    ap.add_argument("--steps", type=int, default=400)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()

    x, y = piecewise_task(4096, 8, 3, seed=0)
    params = moe_params(jax.random.PRNGKey(1), args.experts, 8, args.hidden, 3)
    tx = optax.adam(args.lr)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, xb, yb):
        (_, aux), g = jax.value_and_grad(loss_fn, has_aux=True)(params, xb, yb)
        u, opt_state = tx.update(g, opt_state)
        return optax.apply_updates(params, u), opt_state, aux

    rng = np.random.default_rng(4)
    for i in range(args.steps):
        sel = rng.integers(0, len(x), 256)
        params, opt_state, (mse, load) = step(params, opt_state, x[sel], y[sel])
        if i % 50 == 0 or i == args.steps - 1:
            print(f"step {i:3d} mse {float(mse):.4f} load {np.round(np.asarray(load), 2)}")


if __name__ == "__main__":
    main()
