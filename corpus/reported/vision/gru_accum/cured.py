import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

CONFIG = dict(seed=0, micro_batch=32, accum=8, num_steps=640, peak_lr=1e-2, warmup_frac=0.3, hidden=32, length=12)


class Recurrent(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        carry = nn.GRUCell(self.hidden, parent=None).initialize_carry(jax.random.PRNGKey(0), x[:, 0].shape)
        scan = nn.scan(nn.GRUCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        carry, _ = scan(self.hidden)(carry, x)
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(carry)))[:, 0]


def gated_sum(rng, n, length):
    values = rng.normal(size=(n, length))
    marks = (rng.uniform(size=(n, length)) < 0.4).astype(np.float32)
    return jnp.asarray(np.stack([values, marks], -1), jnp.float32), jnp.asarray((values * marks).sum(1), jnp.float32)


def main(cfg):
    rng = np.random.default_rng(cfg["seed"])
    xs, ys = gated_sum(rng, 4096, cfg["length"])
    xv, yv = gated_sum(np.random.default_rng(99), 1024, cfg["length"])
    model = Recurrent(cfg["hidden"])
    params = model.init(jax.random.PRNGKey(cfg["seed"]), xs[:2])["params"]
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=cfg["peak_lr"],
        warmup_steps=int(cfg["warmup_frac"] * cfg["num_steps"] // cfg["accum"]),
        decay_steps=cfg["num_steps"] // cfg["accum"])
    optimizer = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), every_k_schedule=cfg["accum"])
    opt_state = optimizer.init(params)

    def loss_fn(p, x, y):
        return jnp.mean((model.apply({"params": p}, x) - y) ** 2)

    @jax.jit
    def train_step(p, s, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(p, x, y)
        updates, s = optimizer.update(grads, s, p)
        return optax.apply_updates(p, updates), s, loss

    for step in range(cfg["num_steps"]):
        idx = rng.integers(0, len(ys), cfg["micro_batch"])
        params, opt_state, loss = train_step(params, opt_state, xs[idx], ys[idx])
        if step % 80 == 0:
            print(f"micro step {step:4d}  loss {float(loss):.4f}")
    print("FINAL", float(loss_fn(params, xv, yv)))


main(CONFIG)
