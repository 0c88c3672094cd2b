"""Small causal attention model on a copy task, everything by hand.
Keeps the best checkpoint and samples with top-k filtering at the end."""
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

V, T, D = 8, 12, 24
NEG = -jnp.inf


@jax.custom_vjp
def unit(x):
    n = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.where(n > 0, x / n, 0.0)


def unit_fwd(x):
    n = jnp.linalg.norm(x, axis=-1, keepdims=True)
    safe = jnp.where(n > 0, n, 1.0)
    y = x / safe
    return y, (y, safe, n > 0)


def unit_bwd(res, ct):
    y, safe, nonzero = res
    gx = (ct - y * jnp.sum(ct * y, -1, keepdims=True)) / safe
    return (jnp.where(nonzero, gx, 0.0),)


unit.defvjp(unit_fwd, unit_bwd)


def init(key):
    ks = jax.random.split(key, 6)
    g = lambda k, *s: jax.random.normal(k, s) * 0.25
    return {"emb": g(ks[0], V, D).at[0].set(0.0), "pos": jnp.zeros((T, D)), "q": g(ks[1], D, D),
            "k": g(ks[2], D, D), "v": g(ks[3], D, D), "o": g(ks[4], D, V)}


def logits_fn(p, tok):
    x = unit(p["emb"][tok]) + p["pos"]
    q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
    causal = jnp.tril(jnp.ones((T, T), bool))
    att = jnp.where(causal, q @ k.T / D**0.5 * 4.0, NEG)
    out = (x + jax.nn.softmax(att, axis=-1) @ v) @ p["o"]
    return jnp.where(jnp.arange(V) == 0, NEG, out)


def loss_fn(p, tok):
    lp = jax.nn.log_softmax(jax.vmap(logits_fn, (None, 0))(p, tok)[:, :-1])
    tgt = tok[:, 1:]
    real = tgt != 0
    nll = -jnp.take_along_axis(lp, tgt[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(real, nll, 0.0)) / jnp.sum(real)


def batch(rng, n):
    half = rng.integers(1, V, (n, T // 2))
    tok = np.concatenate([half, half], 1)
    stop = rng.integers(T // 2 + 2, T + 1, n)
    return jnp.asarray(np.where(np.arange(T) < stop[:, None], tok, 0))


@jax.jit
def epoch(p, m, toks):
    def body(carry, tok):
        p, m = carry
        l, g = jax.value_and_grad(loss_fn)(p, tok)
        m = jax.tree.map(lambda a, b: 0.9 * a + b, m, g)
        return (jax.tree.map(lambda a, b: a - 0.1 * b, p, m), m), l
    (p, m), ls = lax.scan(body, (p, m), toks)
    return p, m, ls.mean()


rng = np.random.default_rng(0)
p = init(jax.random.PRNGKey(3))
m = jax.tree.map(jnp.zeros_like, p)
val = batch(rng, 64)
best, best_p = float("inf"), p
for ep in range(15):
    p, m, tr = epoch(p, m, jnp.stack([batch(rng, 32) for _ in range(20)]))
    vl = float(loss_fn(p, val))
    if vl < best:
        best, best_p = vl, p
    print(f"epoch {ep} train {float(tr):.4f} val {vl:.4f} best {best:.4f}")
lg = logits_fn(best_p, val[0])[-1]
kth = jnp.sort(lg)[-3]
print("top-3 probabilities", jax.nn.softmax(jnp.where(lg >= kth, lg, NEG)))
