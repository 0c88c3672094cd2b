"""Token mixture of SwiGLU experts (top-2), load-balancing and z loss, RMSprop."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

DIM, FFN, EXPERTS, TOP_K, CLASSES = 16, 12, 4, 2, 5
BALANCE_COEF, Z_COEF = 0.05, 0.001


def make_batch():
    rng = np.random.default_rng(13)
    x = rng.normal(size=(3, 8, DIM)).astype(np.float32)
    y = rng.integers(0, CLASSES, size=(3,)).astype(np.int32)
    return x, y


# ---------------------------------------------------------------- PyTorch


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Expert(nn.Module):
    def __init__(self, dim, ffn):
        super().__init__()
        self.w_in = nn.Linear(dim, 2 * ffn, bias=False)
        self.w_out = nn.Linear(ffn, dim, bias=False)

    def forward(self, x):
        gate, up = self.w_in(x).chunk(2, dim=-1)
        return self.w_out(F.silu(gate) * up)


class MoE(nn.Module):
    def __init__(self, dim, ffn, num_experts, top_k):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, ffn) for _ in range(num_experts))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        probs = F.softmax(logits, dim=-1)
        weights, selected = torch.topk(probs, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, slot = torch.where(selected == i)
            out.index_add_(0, rows, weights[rows, slot, None] * expert(tokens[rows]))

        counts = torch.bincount(selected.flatten(), minlength=self.num_experts)
        fraction = counts / tokens.shape[0]
        balance = self.num_experts * (fraction * probs.mean(dim=0)).sum()
        z_loss = torch.logsumexp(logits, dim=-1).square().mean()
        return out.view_as(x), BALANCE_COEF * balance + Z_COEF * z_loss


class MoEClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.norm1 = RMSNorm(DIM)
        self.moe = MoE(DIM, FFN, EXPERTS, TOP_K)
        self.norm2 = RMSNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h = self.inp(x)
        y, aux = self.moe(self.norm1(h))
        h = self.norm2(h + y)
        return self.head(h.mean(dim=1)), aux


# ---------------------------------------------------------------- JAX


def init_params(key):
    k = jax.random.split(key, 5)
    normal = lambda key, *shape: 0.2 * jax.random.normal(key, shape)
    return {
        "input": {"w": normal(k[0], DIM, DIM), "b": jnp.zeros(DIM)},
        "norm1": jnp.ones(DIM),
        "router": normal(k[1], DIM, EXPERTS),
        "experts": {"w_in": normal(k[2], EXPERTS, DIM, 2 * FFN), "w_out": normal(k[3], EXPERTS, FFN, DIM)},
        "norm2": jnp.ones(DIM),
        "head": {"w": normal(k[4], DIM, CLASSES), "b": jnp.zeros(CLASSES)},
    }


def rms_norm(scale, x):
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return scale * (x / jnp.sqrt(mean_square + 1e-6))


def expert(p, tokens):
    hidden = tokens @ p["w_in"]
    gate, value = hidden[..., :FFN], hidden[..., FFN:]
    return (jax.nn.silu(gate) * value) @ p["w_out"]


def route(router, tokens):
    """Returns combine weights (tokens, experts) and the auxiliary loss."""
    scores = tokens @ router
    log_z = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    probs = jnp.exp(scores - log_z)
    top, index = jax.lax.top_k(probs, TOP_K)
    top = top / jnp.sum(top, axis=-1, keepdims=True)
    dispatch = jax.nn.one_hot(index, EXPERTS, dtype=probs.dtype)
    combine = jnp.einsum("nk,nke->ne", top, dispatch)
    load = jax.lax.stop_gradient(jnp.mean(jnp.sum(dispatch, axis=1), axis=0))
    importance = jnp.mean(probs, axis=0)
    balance = EXPERTS * jnp.dot(load, importance)
    return combine, BALANCE_COEF * balance + Z_COEF * jnp.mean(log_z**2)


def moe_layer(params, x):
    tokens = x.reshape(-1, x.shape[-1])
    combine, aux = route(params["router"], tokens)
    outputs = jax.vmap(expert, in_axes=(0, None))(params["experts"], tokens)
    return jnp.einsum("ne,end->nd", combine, outputs).reshape(x.shape), aux


def classify(params, x):
    h = x @ params["input"]["w"] + params["input"]["b"]
    y, aux = moe_layer(params, rms_norm(params["norm1"], h))
    h = rms_norm(params["norm2"], h + y)
    return jnp.mean(h, axis=1) @ params["head"]["w"] + params["head"]["b"], aux


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = MoEClassifier()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.99, eps=1e-8, momentum=0.9)
    x, y = make_batch()

    def loss_fn(x, y):
        logits, aux = model(x)
        return F.cross_entropy(logits, y) + aux

    return stablenum_torch.program(loss_fn, torch.tensor(x), torch.tensor(y).long(), model=model, optimizer=optimizer)


def right():
    params = init_params(jax.random.key(2))
    optimizer = optax.rmsprop(1e-3, decay=0.99, eps=1e-8, momentum=0.9, eps_in_sqrt=False)
    x, y = make_batch()

    def loss_fn(params, x, y):
        logits, aux = classify(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.mean(losses) + aux

    return stablenum_jax.program(loss_fn, params, x, y, optimizer=optimizer)
