import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class ResBlock(nn.Module):
    ch: int

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.GroupNorm(4)(x))
        h = nn.Conv(self.ch, (3, 3), use_bias=False)(h)
        h = nn.relu(nn.GroupNorm(4)(h))
        h = nn.Conv(self.ch, (3, 3), use_bias=False, kernel_init=nn.initializers.zeros)(h)
        return x + h


class SmallResNet(nn.Module):
    ch: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.ch, (3, 3))(x)
        for _ in range(2):
            x = ResBlock(self.ch)(x)
        x = nn.relu(nn.GroupNorm(4)(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def build_tx(args):
    updates = args.micro_steps // args.accumulate
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, updates // 8, updates)
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(schedule, weight_decay=1e-3))
    return optax.MultiSteps(tx, every_k_schedule=args.accumulate).gradient_transformation()


@jax.jit
def micro_step(state, x, y):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--micro-steps", type=int, default=400)
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--micro-batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8, 1).astype(np.float32) - 4.9) / 6.0
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1500], order[1500:]

    model = SmallResNet()
    params = model.init(jax.random.key(0), x[:1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=build_tx(args))
    window = []
    for i in range(args.micro_steps):
        sel = rng.choice(tr, args.micro_batch)
        state, loss = micro_step(state, x[sel], y[sel])
        window.append(float(loss))
        if (i + 1) % 40 == 0:
            print(f"micro step {i + 1} mean loss {np.mean(window[-40:]):.4f}")
    logits = model.apply({"params": state.params}, x[te])
    print("accuracy", float((logits.argmax(-1) == y[te]).mean()))


if __name__ == "__main__":
    main()
