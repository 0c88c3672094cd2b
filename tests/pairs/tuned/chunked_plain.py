"""Bag-of-history language model with a large output layer. The plain JAX port computes the cross entropy in chunks."""
import jax
import jax.numpy as jnp
import numpy as np
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HIDDEN, CHUNK = 45, 16, 32, 8


def make_batch():
    rng = np.random.default_rng(64)
    tokens = rng.integers(0, VOCAB, size=(4, 9))
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------- PyTorch


class HistoryModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(2 * DIM, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        steps = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        history = x.cumsum(dim=1) / steps
        h = F.gelu(self.mix(torch.cat([x, history], dim=-1)), approximate="tanh")
        x = x + self.down(self.norm(h))
        return self.head(x)


def left():
    torch.manual_seed(20)
    model = HistoryModel()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tokens, targets = (torch.from_numpy(np.ascontiguousarray(a)) for a in make_batch())

    def loss_fn(tokens, targets):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return stablenum_torch.program(loss_fn, tokens, targets, model=model)


# ---------------------------------------------------------------- JAX


def chunk_loss(hidden, weight, targets):
    logits = hidden @ weight
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)


def in_chunks(hidden, targets):
    return hidden.reshape(-1, CHUNK, hidden.shape[-1]), targets.reshape(-1, CHUNK)


@jax.custom_vjp
def chunked_cross_entropy(hidden, weight, targets):
    losses = jax.lax.map(lambda pair: chunk_loss(pair[0], weight, pair[1]), in_chunks(hidden, targets))
    return jnp.sum(losses) / targets.size


def chunked_forward(hidden, weight, targets):
    return chunked_cross_entropy(hidden, weight, targets), (hidden, weight, targets)


def chunked_backward(saved, g):
    hidden, weight, targets = saved
    scale = g / targets.size

    def step(dweight, pair):
        h, t = pair
        probs = jax.nn.softmax(h @ weight, axis=-1)
        dlogits = (probs - jax.nn.one_hot(t, VOCAB, dtype=h.dtype)) * scale
        dweight = dweight + h.T @ dlogits
        return dweight, dlogits @ weight.T

    dweight, dhidden = jax.lax.scan(step, jnp.zeros_like(weight), in_chunks(hidden, targets))
    return dhidden.reshape(hidden.shape), dweight, None


chunked_cross_entropy.defvjp(chunked_forward, chunked_backward)


def layer_norm(x, scale, bias):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean(x * x, axis=-1, keepdims=True) - mean**2
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def hidden_states(params, tokens):
    x = jnp.take(params["embed"], tokens, axis=0)
    length = x.shape[1]
    averaging = jnp.tril(jnp.ones((length, length), x.dtype)) / jnp.arange(1, length + 1)[:, None]
    history = jnp.einsum("st,btd->bsd", averaging, x)
    w_now, w_past = jnp.split(params["mix_w"], 2)
    h = jax.nn.gelu(x @ w_now + history @ w_past + params["mix_b"])
    normed = layer_norm(h, params["norm_scale"], params["norm_bias"])
    return x + normed @ params["down_w"] + params["down_b"]


def loss_fn(params, tokens, targets):
    hidden = hidden_states(params, tokens).reshape(-1, DIM)
    return chunked_cross_entropy(hidden, params["head"], targets.reshape(-1))


def right():
    shapes = {
        "embed": (VOCAB, DIM),
        "mix_w": (2 * DIM, HIDDEN),
        "mix_b": (HIDDEN,),
        "norm_scale": (HIDDEN,),
        "norm_bias": (HIDDEN,),
        "down_w": (HIDDEN, DIM),
        "down_b": (DIM,),
        "head": (DIM, VOCAB),
    }
    keys = jax.random.split(jax.random.key(50), len(shapes))
    params = {n: 0.2 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items())}
    params["norm_scale"] = 1.0 + params["norm_scale"]
    tokens, targets = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(loss_fn, params, tokens, targets)
