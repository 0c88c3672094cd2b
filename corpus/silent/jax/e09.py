from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Cfg:
    vocab: int = 600
    topics: int = 12
    length: int = 16
    dim: int = 32
    mask_id: int = 0
    mask_rate: float = 0.15
    steps: int = 400
    batch: int = 64
    lr: float = 1e-2


class TopicCorpus:
    def __init__(self, cfg, seed):
        self.cfg = cfg
        self.rng = np.random.default_rng(seed)
        self.per = (cfg.vocab - 1) // cfg.topics
        weight = 1.0 / np.arange(1, self.per + 1) ** 1.3
        self.zipf = weight / weight.sum()

    def batch(self):
        c = self.cfg
        topic = self.rng.integers(0, c.topics, (c.batch, 1))
        rank = self.rng.choice(self.per, (c.batch, c.length), p=self.zipf)
        tokens = 1 + topic * self.per + rank
        hide = self.rng.random(tokens.shape) < c.mask_rate
        hide[:, 0] |= ~hide.any(axis=1)
        return np.where(hide, c.mask_id, tokens), tokens, hide.astype(np.float32)


def init(cfg, key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "embed": 0.3 * jax.random.normal(k1, (cfg.vocab, cfg.dim)),
        "w1": jax.random.normal(k2, (cfg.dim, 2 * cfg.dim)) / np.sqrt(cfg.dim),
        "w2": jax.random.normal(k3, (2 * cfg.dim, cfg.dim)) / np.sqrt(2 * cfg.dim),
        "bias": jnp.zeros(cfg.vocab),
    }


def logits_fn(p, cfg, tokens):
    seen = (tokens != cfg.mask_id)[..., None]
    e = p["embed"][tokens]
    context = (e * seen).sum(1) / seen.sum(1)
    h = context + jax.nn.gelu(context @ p["w1"]) @ p["w2"]
    return h @ p["embed"].T + p["bias"]


def masked_loss(p, cfg, tokens, target, hide):
    logp = jax.nn.log_softmax(logits_fn(p, cfg, tokens))
    picked = jnp.take_along_axis(logp, target, axis=1)
    return -(picked * hide).sum() / hide.sum()


def train(cfg):
    corpus = TopicCorpus(cfg, 0)
    params = init(cfg, jax.random.PRNGKey(0))
    tx = optax.adam(cfg.lr)
    state = tx.init(params)

    @jax.jit
    def step(params, state, tokens, target, hide):
        loss, g = jax.value_and_grad(masked_loss)(params, cfg, tokens, target, hide)
        u, state = tx.update(g, state)
        return optax.apply_updates(params, u), state, loss

    floor = -(corpus.zipf * np.log(corpus.zipf)).sum()
    for i in range(cfg.steps):
        params, state, loss = step(params, state, *corpus.batch())
        if i % 50 == 0 or i == cfg.steps - 1:
            print(f"step {i:3d} masked nll {float(loss):.3f} (entropy given topic {floor:.3f})")


train(Cfg())
