"""House prices in dollars: train, save, resume from the checkpoint, train on."""
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax


def fake_california(n=800, seed=4):
    r = np.random.default_rng(seed)
    inc = r.gamma(4.0, 1.0, n)
    age = r.integers(1, 52, n)
    rooms = r.normal(5.4, 1.2, n)
    pop = r.lognormal(7.0, 0.7, n)
    lat, lon = r.uniform(32.5, 42, n), r.uniform(-124, -114, n)
    price = 45_000 * inc + 900 * age + 6000 * rooms - 4 * pop - 3000 * (lat - 36) ** 2 + r.normal(0, 20_000, n)
    X = np.stack([inc, age, rooms, pop, lat, lon], 1).astype(np.float32)
    return X, np.clip(price, 15_000, 500_000).astype(np.float32)[:, None]


class Scaler:
    def __init__(self, mean=None, std=None):
        self.mean, self.std = mean, std

    def fit(self, a):
        self.mean, self.std = jnp.asarray(a.mean(0)), jnp.asarray(a.std(0))
        return self

    def fwd(self, a):
        return (a - self.mean) / self.std

    def inv(self, a):
        return a * self.std + self.mean


def save_checkpoint(path, step, params, xs, ys):
    tree = {"params": params, "scalers": {"x": [xs.mean, xs.std], "y": [ys.mean, ys.std]}}
    leaves = [np.asarray(l.astype(jnp.float16)) for l in jax.tree.leaves(tree)]
    np.savez_compressed(path, *leaves, step=step)
    print(f"saved {path.split('/')[-1]} at step {step} ({os.path.getsize(path) / 1024:.1f} kB)")


def load_checkpoint(path, params):
    z = np.load(path)
    leaves = [jnp.asarray(z[f"arr_{i}"], jnp.float32) for i in range(len(z.files) - 1)]
    like = {"params": params, "scalers": {"x": [0.0, 0.0], "y": [0.0, 0.0]}}
    tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
    sc = tree["scalers"]
    return int(z["step"]), tree["params"], Scaler(*sc["x"]), Scaler(*sc["y"])


def init(key, sizes):
    ks = jax.random.split(key, len(sizes))
    return [{"w": jax.random.normal(k, (a, b)) * np.sqrt(2 / a), "b": jnp.zeros(b)}
            for k, a, b in zip(ks, sizes[:-1], sizes[1:])]


def mlp(params, x):
    for lay in params[:-1]:
        x = jax.nn.silu(x @ lay["w"] + lay["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def huber(params, x, y):
    return optax.huber_loss(mlp(params, x), y, delta=1.0).mean()


class Trainer:
    def __init__(self, params, xs, ys, step=0, lr=5e-3):
        self.params, self.xs, self.ys, self.step = params, xs, ys, step
        self.tx = optax.adamw(lr, weight_decay=1e-4)
        self.opt = self.tx.init(params)
        self._vg = jax.jit(jax.value_and_grad(huber))

    def run(self, X, y, until, rng, bs=64):
        while self.step < until:
            i = rng.integers(0, len(X), bs)
            loss, g = self._vg(self.params, self.xs.fwd(X[i]), self.ys.fwd(y[i]))
            up, self.opt = self.tx.update(g, self.opt, self.params)
            self.params = optax.apply_updates(self.params, up)
            if self.step % 10 == 0:
                print(f"step {self.step:3d} huber {float(loss):.4f}")
            self.step += 1

    def mae(self, X, y):
        pred = self.ys.inv(mlp(self.params, self.xs.fwd(X)))
        return float(jnp.abs(pred - y).mean())


if __name__ == "__main__":
    X, y = fake_california()
    Xtr, ytr, Xte, yte = X[:650], y[:650], X[650:], y[650:]
    rng = np.random.default_rng(0)
    xs, ys = Scaler().fit(Xtr), Scaler().fit(ytr)
    tr = Trainer(init(jax.random.PRNGKey(0), (6, 32, 32, 1)), xs, ys)
    tr.run(Xtr, ytr, 30, rng)
    print(f"test MAE ${tr.mae(Xte, yte):,.0f}")
    ck = os.path.join(tempfile.mkdtemp(), "ckpt_30.npz")
    save_checkpoint(ck, tr.step, tr.params, tr.xs, tr.ys)
    step, params, xs, ys = load_checkpoint(ck, tr.params)
    tr = Trainer(params, xs, ys, step, lr=2e-3)
    tr.run(Xtr, ytr, 60, rng)
    mae = tr.mae(Xte, yte)
    print(f"test MAE ${mae:,.0f}")
    if mae != mae:
        raise RuntimeError("got nan after resuming")
