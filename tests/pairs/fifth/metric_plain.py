"""Contrastive + regression + adversarial model with an EMA target encoder: PyTorch original, plain JAX port."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import jax
import jax.numpy as jnp
import optax

import stablenum_jax
import stablenum_torch

INPUT, WIDTH, EMBED, DOMAINS, DEPTH = 10, 24, 14, 3, 2
LAMBDA, BETA = 0.3, 0.5


def make_batch():
    rng = np.random.default_rng(13)
    base = rng.normal(size=(8, INPUT))
    view_a = (base + 0.3 * rng.normal(size=base.shape)).astype(np.float32)
    view_b = (base + 0.3 * rng.normal(size=base.shape)).astype(np.float32)
    score = rng.normal(size=(8,)).astype(np.float32)
    domain = rng.integers(0, DOMAINS, size=(8,)).astype(np.int64)
    return view_a, view_b, score, domain


# ---------------------------------------------------------------- PyTorch

class Norm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.offset = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.gain * (x - mean) / torch.sqrt(var + self.eps) + self.offset


class ResidualBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = Norm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(F.silu(self.fc1(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.Sequential(*[ResidualBlock(WIDTH) for _ in range(DEPTH)])
        self.norm = Norm(WIDTH)
        self.proj = nn.Linear(WIDTH, EMBED)

    def forward(self, x):
        return self.proj(self.norm(self.blocks(self.stem(x))))


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lambd):
        ctx.lambd = lambd
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.lambd * grad_output, None


class MetricNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = Encoder()
        self.target = copy.deepcopy(self.online)
        self.predictor = nn.Sequential(nn.Linear(EMBED, WIDTH), nn.ReLU(), nn.Linear(WIDTH, EMBED))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))
        self.score_head = nn.Linear(EMBED, 1)
        self.domain_head = nn.Linear(EMBED, DOMAINS)
        with torch.no_grad():
            for p in self.target.parameters():  # as after some EMA updates
                p.add_(0.05 * torch.randn_like(p))
        for p in self.target.parameters():
            p.requires_grad_(False)

    def forward(self, a, b):
        z = self.online(a)
        query = F.normalize(self.predictor(z), dim=-1)
        with torch.no_grad():
            key = F.normalize(self.target(b), dim=-1)
        logits = self.logit_scale.exp() * query @ key.t()
        score = self.score_head(z).squeeze(-1)
        domain = self.domain_head(GradReverse.apply(z, LAMBDA))
        return logits, score, domain


def left():
    torch.manual_seed(0)
    model = MetricNet()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)
    a, b, score, domain = make_batch()

    def loss_fn(a, b, score, domain):
        logits, score_pred, domain_pred = model(a, b)
        labels = torch.arange(len(logits), device=logits.device)
        nce = 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))
        regression = F.smooth_l1_loss(score_pred, score, beta=BETA)
        adversary = F.cross_entropy(domain_pred, domain)
        return nce + 0.5 * regression + adversary

    return stablenum_torch.program(
        loss_fn, *(torch.tensor(v) for v in (a, b, score, domain)), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX

def dense_init(key, fan_in, fan_out):
    return {"w": jax.random.normal(key, (fan_in, fan_out)) * fan_in ** -0.5, "b": jnp.zeros(fan_out)}


def norm_init(size):
    return {"g": jnp.ones(size), "b": jnp.zeros(size)}


def encoder_init(key):
    keys = jax.random.split(key, 2 + 2 * DEPTH)
    return {
        "stem": dense_init(keys[0], INPUT, WIDTH),
        "blocks": [{"ln": norm_init(WIDTH),
                    "up": dense_init(keys[2 + 2 * i], WIDTH, 2 * WIDTH),
                    "down": dense_init(keys[3 + 2 * i], 2 * WIDTH, WIDTH)} for i in range(DEPTH)],
        "ln": norm_init(WIDTH),
        "proj": dense_init(keys[1], WIDTH, EMBED),
    }


def init(key):
    k = jax.random.split(key, 6)
    return {
        "online": encoder_init(k[0]),
        "target": encoder_init(k[1]),
        "predictor": [dense_init(k[2], EMBED, WIDTH), dense_init(k[3], WIDTH, EMBED)],
        "temperature": jnp.zeros(()),
        "score": dense_init(k[4], EMBED, 1),
        "domain": dense_init(k[5], EMBED, DOMAINS),
    }


def dense(p, v):
    return v @ p["w"] + p["b"]


def standardize(p, v):
    """One vector."""
    centred = v - v.mean()
    return centred / jnp.sqrt(jnp.var(v) + 1e-5) * p["g"] + p["b"]


def encode(p, v):
    """One vector; vmapped by the caller."""
    v = dense(p["stem"], v)
    for block in p["blocks"]:
        inner = dense(block["up"], standardize(block["ln"], v))
        v = v + dense(block["down"], jax.nn.swish(inner))
    return dense(p["proj"], standardize(p["ln"], v))


def unit(v):
    return v / jnp.maximum(jnp.linalg.norm(v), 1e-12)


@jax.custom_vjp
def reverse_gradient(v):
    return v


def reverse_gradient_fwd(v):
    return v, None


def reverse_gradient_bwd(_, cotangent):
    return (-LAMBDA * cotangent,)


reverse_gradient.defvjp(reverse_gradient_fwd, reverse_gradient_bwd)


def heads(params, a, b):
    """What one pair of views gives."""
    z = encode(params["online"], a)
    first, second = params["predictor"]
    query = unit(dense(second, jax.nn.relu(dense(first, z))))
    key = jax.lax.stop_gradient(unit(encode(params["target"], b)))
    score = dense(params["score"], z)[0]
    domain = dense(params["domain"], reverse_gradient(z))
    return query, key, score, domain


def loss_fn(params, a, b, score, domain):
    queries, keys, scores, domains = jax.vmap(heads, in_axes=(None, 0, 0))(params, a, b)
    sims = jnp.einsum("ie,je->ij", queries, keys) * jnp.exp(params["temperature"])
    rows = jnp.diag(jax.nn.log_softmax(sims, axis=1))
    cols = jnp.diag(jax.nn.log_softmax(sims, axis=0))
    contrast = -0.5 * (rows.mean() + cols.mean())
    gap = jnp.abs(scores - score)
    regression = jnp.where(gap < BETA, 0.5 * gap ** 2 / BETA, gap - 0.5 * BETA).mean()
    adversary = optax.softmax_cross_entropy_with_integer_labels(domains, domain).mean()
    return contrast + 0.5 * regression + adversary


def labels_of(params):
    return {name: jax.tree.map(lambda _: "frozen" if name == "target" else "trained", part)
            for name, part in params.items()}


def right():
    params = init(jax.random.PRNGKey(0))
    trained = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.05, momentum=0.9, nesterov=True))
    tx = optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels_of)
    return stablenum_jax.program(loss_fn, params, *make_batch(), optimizer=tx)
