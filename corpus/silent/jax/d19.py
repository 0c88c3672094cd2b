import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax


def simulate_ratings(seed, n_users=200, n_items=150, rank=4, n_obs=12000):
    rng = np.random.default_rng(seed)
    user_ids = np.sort(rng.choice(np.arange(100000, 180000), n_users, replace=False))
    item_ids = np.arange(n_items)
    pu = rng.standard_normal((n_users, rank))
    qi = rng.standard_normal((n_items, rank))
    bias = 0.5 * rng.standard_normal(n_items)
    u = rng.integers(0, n_users, n_obs)
    i = rng.integers(0, n_items, n_obs)
    score = (pu[u] * qi[i]).sum(1) / np.sqrt(rank) + bias[i]
    rating = 3.5 + score + 0.2 * rng.standard_normal(n_obs)
    return user_ids[u], item_ids[i], rating.astype(np.float32)


def init_model(key, n_users, n_items, dim):
    k1, k2 = jax.random.split(key)
    return {
        "users": 0.3 * jax.random.normal(k1, (n_users, dim)),
        "items": 0.3 * jax.random.normal(k2, (n_items, dim)),
        "user_bias": jnp.zeros(n_users),
        "item_bias": jnp.zeros(n_items),
        "mean": jnp.zeros(()),
    }


def predict(p, user, item):
    dot = jnp.sum(p["users"][user] * p["items"][item], axis=-1)
    return p["mean"] + p["user_bias"][user] + p["item_bias"][item] + dot


def loss_fn(p, user, item, rating):
    return jnp.mean((predict(p, user, item) - rating) ** 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-2)
    args = parser.parse_args()

    users, items, ratings = simulate_ratings(0)
    n_users, n_items = len(np.unique(users)), len(np.unique(items))
    print(f"{len(ratings)} ratings, {n_users} users, {n_items} items")
    cut = int(0.85 * len(ratings))

    params = init_model(jax.random.PRNGKey(0), n_users, n_items, args.dim)
    params["mean"] = jnp.asarray(ratings[:cut].mean())
    tx = optax.adam(args.lr)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, u, i, r):
        loss, grads = jax.value_and_grad(loss_fn)(params, u, i, r)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(1)
    for t in range(args.steps):
        sel = rng.integers(0, cut, args.batch)
        params, opt_state, loss = step(params, opt_state, users[sel], items[sel], ratings[sel])
        if t % 40 == 0:
            print(f"step {t:3d}  mse {float(loss):.4f}")
    test = float(loss_fn(params, users[cut:], items[cut:], ratings[cut:]))
    print(f"test rmse {np.sqrt(test):.4f}   rating std {ratings[cut:].std():.4f}")


if __name__ == "__main__":
    main()
