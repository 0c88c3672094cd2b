"""A small gated linear recurrence language model (Griffin / RG-LRU) with truncated
back-propagation: PyTorch (loop over time) and plain JAX (stacked layers, scans)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

VOCAB, DIM, WIDTH, KERNEL, LAYERS, LENGTH, CHUNK = 36, 24, 32, 4, 2, 16, 8
C = 8.0


def make_batch():
    rng = np.random.default_rng(23)
    tokens = rng.integers(0, VOCAB, size=(4, LENGTH + 1)).astype(np.int64)
    return (tokens,)


# ---------------------------------------------------------------- PyTorch

class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * (1 + self.scale)


class RGLRU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a_param = nn.Parameter(torch.empty(width))
        self.input_gate = nn.Linear(width, width)
        self.a_gate = nn.Linear(width, width)
        nn.init.uniform_(self.a_param, -4.0, -1.0)

    def forward(self, x):
        gate_x = torch.sigmoid(self.input_gate(x))
        gate_a = torch.sigmoid(self.a_gate(x))
        log_a = -C * gate_a * F.softplus(self.a_param)
        a = torch.exp(log_a)
        multiplier = torch.sqrt(1 - torch.exp(2 * log_a))
        u = multiplier * (gate_x * x)
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            if t % CHUNK == 0:
                h = h.detach()
            h = a[:, t] * h + u[:, t]
            states.append(h)
        return torch.stack(states, dim=1)


class RecurrentBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = GemmaRMSNorm(DIM)
        self.linear_y = nn.Linear(DIM, WIDTH)
        self.linear_x = nn.Linear(DIM, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH, padding=KERNEL - 1)
        self.rg_lru = RGLRU(WIDTH)
        self.linear_out = nn.Linear(WIDTH, DIM)

    def forward(self, inputs):
        x = self.norm(inputs)
        y = F.gelu(self.linear_y(x), approximate="tanh")
        x = self.linear_x(x)
        x = self.conv(x.transpose(1, 2))[..., : inputs.shape[1]].transpose(1, 2)
        x = self.rg_lru(x)
        return inputs + self.linear_out(x * y)


class GriffinLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedder = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(LAYERS))
        self.final_norm = GemmaRMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedder(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.final_norm(x))
        return 30.0 * torch.tanh(logits / 30.0)


def left():
    torch.manual_seed(0)
    model = GriffinLM()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4, alpha=0.99, eps=1e-8, momentum=0.9, weight_decay=1e-3)
    (tokens,) = make_batch()

    def loss_fn(tokens):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])

    return stablenum_torch.program(loss_fn, torch.tensor(tokens), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- plain JAX

def init_params(key):
    keys = iter(jax.random.split(key, 16))
    dense = lambda *shape: jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
    L = LAYERS
    return {
        "embedding": jax.random.normal(next(keys), (VOCAB, DIM)),
        "layers": {
            "norm": jnp.zeros((L, DIM)),
            "w_branch": dense(L, DIM, WIDTH), "b_branch": jnp.zeros((L, WIDTH)),
            "w_in": dense(L, DIM, WIDTH), "b_in": jnp.zeros((L, WIDTH)),
            "conv_w": dense(L, KERNEL, WIDTH), "conv_b": jnp.zeros((L, WIDTH)),
            "w_gate_x": dense(L, WIDTH, WIDTH), "b_gate_x": jnp.zeros((L, WIDTH)),
            "w_gate_a": dense(L, WIDTH, WIDTH), "b_gate_a": jnp.zeros((L, WIDTH)),
            "a_param": jax.random.uniform(next(keys), (L, WIDTH), minval=-4.0, maxval=-1.0),
            "w_out": dense(L, WIDTH, DIM), "b_out": jnp.zeros((L, DIM)),
        },
        "final_norm": jnp.zeros(DIM),
        "head": dense(DIM, VOCAB),
    }


def rms_norm(x, scale):
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + 1e-6) * (1.0 + scale)


def causal_conv(x, weight, bias):
    padded = jnp.pad(x, ((0, 0), (KERNEL - 1, 0), (0, 0)))
    taps = [padded[:, i:i + x.shape[1]] * weight[i] for i in range(KERNEL)]
    return sum(taps) + bias


def combine(earlier, later):
    a1, b1 = earlier
    a2, b2 = later
    return a1 * a2, a2 * b1 + b2


def linear_recurrence(a, u):
    """h[t] = a[t] * h[t-1] + u[t], in chunks; no gradient through the chunk borders."""
    carry = jnp.zeros_like(u[:, 0])
    outputs = []
    for start in range(0, u.shape[1], CHUNK):
        decay, inner = jax.lax.associative_scan(combine, (a[:, start:start + CHUNK], u[:, start:start + CHUNK]), axis=1)
        h = decay * carry[:, None] + inner
        carry = jax.lax.stop_gradient(h[:, -1])
        outputs.append(h)
    return jnp.concatenate(outputs, axis=1)


def rg_lru(x, p):
    gate_x = jax.nn.sigmoid(x @ p["w_gate_x"] + p["b_gate_x"])
    gate_a = jax.nn.sigmoid(x @ p["w_gate_a"] + p["b_gate_a"])
    log_a = -C * jax.nn.softplus(p["a_param"]) * gate_a
    beta = jnp.sqrt(-jnp.expm1(2.0 * log_a))
    return linear_recurrence(jnp.exp(log_a), gate_x * x * beta)


def block(x, p):
    h = rms_norm(x, p["norm"])
    branch = jax.nn.gelu(h @ p["w_branch"] + p["b_branch"])
    h = causal_conv(h @ p["w_in"] + p["b_in"], p["conv_w"], p["conv_b"])
    h = rg_lru(h, p) * branch
    return x + h @ p["w_out"] + p["b_out"], None


def forward(params, tokens):
    x = jnp.take(params["embedding"], tokens, axis=0)
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = rms_norm(x, params["final_norm"]) @ params["head"]
    return jnp.tanh(logits / 30.0) * 30.0


def right():
    params = init_params(jax.random.key(0))
    (tokens,) = make_batch()
    optimizer = optax.chain(
        optax.add_decayed_weights(1e-3),
        optax.rmsprop(5e-4, decay=0.99, eps=1e-8, eps_in_sqrt=False, momentum=0.9),
    )

    def loss_fn(params, tokens):
        logits = forward(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return stablenum_jax.program(loss_fn, params, tokens, optimizer=optimizer)
