"""MLP on digits with a home-made Shampoo (Gupta et al. 2018)."""
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

PRECOND_EVERY = 10
LR = 0.05


def mat_power(mat, p):
    w, v = jnp.linalg.eigh(mat)
    return (v * w ** p) @ v.T


class Shampoo:
    def __init__(self, params, lr, momentum=0.9):
        self.lr, self.mu = lr, momentum
        self.t = 0
        self.state = {}
        for k, p in params.items():
            st = {"mom": jnp.zeros_like(p)}
            if p.ndim == 2:
                n, m = p.shape
                st["L"], st["R"] = jnp.zeros((n, n)), jnp.zeros((m, m))
                st["PL"], st["PR"] = jnp.eye(n), jnp.eye(m)
            self.state[k] = st

    def step(self, params, grads):
        self.t += 1
        new = {}
        for k, g in grads.items():
            st = self.state[k]
            if g.ndim == 2:
                st["L"] = st["L"] + g @ g.T
                st["R"] = st["R"] + g.T @ g
                if self.t % PRECOND_EVERY == 0:
                    st["PL"] = mat_power(st["L"], -0.25)
                    st["PR"] = mat_power(st["R"], -0.25)
                d = st["PL"] @ g @ st["PR"]
                d = d * (jnp.linalg.norm(g) / (jnp.linalg.norm(d) + 1e-12))
            else:
                d = g
            st["mom"] = self.mu * st["mom"] + d
            new[k] = params[k] - self.lr * st["mom"]
        return new


def init(key, sizes=(64, 48, 10)):
    params = {}
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        key, sub = jax.random.split(key)
        params[f"w{i}"] = jax.random.normal(sub, (a, b)) * jnp.sqrt(2.0 / a)
        params[f"b{i}"] = jnp.zeros(b)
    return params


def net(params, x):
    h = jax.nn.relu(x @ params["w0"] + params["b0"])
    return h @ params["w1"] + params["b1"]


def loss_fn(params, x, y):
    logp = jax.nn.log_softmax(net(params, x))
    return -jnp.take_along_axis(logp, y[:, None], 1).mean()


def main():
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).astype(np.float32)
    rng = np.random.RandomState(3)
    perm = rng.permutation(len(X))
    tr, te = perm[:1400], perm[1400:]
    params = init(jax.random.PRNGKey(0))
    opt = Shampoo(params, LR)
    vg = jax.jit(jax.value_and_grad(loss_fn))
    for it in range(40):
        idx = rng.choice(tr, 32, replace=False)
        loss, grads = vg(params, X[idx], y[idx])
        params = opt.step(params, grads)
        if it % 4 == 0 or not np.isfinite(loss):
            acc = (net(params, X[te]).argmax(-1) == y[te]).mean()
            print(f"it {it:3d}  loss {float(loss):.4f}  test acc {float(acc):.3f}")
        if not np.isfinite(loss):
            raise SystemExit("loss is not finite, giving up")


if __name__ == "__main__":
    main()
