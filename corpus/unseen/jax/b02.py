import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class MLP(nn.Module):
    hidden: int = 64

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(10)(x)


def get_config():
    return dict(batch_size=512, epochs=2, max_lr=3e-3, warmup_frac=0.1, subset=0.6, seed=3)


def make_schedule(peak, total, warmup):
    def schedule(count):
        ramp = jnp.minimum(count / warmup, 1.0)
        progress = jnp.clip((count - warmup) / (total - warmup), 0.0, 1.0)
        return peak * ramp * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    return schedule


def create_state(rng, cfg, steps_per_epoch):
    model = MLP()
    params = jax.jit(model.init)(rng, jnp.zeros((1, 64)))["params"]
    total = cfg["epochs"] * steps_per_epoch
    schedule = make_schedule(cfg["max_lr"], total, int(cfg["warmup_frac"] * total))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, xb, yb):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, xb)
        return optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    acc = (logits.argmax(-1) == yb).mean()
    return state.apply_gradients(grads=grads), loss, acc


def main():
    cfg = get_config()
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).astype(np.float32)
    Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.2, random_state=0)
    n = int(len(Xtr) * cfg["subset"])
    Xtr, ytr = Xtr[:n], ytr[:n]
    steps = -(-n // cfg["batch_size"])
    state = create_state(jax.random.PRNGKey(cfg["seed"]), cfg, steps)
    rng = np.random.default_rng(cfg["seed"])
    for ep in range(cfg["epochs"]):
        order = rng.permutation(n)
        for s in range(steps):
            idx = order[s * cfg["batch_size"]:(s + 1) * cfg["batch_size"]]
            state, loss, acc = train_step(state, Xtr[idx], ytr[idx])
            print(f"epoch {ep} step {s} loss {loss:.4f} acc {acc:.3f}")
    logits = state.apply_fn({"params": state.params}, Xte)
    print("test acc", float((logits.argmax(-1) == yte).mean()), "logit mean", float(logits.mean()))


if __name__ == "__main__":
    main()
