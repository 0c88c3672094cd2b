# selective state space layer (Mamba-2 style, dual "attention" form) for a toy copy-the-trend task
import functools
import numpy as np
import jax, jax.numpy as jnp
import optax
import flax.linen as nn

T, D, N, H = 64, 16, 8, 2


def make_batch(rng, bs=16):
    t = np.arange(T + 1)
    f = rng.uniform(0.05, 0.3, (bs, 1))
    ph = rng.uniform(0, 6.28, (bs, 1))
    s = np.sin(f * t + ph) + 0.1 * rng.standard_normal((bs, T + 1))
    return s[:, :-1, None].astype(np.float32), s[:, 1:, None].astype(np.float32)


def decay_matrix(log_a):
    """log_a: (B, H, T) -> (B, H, T, T), entry [i, j] = prod_{j<k<=i} a_k"""
    c = jnp.cumsum(log_a, axis=-1)
    seg = c[..., :, None] - c[..., None, :]
    causal = jnp.tril(jnp.ones((T, T), bool))
    return jnp.where(causal, jnp.exp(seg), 0.0)


class SSDBlock(nn.Module):
    heads: int = H
    state: int = N

    @nn.compact
    def __call__(self, x):
        B_, T_, d = x.shape
        u = nn.RMSNorm()(x)
        v = nn.Dense(d, name="in_proj")(u).reshape(B_, T_, self.heads, -1)
        Bm = nn.Dense(self.state, name="B")(u)
        Cm = nn.Dense(self.state, name="C")(u)
        dt_bias = self.param("dt_bias", nn.initializers.constant(-0.8), (self.heads,))
        a_log = self.param("A_log", lambda k, s: jnp.log(jnp.linspace(1.0, 2.0, s[0])), (self.heads,))
        dt = jax.nn.softplus(nn.Dense(self.heads, name="dt")(u) + dt_bias)
        log_a = -dt * jnp.exp(a_log)
        L = decay_matrix(jnp.moveaxis(log_a, -1, 1))
        scores = jnp.einsum("btn,bsn->bts", Cm, Bm)[:, None] * L
        y = jnp.einsum("bhts,bshp,bsh->bthp", scores, v, dt)
        y = y.reshape(B_, T_, d) * nn.silu(nn.Dense(d, name="gate")(u))
        return x + nn.Dense(d, name="out_proj")(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(D)(x)
        for _ in range(2):
            h = SSDBlock()(h)
        return nn.Dense(1)(nn.RMSNorm()(h))


model = Model()
rng = np.random.default_rng(0)
params = model.init(jax.random.PRNGKey(1), make_batch(rng)[0])
sched = optax.warmup_cosine_decay_schedule(1e-3, 2e-2, 10, 80)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(sched, weight_decay=0.01))
opt_state = tx.init(params)


def loss_fn(p, x, y):
    return jnp.mean((model.apply(p, x) - y) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(p, s, x, y):
    l, g = jax.value_and_grad(loss_fn)(p, x, y)
    upd, s = tx.update(g, s, p)
    return optax.apply_updates(p, upd), s, l, optax.global_norm(g)


for i in range(60):
    x, y = make_batch(rng)
    params, opt_state, l, gn = step(params, opt_state, x, y)
    if i % 5 == 0 or not np.isfinite(float(gn)):
        print(f"step {i:3d} loss {float(l):.4f} |g| {float(gn):.3f}")
    if np.isnan(float(l)):
        raise FloatingPointError(f"NaN loss at step {i}")
