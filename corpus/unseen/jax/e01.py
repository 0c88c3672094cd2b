"""Next-item click model with a recency feature (toy session log)."""
import numpy as np
import jax
import jax.numpy as jnp
import optax
from flax import nnx

DAY_MS = 24 * 3600 * 1000
N_USERS, N_ITEMS, N_EVENTS = 80, 40, 2400


def make_log(seed=3):
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(N_USERS, 3))
    genre = rng.normal(size=(N_ITEMS, 3))
    clock = np.full(N_USERS, 1_690_000_000_000, dtype=np.int64)
    clock += rng.integers(0, DAY_MS, N_USERS)
    away = set(rng.choice(N_USERS, 5, replace=False).tolist())
    rows = []
    for k in range(N_EVENTS):
        u = int(rng.integers(N_USERS))
        i = int(rng.integers(N_ITEMS))
        before = clock[u]
        gap = int(rng.exponential(1.5) * DAY_MS) + 60_000
        if k > 1400 and u in away:
            gap += 27 * DAY_MS
            away.discard(u)
        clock[u] = before + gap
        score = taste[u] @ genre[i] - 0.3 * np.log1p(gap / DAY_MS)
        rows.append((u, i, before, clock[u], float(score + rng.logistic() > 0)))
    u, i, t0, t1, y = map(np.array, zip(*rows))
    return {"user": u, "item": i, "prev_ts": t0, "ts": t1, "click": y}


class Recommender(nnx.Module):
    def __init__(self, dim, rngs):
        self.users = nnx.Embed(N_USERS, dim, rngs=rngs)
        self.items = nnx.Embed(N_ITEMS, dim, rngs=rngs)
        self.head = nnx.Linear(2 * dim + 1, 24, rngs=rngs)
        self.out = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, user, item, recency):
        p, q = self.users(user), self.items(item)
        h = jnp.concatenate([p * q, p, recency[:, None]], axis=-1)
        h = nnx.relu(self.head(h))
        return self.out(h)[:, 0] + (p * q).sum(-1)


def recency_feature(prev_ts, ts):
    hours = (ts - prev_ts) / 3_600_000
    return jnp.log1p(hours) / 5.0


def bce(model, batch):
    rec = recency_feature(batch["prev_ts"], batch["ts"])
    logits = model(batch["user"], batch["item"], rec)
    return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean()


@nnx.jit
def train_step(model, opt, batch):
    loss, grads = nnx.value_and_grad(bce)(model, batch)
    opt.update(model, grads)
    return loss


def main():
    log = make_log()
    data = {k: jnp.asarray(v) for k, v in log.items()}
    model = Recommender(8, nnx.Rngs(0))
    opt = nnx.Optimizer(model, optax.adamw(5e-3, weight_decay=1e-3), wrt=nnx.Param)
    bs, step = 48, 0
    for start in range(0, N_EVENTS - bs + 1, bs):
        batch = {k: v[start:start + bs] for k, v in data.items()}
        loss = float(train_step(model, opt, batch))
        if step % 5 == 0:
            print(f"step {step:3d}  events {start:5d}  loss {loss:.4f}")
        if not np.isfinite(loss):
            raise RuntimeError(f"loss is {loss} at step {step}")
        step += 1
    print("done")


if __name__ == "__main__":
    main()
