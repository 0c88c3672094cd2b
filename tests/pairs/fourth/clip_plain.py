"""A CLIP-like two-tower model with a momentum image tower: PyTorch against plain JAX."""
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

VOCAB, CONTEXT, WIDTH, HEADS, EMBED = 30, 8, 16, 2, 16
IMAGE, PATCH, BATCH = 12, 4, 6
GRID = IMAGE // PATCH
EMA, DISTILL = 0.9, 0.5
LR, BETAS, ADAM_EPS, DECAY = 5e-4, (0.9, 0.98), 1e-6, 0.2


def make_batch():
    rng = np.random.default_rng(2)
    images = rng.normal(size=(BATCH, 3, IMAGE, IMAGE)).astype(np.float32)
    tokens = rng.integers(1, VOCAB - 1, size=(BATCH, CONTEXT))
    for row, length in enumerate((8, 5, 6, 4, 7, 5)):
        tokens[row, length - 1] = VOCAB - 1  # end of text: the largest id
        tokens[row, length:] = 0
    return images, tokens


# ---------------------------------------------------------------- PyTorch


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 2 * width)
        self.gelu = QuickGELU()
        self.c_proj = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class VisualTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH, bias=False)
        self.positional_embedding = nn.Parameter(0.1 * torch.randn(GRID * GRID, WIDTH))
        self.ln_pre = nn.LayerNorm(WIDTH)
        self.mlp = MLP(WIDTH)
        self.ln_post = nn.LayerNorm(WIDTH)
        self.proj = nn.Parameter(WIDTH**-0.5 * torch.randn(WIDTH, EMBED))

    def forward(self, x):
        x = self.conv1(x)
        x = x.flatten(2).permute(0, 2, 1)
        x = x + self.positional_embedding
        x = x + self.mlp(self.ln_pre(x))
        x = self.ln_post(x.mean(dim=1))
        return x @ self.proj


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.positional_embedding = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP(WIDTH)
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(WIDTH**-0.5 * torch.randn(WIDTH, EMBED))
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False, attn_mask=self.attn_mask)[0]
        x = x + self.mlp(self.ln_2(x))
        x = self.ln_final(x)
        x = x[torch.arange(x.shape[0]), text.argmax(dim=-1)]
        return x @ self.text_projection


class MomentumCLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = VisualTower()
        self.text = TextTower()
        self.predictor = nn.Linear(EMBED, EMBED)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        self.target_visual = VisualTower()
        for p in self.target_visual.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def target_features(self, images):
        online = dict(self.visual.named_parameters())
        averaged = {
            name: EMA * p + (1 - EMA) * online[name]
            for name, p in self.target_visual.named_parameters()
        }
        return torch.func.functional_call(self.target_visual, averaged, (images,))

    def forward(self, images, text):
        image_raw = self.visual(images)
        image_features = F.normalize(image_raw, dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        labels = torch.arange(images.shape[0])
        loss_image = F.cross_entropy(logits_per_image, labels)
        loss_text = F.cross_entropy(logits_per_image.t(), labels)
        contrastive = (loss_image + loss_text) / 2
        target = self.target_features(images)
        agreement = F.cosine_similarity(self.predictor(image_raw), target, dim=-1)
        return contrastive + DISTILL * (1 - agreement).mean()


def left():
    torch.manual_seed(0)
    model = MomentumCLIP()
    trainable = [p for p in model.parameters() if p.requires_grad]
    gain_or_bias = [p for p in trainable if p.ndim < 2]
    rest = [p for p in trainable if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": gain_or_bias, "weight_decay": 0.0}, {"params": rest, "weight_decay": DECAY}],
        lr=LR, betas=BETAS, eps=ADAM_EPS,
    )
    images, tokens = make_batch()

    def loss_fn(images, tokens):
        return model(images, tokens)

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(tokens), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- JAX, no library


def init_dense(rng, fan_in, fan_out):
    return {"w": jnp.asarray(rng.normal(size=(fan_in, fan_out)) * fan_in**-0.5), "b": jnp.zeros(fan_out)}


def init_norm():
    return {"g": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}


def init_image(rng):
    return {
        "patch": jnp.asarray(rng.normal(size=(PATCH, PATCH, 3, WIDTH)) * 0.1),
        "pos": jnp.asarray(rng.normal(size=(GRID * GRID, WIDTH)) * 0.1),
        "norm_in": init_norm(),
        "fc1": init_dense(rng, WIDTH, 2 * WIDTH),
        "fc2": init_dense(rng, 2 * WIDTH, WIDTH),
        "norm_out": init_norm(),
        "proj": jnp.asarray(rng.normal(size=(WIDTH, EMBED)) * WIDTH**-0.5),
    }


def init_text(rng):
    return {
        "tok": jnp.asarray(rng.normal(size=(VOCAB, WIDTH))),
        "pos": jnp.asarray(rng.normal(size=(CONTEXT, WIDTH)) * 0.1),
        "norm1": init_norm(),
        "query": init_dense(rng, WIDTH, WIDTH),
        "key": init_dense(rng, WIDTH, WIDTH),
        "value": init_dense(rng, WIDTH, WIDTH),
        "merge": init_dense(rng, WIDTH, WIDTH),
        "norm2": init_norm(),
        "fc1": init_dense(rng, WIDTH, 2 * WIDTH),
        "fc2": init_dense(rng, 2 * WIDTH, WIDTH),
        "norm_out": init_norm(),
        "proj": jnp.asarray(rng.normal(size=(WIDTH, EMBED)) * WIDTH**-0.5),
    }


def dense(p, x):
    return x @ p["w"] + p["b"]


def layer_norm(p, x, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    inv = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps)
    return centred * inv * p["g"] + p["b"]


def feed_forward(p, x):
    hidden = dense(p["fc1"], x)
    hidden = hidden * jax.nn.sigmoid(1.702 * hidden)
    return dense(p["fc2"], hidden)


def encode_image(p, images):
    b = images.shape[0]
    patches = images.reshape(b, 3, GRID, PATCH, GRID, PATCH)
    x = jnp.einsum("bcipjq,pqcd->bijd", patches, p["patch"]).reshape(b, GRID * GRID, WIDTH)
    x = x + p["pos"]
    x = x + feed_forward(p, layer_norm(p["norm_in"], x))
    pooled = layer_norm(p["norm_out"], jnp.mean(x, axis=1))
    return pooled @ p["proj"]


def causal_attention(p, x):
    def heads(name):
        y = dense(p[name], x)
        return y.reshape(*y.shape[:-1], HEADS, WIDTH // HEADS)

    q, k, v = heads("query"), heads("key"), heads("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
    visible = jnp.arange(CONTEXT)[:, None] >= jnp.arange(CONTEXT)[None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return dense(p["merge"], mixed.reshape(x.shape))


def encode_text(p, tokens):
    x = p["tok"][tokens] + p["pos"]
    x = x + causal_attention(p, layer_norm(p["norm1"], x))
    x = x + feed_forward(p, layer_norm(p["norm2"], x))
    x = layer_norm(p["norm_out"], x)
    end = jnp.argmax(tokens, axis=-1)
    pooled = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
    return pooled @ p["proj"]


def unit(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))


def clip_loss(params, images, tokens):
    z_raw = encode_image(params["image"], images)
    z_img = unit(z_raw)
    z_txt = unit(encode_text(params["text"], tokens))
    logits = jnp.exp(params["log_temp"]) * jnp.einsum("id,jd->ij", z_img, z_txt)
    rows = jnp.diagonal(jax.nn.log_softmax(logits, axis=1))
    cols = jnp.diagonal(jax.nn.log_softmax(logits, axis=0))
    contrastive = -0.5 * (jnp.mean(rows) + jnp.mean(cols))

    ema = jax.tree.map(lambda t, o: EMA * t + (1 - EMA) * o, params["ema_image"], params["image"])
    goal = jax.lax.stop_gradient(unit(encode_image(ema, images)))
    guess = unit(dense(params["guess"], z_raw))
    return contrastive + DISTILL * jnp.mean(1 - jnp.sum(guess * goal, axis=-1))


class AdamState(NamedTuple):
    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


def adam_direction(b1, b2, eps):
    def init(params):
        return AdamState(
            jnp.zeros([], jnp.int32),
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(jnp.zeros_like, params),
        )

    def update(grads, state, params=None):
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        c1, c2 = 1 - b1**count, 1 - b2**count
        step = jax.tree.map(lambda m, v: (m / c1) / (jnp.sqrt(v / c2) + eps), mu, nu)
        return step, AdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def decay_mask(params):
    mask = jax.tree.map(lambda p: p.ndim >= 2, params)
    mask["ema_image"] = jax.tree.map(lambda p: False, params["ema_image"])
    return mask


def right():
    rng = np.random.default_rng(9)
    params = {
        "image": init_image(rng),
        "text": init_text(rng),
        "guess": init_dense(rng, EMBED, EMBED),
        "log_temp": jnp.asarray(math.log(1 / 0.07)),
        "ema_image": init_image(rng),
    }
    images, tokens = make_batch()
    optimizer = optax.chain(
        adam_direction(*BETAS, ADAM_EPS),
        optax.add_decayed_weights(DECAY, mask=decay_mask),
        optax.scale(-LR),
    )
    return stablenum_jax.program(clip_loss, params, images, tokens, optimizer=optimizer)
