"""Multi-task sequence model: CTC transcription + frame energy regression,
with the geometric (product of losses) task balancing."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, LABEL_LEN, FRAMES, DIM = 6, 3, 12, 10


def make_data(n, seed):
    rng = np.random.default_rng(seed)
    protos = rng.standard_normal((VOCAB, DIM))
    x = np.zeros((n, FRAMES, DIM), np.float32)
    lab = np.zeros((n, LABEL_LEN), np.int32)
    for i in range(n):
        seq = rng.permutation(np.arange(1, VOCAB))[:LABEL_LEN]
        lab[i] = seq
        for j, c in enumerate(seq):
            x[i, 4 * j:4 * j + 3] = protos[c]
            x[i, 4 * j + 3] = protos[0]
    x += 0.05 * rng.standard_normal(x.shape)
    return x.astype(np.float32), lab, (x ** 2).mean(-1).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(64)(x))
        h = nn.LayerNorm()(nn.relu(nn.Dense(64)(h)))
        return nn.Dense(VOCAB)(h), nn.Dense(1)(h)[..., 0]


def task_losses(params, x, lab, energy):
    logits, pred = model.apply(params, x)
    pad_t = jnp.zeros(logits.shape[:2])
    pad_l = jnp.zeros(lab.shape)
    ctc = jnp.mean(optax.ctc_loss(logits, pad_t, lab, pad_l))
    reg = jnp.mean((pred - energy) ** 2)
    return jnp.stack([ctc, reg])


def objective(params, x, lab, energy):
    losses = task_losses(params, x, lab, energy)
    return jnp.sum(jnp.log(losses + 1e-8)), losses


@jax.jit
def step(params, opt_state, x, lab, energy):
    (total, losses), g = jax.value_and_grad(objective, has_aux=True)(params, x, lab, energy)
    upd, opt_state = tx.update(g, opt_state)
    return optax.apply_updates(params, upd), opt_state, total, losses


model = Net()
x, lab, energy = make_data(128, 0)
params = model.init(jax.random.PRNGKey(0), x[:2])
tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(3e-3))
opt_state = tx.init(params)
order = np.random.default_rng(1)
for it in range(500):
    b = order.choice(128, 16, replace=False)
    params, opt_state, total, losses = step(params, opt_state, x[b], lab[b], energy[b])
    if it % 25 == 0:
        print(f"{it:4d} total {float(total):9.3f} ctc {float(losses[0]):.3e} reg {float(losses[1]):.3e}")
