"""Tiny equinox char transformer. Phase 1: plain CE, phase 2: label smoothing fine-tuning."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

TEXT = ("the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs! "
        "how vexingly quick daft zebras jump; sphinx of black quartz, judge my vow. ") * 6
chars = sorted(set(TEXT))
stoi = {c: i for i, c in enumerate(chars)}
n_real = len(chars)
VOCAB = 64                      # padded to a multiple of 64 like the big models do
CTX, DIM, HEADS = 24, 32, 2
data = np.array([stoi[c] for c in TEXT], dtype=np.int32)
valid_token = jnp.arange(VOCAB) < n_real


class Block(eqx.Module):
    attn: eqx.nn.MultiheadAttention
    ln1: eqx.nn.LayerNorm
    ln2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.attn = eqx.nn.MultiheadAttention(HEADS, DIM, key=k1)
        self.ln1, self.ln2 = eqx.nn.LayerNorm(DIM), eqx.nn.LayerNorm(DIM)
        self.mlp = eqx.nn.MLP(DIM, DIM, 2 * DIM, 1, activation=jax.nn.gelu, key=k2)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((CTX, CTX), bool))
        h = jax.vmap(self.ln1)(x)
        x = x + self.attn(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.ln2)(x))


class CharLM(eqx.Module):
    tok: eqx.nn.Embedding
    pos: jax.Array
    block: Block
    head: eqx.nn.Linear

    def __init__(self, key):
        k = jax.random.split(key, 4)
        self.tok = eqx.nn.Embedding(VOCAB, DIM, key=k[0])
        self.pos = 0.02 * jax.random.normal(k[1], (CTX, DIM))
        self.block = Block(k[2])
        self.head = eqx.nn.Linear(DIM, VOCAB, key=k[3])

    def __call__(self, ids):
        h = jax.vmap(self.tok)(ids) + self.pos
        logits = jax.vmap(self.head)(self.block(h))
        return jnp.where(valid_token, logits, -jnp.inf)


def criterion(model, x, y, smoothing):
    logp = jax.nn.log_softmax(jax.vmap(model)(x), axis=-1)
    nll = -jnp.take_along_axis(logp, y[..., None], -1)[..., 0]
    if smoothing > 0:
        uniform = -logp.mean(axis=-1)
        nll = (1.0 - smoothing) * nll + smoothing * uniform
    return nll.mean()


def get_batch(rng, bs=12):
    st = rng.integers(0, len(data) - CTX - 1, bs)
    return (np.stack([data[s:s + CTX] for s in st]), np.stack([data[s + 1:s + CTX + 1] for s in st]))


def run_phase(model, name, steps, lr, smoothing, rng):
    opt = optax.adamw(lr)
    state = opt.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def train_step(model, state, x, y):
        loss, grads = eqx.filter_value_and_grad(criterion)(model, x, y, smoothing)
        upd, state = opt.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, upd), state, loss

    for i in range(steps):
        model, state, loss = train_step(model, state, *get_batch(rng))
        loss = float(loss)
        if i % 8 == 0:
            print(f"[{name}] {i:3d} loss {loss:.4f} ppl {np.exp(loss):.2f}")
        if not np.isfinite(loss):
            raise ValueError(f"{name}: loss diverged at step {i} ({loss})")
    return model


rng = np.random.default_rng(7)
model = CharLM(jax.random.PRNGKey(0))
model = run_phase(model, "pretrain", 24, 4e-3, 0.0, rng)
model = run_phase(model, "finetune", 24, 1e-3, 0.1, rng)
print("done")
