"""Tiny GRPO: a GRU policy over syllables is tuned with a group baseline and a KL term to the frozen reference."""
import copy
import jax
import jax.numpy as jnp
import optax
from jax import random, lax

VOCAB = ["<pad>", "<eos>", "ka", "to", "mi", "re", "su", "no", "ha", "le"]
PAD, EOS, V = 0, 1, len(VOCAB)
LEN, GROUPS, G, HID = 10, 4, 8, 24
BETA, CLIP = 0.04, 0.2


def init(key):
    k = random.split(key, 5)
    g = lambda kk, s: random.normal(kk, s) / jnp.sqrt(s[0])
    out_b = jnp.zeros(V).at[EOS].set(-5.0)
    return {"emb": random.normal(k[0], (V, HID)) * 0.5, "wz": g(k[1], (2 * HID, HID)), "wh": g(k[2], (2 * HID, HID)),
            "bz": jnp.zeros(HID), "bh": jnp.zeros(HID), "out": g(k[3], (HID, V)), "out_b": out_b}


def cell(p, h, tok):
    xh = jnp.concatenate([p["emb"][tok], h], -1)
    z = jax.nn.sigmoid(xh @ p["wz"] + p["bz"])
    c = jnp.tanh(xh @ p["wh"] + p["bh"])
    h = (1 - z) * h + z * c
    return h, h @ p["out"] + p["out_b"]


def ban_pad(logits):
    return logits.at[..., PAD].set(-1e9)


def generate(p, key, first):
    n = first.shape[0]

    def f(carry, k):
        h, tok, dead = carry
        h, logits = cell(p, h, tok)
        nxt = random.categorical(k, ban_pad(logits))
        nxt = jnp.where(dead, PAD, nxt)
        return (h, nxt, dead | (nxt == EOS)), nxt

    _, toks = lax.scan(f, (jnp.zeros((n, HID)), first, jnp.zeros(n, bool)), random.split(key, LEN))
    return toks.T


def token_logps(p, first, toks, filt=lambda l: l):
    inp = jnp.concatenate([first[:, None], toks[:, :-1]], 1).T

    def f(h, x):
        prev, tgt = x
        h, logits = cell(p, h, prev)
        lp = jax.nn.log_softmax(filt(logits))
        return h, jnp.take_along_axis(lp, tgt[:, None], 1)[:, 0]

    _, lp = lax.scan(f, jnp.zeros((first.shape[0], HID)), (inp, toks.T))
    return lp.T


def reward(toks):
    ka_to = jnp.sum((toks[:, :-1] == 2) & (toks[:, 1:] == 3), 1)
    return ka_to + 0.3 * jnp.sum(toks == 4, 1) + 0.5 * jnp.any(toks == EOS, 1)


def grpo_loss(p, batch):
    first, toks, mask, old_lp, ref_lp, adv = batch
    lp = token_logps(p, first, toks, ban_pad)
    ratio = jnp.exp(lp - old_lp)
    surr = jnp.minimum(ratio * adv[:, None], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * adv[:, None])
    d = ref_lp - lp
    kl = jnp.exp(d) - d - 1.0
    per_tok = (-surr + BETA * kl) * mask
    return per_tok.sum() / mask.sum()


policy = init(random.PRNGKey(0))
reference = copy.deepcopy(policy)
tx = optax.adam(6e-3)
opt_state = tx.init(policy)


@jax.jit
def rollout(p, ref, key):
    k1, k2 = random.split(key)
    first = jnp.repeat(random.randint(k1, (GROUPS,), 2, V), G)
    toks = generate(p, k2, first)
    r = reward(toks)
    rg = r.reshape(GROUPS, G)
    adv = ((rg - rg.mean(1, keepdims=True)) / (rg.std(1, keepdims=True) + 1e-4)).reshape(-1)
    mask = (toks != PAD).astype(jnp.float32)
    return (first, toks, mask, token_logps(p, first, toks, ban_pad), token_logps(ref, first, toks), adv), r.mean()


@jax.jit
def update(p, s, batch):
    loss, g = jax.value_and_grad(grpo_loss)(p, batch)
    u, s = tx.update(g, s)
    return optax.apply_updates(p, u), s, loss


key = random.PRNGKey(3)
for it in range(20):
    key, k = random.split(key)
    batch, r = rollout(policy, reference, k)
    for _ in range(2):
        policy, opt_state, loss = update(policy, opt_state, batch)
    if it % 4 == 0:
        print(f"iter {it:3d} reward {float(r):.3f} loss {float(loss):+.4f}", " ".join(VOCAB[t] for t in batch[1][0].tolist()))
if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(policy)):
    raise RuntimeError("policy has non-finite weights")
