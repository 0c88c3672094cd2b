"""Online speech-to-token toy: monotonic attention (soft, expected alignment) over synthetic frames."""
import numpy as np
import jax
import jax.numpy as jnp
import equinox as eqx
import optax

T, U, VOCAB, FEAT = 30, 5, 5, 8


def synth_speech(n, seed):
    rng = np.random.default_rng(seed)
    voices = rng.normal(size=(VOCAB, FEAT))
    X = np.zeros((n, T, FEAT), np.float32)
    Y = rng.integers(0, VOCAB, size=(n, U))
    for i in range(n):
        cuts = np.sort(rng.choice(np.arange(3, T - 3), U - 1, replace=False))
        for tok, seg in zip(Y[i], np.split(np.arange(T), cuts)):
            X[i, seg] = voices[tok] * np.hanning(len(seg) + 2)[1:-1, None]
    X += 0.1 * rng.normal(size=X.shape)
    return X.astype(np.float32), Y.astype(np.int32)


def exclusive_cumprod(x):
    c = jnp.cumprod(x)
    return jnp.concatenate([jnp.ones(1, x.dtype), c[:-1]])


class MonotonicAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    v: jax.Array
    r: jax.Array

    def __init__(self, dim, key, r_init=-4.0):
        a, b, c = jax.random.split(key, 3)
        self.query = eqx.nn.Linear(dim, dim, key=a)
        self.key = eqx.nn.Linear(dim, dim, use_bias=False, key=b)
        self.v = jax.random.normal(c, (dim,)) / dim ** 0.5
        self.r = jnp.array(r_init, dtype=jnp.float32)

    def __call__(self, state, memory, prev, noise):
        hidden = jnp.tanh(self.query(state) + jax.vmap(self.key)(memory))
        energy = hidden @ self.v + self.r
        p = jax.nn.sigmoid(energy + noise)
        cp = exclusive_cumprod(1.0 - p)
        align = p * cp * jnp.cumsum(prev / cp)
        return align @ memory, align


class Transducer(eqx.Module):
    enc: eqx.nn.Linear
    cell: eqx.nn.GRUCell
    att: MonotonicAttention
    out: eqx.nn.Linear

    def __init__(self, dim, key):
        a, b, c, d = jax.random.split(key, 4)
        self.enc = eqx.nn.Linear(FEAT, dim, key=a)
        self.cell = eqx.nn.GRUCell(dim, dim, key=b)
        self.att = MonotonicAttention(dim, c)
        self.out = eqx.nn.Linear(2 * dim, VOCAB, key=d)

    def __call__(self, frames, noise):
        memory = jax.nn.gelu(jax.vmap(self.enc)(frames))
        start = jnp.zeros(T).at[0].set(1.0)

        def decode(carry, k):
            h, ctx, prev = carry
            h = self.cell(ctx, h)
            ctx, align = self.att(h, memory, prev, k)
            return (h, ctx, align), (self.out(jnp.concatenate([h, ctx])), align)

        zero = jnp.zeros(self.cell.hidden_size)
        _, (logits, aligns) = jax.lax.scan(decode, (zero, zero, start), noise)
        return logits, aligns


@eqx.filter_jit
def update(model, opt_state, x, y, noise):
    def objective(m):
        logits, aligns = jax.vmap(m)(x, noise)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return ce + 2.0 * jnp.mean((aligns.sum(-1) - 1.0) ** 2)
    loss, grads = eqx.filter_value_and_grad(objective)(model)
    ups, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, ups), opt_state, loss, optax.global_norm(grads)


X, Y = synth_speech(256, 0)
model = Transducer(20, jax.random.PRNGKey(0))
optim = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
rng = np.random.default_rng(2)
for step in range(60):
    idx = rng.choice(len(X), 32, replace=False)
    noise = rng.normal(size=(len(idx), U, T)).astype(np.float32)
    model, opt_state, loss, gnorm = update(model, opt_state, X[idx], Y[idx], noise)
    if step % 5 == 0:
        print(f"{step:3d} loss {float(loss):.4f} |g| {float(gnorm):.3f} r {float(model.att.r):.3f}")
    assert np.isfinite(float(loss)) and np.isfinite(float(gnorm)), f"diverged at step {step}"
