"""DeepAR-like forecaster for spare part demand, flax linen."""
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass
class Config:
    n_series: int = 40
    length: int = 200
    context: int = 14
    horizon: int = 7
    hidden: int = 20
    batch: int = 16
    steps: int = 60
    lr: float = 5e-3


def make_demand(cfg, seed=0):
    rng = np.random.RandomState(seed)
    rate = rng.uniform(0.25, 0.9, cfg.n_series)[:, None]
    level = rng.gamma(2.0, 4.0, cfg.n_series)[:, None]
    week = 1.0 + 0.4 * np.sin(2 * np.pi * np.arange(cfg.length) / 7)[None]
    hit = rng.rand(cfg.n_series, cfg.length) < rate
    return (hit * rng.poisson(1 + level * week)).astype(np.float32)


class WindowSampler:
    def __init__(self, series, cfg, seed=1):
        self.s, self.cfg, self.rng = series, cfg, np.random.RandomState(seed)

    def __call__(self):
        c = self.cfg
        w = c.context + c.horizon
        rows = self.rng.randint(0, len(self.s), c.batch)
        starts = self.rng.randint(0, self.s.shape[1] - w, c.batch)
        win = np.stack([self.s[r, a:a + w] for r, a in zip(rows, starts)])
        dow = (starts[:, None] + np.arange(w)) % 7
        return win, dow.astype(np.float32) / 6.0 - 0.5


class DeepAR(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, win, dow):
        ctx = win[:, : self.cfg.context]
        scale = jnp.mean(jnp.abs(ctx), axis=1, keepdims=True)
        z = win / scale
        inp = jnp.stack([z[:, :-1], dow[:, 1:], jnp.broadcast_to(jnp.log1p(scale), z[:, 1:].shape)], -1)
        h = nn.RNN(nn.GRUCell(self.cfg.hidden))(inp)
        out = nn.Dense(2)(h)
        mu = out[..., 0]
        sigma = nn.softplus(out[..., 1]) + 1e-2
        return mu * scale, sigma * scale


def student_nll(y, mu, sigma, nu=4.0):
    t = (y - mu) / sigma
    return jnp.log(sigma) + 0.5 * (nu + 1.0) * jnp.log1p(t * t / nu)


def main():
    cfg = Config()
    demand = make_demand(cfg)
    print("zero share: %.2f" % (demand == 0).mean())
    train, holdout = demand[:, :160], demand[:, 160:]
    sampler, val_sampler = WindowSampler(train, cfg), WindowSampler(holdout, cfg, 9)
    model = DeepAR(cfg)
    params = model.init(jax.random.PRNGKey(0), *sampler())["params"]
    tx = optax.chain(optax.clip(1.0), optax.adam(cfg.lr))
    opt = tx.init(params)

    def loss_fn(p, win, dow):
        mu, sigma = model.apply({"params": p}, win, dow)
        return student_nll(win[:, 1:], mu, sigma).mean()

    @jax.jit
    def step(p, o, win, dow):
        loss, g = jax.value_and_grad(loss_fn)(p, win, dow)
        u, o = tx.update(g, o, p)
        return optax.apply_updates(p, u), o, loss

    running = None
    for i in range(cfg.steps):
        params, opt, loss = step(params, opt, *sampler())
        running = loss if running is None else 0.9 * running + 0.1 * loss
        if i % 10 == 0:
            print(f"step {i:3d} running {float(running):.4f} val {float(loss_fn(params, *val_sampler())):.4f}")
    if not np.isfinite(float(running)):
        raise SystemExit("running loss is nan")


if __name__ == "__main__":
    main()
