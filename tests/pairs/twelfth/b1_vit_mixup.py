"""A small vision transformer trained with mixup: timm-like PyTorch modules against a flax.nnx port."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

IMAGE, PATCH, DIM, HEADS, DEPTH, CLASSES = 16, 4, 16, 4, 2, 6
GRID, POS_GRID = IMAGE // PATCH, 3
LAYER_SCALE, SMOOTHING, LAM = 0.3, 0.1, 0.7
LR, DECAY, CLIP, WARMUP = 0.01, 0.1, 0.25, 5


def make_batch():
    rng = np.random.default_rng(3)
    images = rng.normal(size=(4, 3, IMAGE, IMAGE))
    images[:, :, ::2] += rng.normal(size=(4, 3, 1, 1))
    labels = np.array([2, 0, 5, 3])
    return images.astype(np.float32), labels


# ---------------------------------------------------------------- PyTorch


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.unfold = nn.Unfold(PATCH, stride=PATCH)
        self.proj = nn.Linear(3 * PATCH * PATCH, DIM)

    def forward(self, x):
        return self.proj(self.unfold(x).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(LAYER_SCALE * torch.ones(DIM))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attn = Attention()
        self.ls1 = LayerScale()
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.ls2 = LayerScale()

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(0.2 * torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, POS_GRID**2, DIM))
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def position(self):
        grid = self.pos_embed.reshape(1, POS_GRID, POS_GRID, DIM).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(GRID, GRID), mode="bilinear", align_corners=False)
        return grid.flatten(2).transpose(1, 2)

    def forward(self, x):
        x = self.patch_embed(x) + self.position()
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def mixup_criterion(logits, y_a, y_b, lam):
    criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    return lam * criterion(logits, y_a) + (1 - lam) * criterion(logits, y_b)


def make_adamw(model):
    skip = {"cls_token", "pos_embed"}
    named = list(model.named_parameters())
    decay = [p for n, p in named if p.ndim > 1 and n not in skip]
    plain = [p for n, p in named if p.ndim <= 1 or n in skip]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}], lr=LR
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

    def before_step(*_):
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def patchify(images):
    b, h, w, c = images.shape
    x = images.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c)
    x = x.transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(b, (h // PATCH) * (w // PATCH), c * PATCH * PATCH)


class SelfAttention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(DIM, 3 * DIM, rngs=rngs)
        self.proj = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        b, n, c = x.shape
        fused = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS)
        q, k, v = (fused[:, :, i] for i in range(3))
        return self.proj(nnx.dot_product_attention(q, k, v).reshape(b, n, c))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.fc2 = nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.gelu(self.fc1(x), approximate=False))


class EncoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.attn = SelfAttention(rngs)
        self.gamma1 = nnx.Param(jnp.full((DIM,), LAYER_SCALE))
        self.norm2 = nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(rngs)
        self.gamma2 = nnx.Param(jnp.full((DIM,), LAYER_SCALE))

    def __call__(self, x):
        x = x + self.gamma1[...] * self.attn(self.norm1(x))
        x = x + self.gamma2[...] * self.mlp(self.norm2(x))
        return x


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patch_proj = nnx.Linear(3 * PATCH * PATCH, DIM, rngs=rngs)
        self.cls_token = nnx.Param(0.2 * jax.random.normal(rngs.params(), (1, 1, DIM)))
        self.pos_embed = nnx.Param(0.2 * jax.random.normal(rngs.params(), (1, POS_GRID**2, DIM)))
        self.blocks = nnx.List([EncoderBlock(rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.patch_proj(patchify(images))
        grid = self.pos_embed[...].reshape(1, POS_GRID, POS_GRID, DIM)
        grid = jax.image.resize(grid, (1, GRID, GRID, DIM), method="linear")
        x = x + grid.reshape(1, GRID * GRID, DIM)
        cls = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, DIM))
        x = jnp.concatenate([cls, x], axis=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def soft_targets(labels):
    labels = jax.nn.one_hot(labels, CLASSES)
    targets = LAM * labels + (1 - LAM) * labels[::-1]
    return optax.smooth_labels(targets, SMOOTHING)


def decay_mask(params):
    def decays(path, leaf):
        name = jax.tree_util.keystr(path)
        return leaf.ndim > 1 and "pos_embed" not in name and "cls_token" not in name

    return jax.tree_util.tree_map_with_path(decays, params)


def clip_global_norm(limit):
    def clip(updates, params=None):
        factor = jnp.minimum(1.0, limit / (optax.global_norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates)

    return optax.stateless(clip)


def make_optimizer():
    warmup = optax.linear_schedule(LR / WARMUP, LR, transition_steps=WARMUP - 1)
    return optax.chain(
        clip_global_norm(CLIP),
        optax.adamw(warmup, weight_decay=DECAY, mask=decay_mask),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = VisionTransformer()
    images, labels = make_batch()

    def loss_fn(images, labels):
        mixed = LAM * images + (1 - LAM) * images.flip(0)
        return mixup_criterion(model(mixed), labels, labels.flip(0), LAM)

    return stablenum_torch.program(
        loss_fn, torch.from_numpy(images), torch.from_numpy(labels), model=model, optimizer=make_adamw(model)
    )


def right():
    graphdef, params = nnx.split(ViT(nnx.Rngs(7)), nnx.Param)
    images, labels = make_batch()

    def loss_fn(params, images, labels):
        model = nnx.merge(graphdef, params)
        logits = model(LAM * images + (1 - LAM) * images[::-1])
        return optax.softmax_cross_entropy(logits, soft_targets(labels)).mean()

    return stablenum_jax.program(
        loss_fn, params, jnp.asarray(images.transpose(0, 2, 3, 1)), jnp.asarray(labels), optimizer=make_optimizer()
    )
