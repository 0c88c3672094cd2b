"""ConvNeXt on small images: the official PyTorch code (NCHW), a port to flax.nnx (NHWC)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

CLASSES, SIZE, PATCH = 7, 20, 4
DEPTHS, DIMS = (2, 1), (10, 16)
LR, DECAY, WARMUP = 4e-3, 0.05, 4


def make_batch():
    rng = np.random.default_rng(11)
    images = rng.normal(size=(4, 3, SIZE, SIZE)).astype(np.float32)
    return images, rng.integers(0, CLASSES, 4).astype(np.int32)


# ---------------------------------------------------------------- PyTorch


class LayerNorm2d(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = torch.rand(x.shape[0], 1, 1, 1) >= self.p
        return x * keep / (1 - self.p)


class Block(nn.Module):
    def __init__(self, dim, drop_path=0.0, layer_scale_init_value=0.3):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale_init_value * torch.ones(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.act(self.pwconv1(x))
        x = self.pwconv2(x)
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + self.drop_path(x)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        self.downsample_layers.append(
            nn.Sequential(nn.Conv2d(3, DIMS[0], kernel_size=PATCH, stride=PATCH), LayerNorm2d(DIMS[0]))
        )
        for i in range(1, len(DIMS)):
            self.downsample_layers.append(
                nn.Sequential(LayerNorm2d(DIMS[i - 1]), nn.Conv2d(DIMS[i - 1], DIMS[i], kernel_size=2, stride=2))
            )
        self.stages = nn.ModuleList(
            nn.Sequential(*(Block(dim) for _ in range(depth))) for dim, depth in zip(DIMS, DEPTHS)
        )
        self.norm = nn.LayerNorm(DIMS[-1], eps=1e-6)
        self.head = nn.Linear(DIMS[-1], CLASSES)

    def forward_features(self, x):
        for downsample, stage in zip(self.downsample_layers, self.stages):
            x = downsample(x)
            x = stage(x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        return self.head(self.forward_features(x))


def get_parameter_groups(model):
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        if param.ndim == 1 or name.endswith(".bias"):
            no_decay.append(param)
        else:
            decay.append(param)
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": DECAY}]


# ---------------------------------------------------------------- JAX


@jax.custom_vjp
def gelu(x):
    """GELU that keeps its input only."""
    return 0.5 * x * (1.0 + jax.lax.erf(x / np.sqrt(2.0)))


def gelu_fwd(x):
    return gelu(x), x


def gelu_bwd(x, g):
    cdf = 0.5 * (1.0 + jax.lax.erf(x / np.sqrt(2.0)))
    pdf = jnp.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)
    return (g * (cdf + x * pdf),)


gelu.defvjp(gelu_fwd, gelu_bwd)


class ConvNeXtBlock(nnx.Module):
    def __init__(self, dim, *, drop_path=0.0, rngs):
        self.depthwise = nnx.Conv(dim, dim, (7, 7), feature_group_count=dim, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.expand = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.project = nnx.Linear(4 * dim, dim, rngs=rngs)
        self.layer_scale = nnx.Param(jnp.full((dim,), 0.3))
        self.stochastic_depth = nnx.Dropout(drop_path, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x):
        y = self.layer_norm(self.depthwise(x))
        y = self.project(gelu(self.expand(y)))
        y = y * self.layer_scale[...]
        return x + self.stochastic_depth(y)


class Downsample(nnx.Module):
    def __init__(self, dim_in, dim_out, *, rngs):
        self.layer_norm = nnx.LayerNorm(dim_in, rngs=rngs)
        self.conv = nnx.Conv(dim_in, dim_out, (2, 2), strides=2, padding="VALID", rngs=rngs)

    def __call__(self, x):
        return self.conv(self.layer_norm(x))


class PatchStem(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.proj = nnx.Linear(PATCH * PATCH * 3, dim, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, x):
        b, h, w, c = x.shape
        patches = x.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c)
        patches = patches.transpose(0, 1, 3, 5, 2, 4).reshape(b, h // PATCH, w // PATCH, -1)
        return self.layer_norm(self.proj(patches))


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.stem = PatchStem(DIMS[0], rngs=rngs)
        self.stage0 = nnx.List([ConvNeXtBlock(DIMS[0], rngs=rngs) for _ in range(DEPTHS[0])])
        self.down = Downsample(DIMS[0], DIMS[1], rngs=rngs)
        self.stage1 = nnx.List([ConvNeXtBlock(DIMS[1], rngs=rngs) for _ in range(DEPTHS[1])])
        self.final_norm = nnx.LayerNorm(DIMS[1], rngs=rngs)
        self.classifier = nnx.Linear(DIMS[1], CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.stage0:
            x = block(x)
        x = self.down(x)
        for block in self.stage1:
            x = block(x)
        x = jnp.mean(x, axis=(1, 2))
        x = self.final_norm(x)
        return self.classifier(x)


def make_optimizer():
    schedule = optax.linear_schedule(LR / WARMUP, LR, WARMUP - 1)
    decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    return optax.adamw(schedule, weight_decay=DECAY, mask=decayed)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = ConvNeXt()
    images, labels = make_batch()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(get_parameter_groups(model), lr=LR)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, (it + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: warmup.step())

    def loss_fn(images, labels):
        return criterion(model(images), labels)

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(labels).long(), model=model, optimizer=optimizer
    )


def right():
    images, labels = make_batch()
    model = Network(rngs=nnx.Rngs(4))

    def loss_fn(model, images, labels):
        logits = model(images)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()

    return stablenum_jax.program(
        loss_fn,
        model,
        jnp.asarray(images).transpose(0, 2, 3, 1),
        jnp.asarray(labels),
        optimizer=make_optimizer(),
    )
