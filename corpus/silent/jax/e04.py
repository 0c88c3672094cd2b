import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


class DeepSet(eqx.Module):
    phi: eqx.nn.MLP
    rho: eqx.nn.MLP

    def __init__(self, d_point, key):
        a, b = jr.split(key)
        self.phi = eqx.nn.MLP(d_point, 32, 64, 2, activation=jax.nn.silu, key=a)
        self.rho = eqx.nn.MLP(32, 1, 64, 1, activation=jax.nn.silu, key=b)

    def __call__(self, points):
        pooled = jnp.mean(jax.vmap(self.phi)(points), axis=0)
        return self.rho(pooled)


def point_clouds(n, m, seed):
    rng = np.random.default_rng(seed)
    axes = rng.uniform(0.3, 2.0, (n, 1, 3))
    pts = rng.standard_normal((n, m, 3)) * axes
    target = np.log(np.prod(axes[:, 0], axis=-1))
    target = (target - target.mean()) / target.std()
    return pts.astype(np.float32), target.astype(np.float32)


def loss_fn(model, pts, target):
    pred = jax.vmap(model)(pts)
    return jnp.mean((pred - target) ** 2)


@eqx.filter_jit
def predict(model, pts):
    return jax.vmap(model)(pts)


def evaluate(model, pts, target):
    pred = np.asarray(predict(model, pts)).ravel()
    resid = ((pred - target) ** 2).sum()
    return 1.0 - resid / ((target - target.mean()) ** 2).sum()


if __name__ == "__main__":
    train_pts, train_y = point_clouds(2048, 48, 0)
    val_pts, val_y = point_clouds(256, 48, 1)
    model = DeepSet(3, jr.PRNGKey(7))
    steps, batch = 300, 64
    tx = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def update(model, opt_state, pts, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, pts, y)
        upd, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, upd), opt_state, loss

    rng = np.random.default_rng(2)
    for i in range(steps):
        sel = rng.integers(0, len(train_y), batch)
        model, opt_state, loss = update(model, opt_state, train_pts[sel], train_y[sel])
        if i % 50 == 0 or i == steps - 1:
            print(f"{i:4d} train {float(loss):.4f}  val r2 {evaluate(model, val_pts, val_y):.3f}")
