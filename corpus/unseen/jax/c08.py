# GARCH(1,1) by maximum likelihood with jax.lax.scan + optax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.stats import norm


def simulate(n, omega=2e-6, alpha=0.08, beta=0.9, seed=1):
    rng = np.random.RandomState(seed)
    r = np.zeros(n)
    s2 = omega / (1 - alpha - beta)
    for t in range(n):
        r[t] = np.sqrt(s2) * rng.standard_normal()
        s2 = omega + alpha * r[t] ** 2 + beta * s2
    return r.astype(np.float32)


class Garch:
    def __init__(self, returns, train_frac=0.8):
        self.r = jnp.asarray(returns - returns.mean())
        self.n_train = int(len(returns) * train_frac)
        self.params = {
            "omega": jnp.float32(self.r[: self.n_train].var()),
            "alpha": jnp.float32(0.1),
            "beta": jnp.float32(0.8),
        }

    def filter(self, params, r):
        def step(s2, r_t):
            nxt = params["omega"] + params["alpha"] * r_t ** 2 + params["beta"] * s2
            return nxt, s2

        _, sig2 = jax.lax.scan(step, jnp.var(r), r)
        return sig2

    def nll(self, params, r):
        sig2 = self.filter(params, r)
        vol = jnp.sqrt(sig2)
        return -norm.logpdf(r, loc=0.0, scale=vol).mean()

    def fit(self, steps=60, lr=3e-5, verbose=10):
        labels = {"omega": "scale", "alpha": "coef", "beta": "coef"}
        tx = optax.multi_transform({"scale": optax.adam(lr), "coef": optax.adam(lr * 100)}, labels)
        state = tx.init(self.params)
        r_tr, r_te = self.r[: self.n_train], self.r[self.n_train:]

        @jax.jit
        def update(p, s):
            loss, g = jax.value_and_grad(self.nll)(p, r_tr)
            u, s = tx.update(g, s, p)
            return optax.apply_updates(p, u), s, loss

        p = self.params
        for i in range(steps):
            p, state, loss = update(p, state)
            if i % verbose == 0:
                test = self.nll(p, r_te)
                print(f"{i:4d} nll {loss:.5f} test {test:.5f}  "
                      f"omega {p['omega']:.2e} alpha {p['alpha']:.3f} beta {p['beta']:.3f}")
        self.params = p
        return self

    def forecast(self, horizon=10):
        p = self.params
        s2 = self.filter(p, self.r)[-1]
        out = []
        for _ in range(horizon):
            s2 = p["omega"] + (p["alpha"] + p["beta"]) * s2
            out.append(float(jnp.sqrt(s2)))
        return out


if __name__ == "__main__":
    ret = simulate(900)
    print("daily vol", ret.std())
    model = Garch(ret).fit()
    vol = model.forecast()
    print("forecast vol:", np.round(vol, 5))
    if not np.all(np.isfinite(vol)):
        raise SystemExit("forecast contains nan")
