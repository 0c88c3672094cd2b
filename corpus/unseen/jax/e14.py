"""Matrix factorisation on a rating table that is mostly NaN (= not rated), equinox + optax."""
import numpy as np
import jax
import jax.numpy as jnp
import equinox as eqx
import optax


def rating_table(n_users=90, n_items=45, seed=0):
    rng = np.random.default_rng(seed)
    full = 3.3 + rng.normal(size=(n_users, 3)) @ rng.normal(size=(3, n_items)) * 0.6
    full += 0.4 * rng.normal(size=(n_users, 1)) + 0.4 * rng.normal(size=(1, n_items))
    table = np.clip(np.round(full * 2) / 2, 0.5, 5.0)
    table[rng.random(table.shape) > 0.35] = np.nan
    table[rng.choice(n_users, 4, replace=False)] = np.nan      # registered, never rated anything
    table[:, 7] = np.nan                                       # item not released yet
    return table.astype(np.float32)


class MF(eqx.Module):
    user: jax.Array
    item: jax.Array
    user_bias: jax.Array
    item_bias: jax.Array
    mu: float

    def __init__(self, n, m, k, mu, key):
        a, b = jax.random.split(key)
        self.user = 0.1 * jax.random.normal(a, (n, k))
        self.item = 0.1 * jax.random.normal(b, (m, k))
        self.user_bias, self.item_bias, self.mu = jnp.zeros(n), jnp.zeros(m), float(mu)

    def predict(self):
        return self.mu + self.user_bias[:, None] + self.item_bias[None] + self.user @ self.item.T


def masked_mse(model, table):
    seen = ~jnp.isnan(table)
    target = jnp.where(seen, table, 0.0)
    err = jnp.where(seen, model.predict() - target, 0.0)
    return jnp.sum(err ** 2) / jnp.maximum(seen.sum(), 1)


def objective(model, table, l2):
    reg = jnp.mean(model.user ** 2) + jnp.mean(model.item ** 2)
    return masked_mse(model, table) + l2 * reg


@eqx.filter_jit
def step(model, opt_state, table, tx):
    loss, g = eqx.filter_value_and_grad(objective)(model, table, 0.3)
    updates, opt_state = tx.update(g, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


@jax.jit
def per_user_rmse(pred, table):
    """NaN for users without a rating in this split"""
    sq = (pred - table) ** 2
    return jnp.sqrt(jnp.nanmean(sq, axis=1))


def split(table, frac, rng):
    held = (rng.random(table.shape) < frac) & ~np.isnan(table)
    return np.where(held, np.nan, table), np.where(held, table, np.nan)


def main():
    rng = np.random.default_rng(3)
    train, val = split(rating_table(), 0.15, rng)
    print(f"{np.isnan(train).mean():.1%} of the training table is NaN")
    model = MF(*train.shape, 3, np.nanmean(train), jax.random.PRNGKey(0))
    tx = optax.adam(3e-2)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    table, val_j = jnp.asarray(train), jnp.asarray(val)
    curve = np.full((150, 2), np.nan)          # val is only filled at evaluation steps
    best = (np.inf, None)
    for it in range(150):
        model, opt_state, loss = step(model, opt_state, table, tx)
        curve[it, 0] = float(loss)
        if it % 10 == 9:
            rmse = per_user_rmse(model.predict(), val_j)
            curve[it, 1] = float(jnp.nanmean(rmse))
            if curve[it, 1] < best[0]:
                best = (curve[it, 1], model)
            if it % 30 == 29:
                print(f"it {it:3d} loss {loss:.4f} val rmse {curve[it, 1]:.4f} "
                      f"({int(jnp.isnan(rmse).sum())} users without validation ratings)")
    final = per_user_rmse(best[1].predict(), val_j)
    print("best", best[0], "at", int(np.nanargmin(curve[:, 1])),
          "worst user", float(jnp.nanmax(final)))
    base = float(jnp.nanmean(per_user_rmse(jnp.full(train.shape, model.mu), val_j)))
    assert best[0] < 0.8 * base, (best[0], base)


if __name__ == "__main__":
    main()
