"""Preference tuning of a tiny character model: SFT warm start, then odds-ratio (ORPO style) steps."""
import numpy as np
import jax
import jax.numpy as jnp
import equinox as eqx
import optax

PAIRS = [
    ("hello", "helo!"), ("thanks", "thx..."), ("please", "plz..."), ("you", "u.."),
    ("great", "gr8.."), ("tomorrow", "tmrw...."), ("because", "bc....."), ("people", "ppl..."),
]
CHARS = sorted(set("".join(a + b for a, b in PAIRS)) | {"^"})
STOI = {c: i for i, c in enumerate(CHARS)}
MAXLEN = 9


def encode(word):
    ids = [STOI["^"]] + [STOI[c] for c in word]
    mask = [1.0] * len(word)
    pad = MAXLEN - len(ids)
    return ids + [0] * pad, mask + [0.0] * (MAXLEN - 1 - len(word))


class CharGRU(eqx.Module):
    emb: eqx.nn.Embedding
    word: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, vocab, width, key):
        a, b, c, d = jax.random.split(key, 4)
        self.emb = eqx.nn.Embedding(vocab, width, key=a)
        self.word = eqx.nn.Embedding(len(PAIRS), width, key=d)
        self.cell = eqx.nn.GRUCell(width, width, key=b)
        self.head = eqx.nn.Linear(width, vocab, key=c)

    def __call__(self, prompt, tokens):
        def scan_fn(h, t):
            h = self.cell(self.emb(t), h)
            return h, self.head(h)
        _, logits = jax.lax.scan(scan_fn, self.word(prompt), tokens)
        return jax.nn.log_softmax(logits)


def half(tree):
    cast = lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a
    return jax.tree.map(cast, tree)


def avg_logp(model, prompt, ids, mask):
    logp = half(model)(prompt, ids[:-1])
    picked = jnp.take_along_axis(logp, ids[1:, None], axis=1)[:, 0]
    mask = mask.astype(picked.dtype)
    return (picked * mask).sum() / mask.sum()


def orpo_loss(model, batch, beta):
    good = jax.vmap(avg_logp, (None, 0, 0, 0))(model, batch["prompt"], *batch["chosen"])
    bad = jax.vmap(avg_logp, (None, 0, 0, 0))(model, batch["prompt"], *batch["rejected"])
    log_odds = (good - bad) - (jnp.log1p(-jnp.exp(good)) - jnp.log1p(-jnp.exp(bad)))
    ratio = jax.nn.log_sigmoid(log_odds)
    loss = -good.mean() - beta * ratio.mean()
    return loss, {"chosen": good.mean(), "rejected": bad.mean(), "odds": log_odds.mean()}


def sft_loss(model, batch):
    good = jax.vmap(avg_logp, (None, 0, 0, 0))(model, batch["prompt"], *batch["chosen"])
    return -good.mean(), {"chosen": good.mean()}


def make_step(loss_fn, tx):
    @eqx.filter_jit
    def step(model, state, batch):
        (loss, info), g = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, batch)
        up, state = tx.update(g, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, up), state, loss, info
    return step


def to_arrays(words):
    ids, mask = zip(*(encode(w) for w in words))
    return jnp.array(ids), jnp.array(mask)


batch = {"prompt": jnp.arange(len(PAIRS)),
         "chosen": to_arrays([a for a, _ in PAIRS]),
         "rejected": to_arrays([b for _, b in PAIRS])}
model = CharGRU(len(CHARS), 32, jax.random.PRNGKey(7))

for name, fn, lr, n in [("sft", sft_loss, 2e-2, 8),
                        ("orpo", lambda m, b: orpo_loss(m, b, 0.5), 4e-2, 50)]:
    tx = optax.adam(lr)
    state = tx.init(eqx.filter(model, eqx.is_array))
    step = make_step(fn, tx)
    for it in range(n):
        model, state, loss, info = step(model, state, batch)
        if it % 4 == 0 or not np.isfinite(float(loss)):
            print(name, it, f"loss {float(loss):.5f}",
                  {k: round(float(v), 5) for k, v in info.items()})
        if not np.isfinite(float(loss)):
            raise FloatingPointError("non-finite ORPO loss")
