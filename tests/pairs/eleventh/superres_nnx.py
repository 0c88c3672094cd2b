"""Super-resolution by two (EDSR with channel attention): NCHW modules in PyTorch, NHWC in flax.nnx."""

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

FEATURES, BLOCKS, SQUEEZE, UPSCALE = 12, 2, 4, 2
RES_SCALE, SHAVE, CHARBONNIER = 0.1, 2, 1e-2
LR, MOMENTUM, DECAY, CLIP = 0.05, 0.9, 1e-3, 0.02
RGB_MEAN = (0.45, 0.44, 0.40)


def make_batch():
    rng = np.random.default_rng(12)
    coarse = rng.random((2, 3, 5, 5))
    high = np.kron(coarse, np.ones((4, 4))) + 0.1 * rng.normal(size=(2, 3, 20, 20))
    high = np.clip(high, 0, 1)
    low = high.reshape(2, 3, 10, 2, 10, 2).mean((3, 5))
    return low.astype(np.float32), high.astype(np.float32)


# ---------------------------------------------------------------- PyTorch


class ChannelAttention(nn.Module):
    def __init__(self, channels, reduction):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, channels // reduction, 1)
        self.excite = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x):
        gate = F.relu(self.squeeze(self.pool(x)))
        return x * torch.sigmoid(self.excite(gate))


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.attention = ChannelAttention(channels, SQUEEZE)

    def forward(self, x):
        res = self.conv2(F.relu(self.conv1(x)))
        res = self.attention(res).mul(RES_SCALE)
        return res + x


class EDSR(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(RGB_MEAN).view(1, 3, 1, 1))
        self.head = nn.Conv2d(3, FEATURES, 3, padding=1, padding_mode="reflect")
        self.body = nn.Sequential(*[ResBlock(FEATURES) for _ in range(BLOCKS)])
        self.body_end = nn.Conv2d(FEATURES, FEATURES, 3, padding=1)
        self.upsample = nn.Sequential(
            nn.Conv2d(FEATURES, FEATURES * UPSCALE**2, 3, padding=1),
            nn.PixelShuffle(UPSCALE),
        )
        self.tail = nn.Conv2d(FEATURES, 3, 3, padding=1)

    def forward(self, low):
        shallow = self.head(low - self.mean)
        deep = self.body_end(self.body(shallow)) + shallow
        detail = self.tail(self.upsample(deep))
        return detail + F.interpolate(low, scale_factor=UPSCALE, mode="bilinear", align_corners=False)


class CharbonnierLoss(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, prediction, target):
        return torch.sqrt((prediction - target) ** 2 + self.eps**2).mean()


def make_sgd(model):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
    optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_value_(model.parameters(), CLIP)
    )
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def conv(n_in, n_out, size, rngs, padding="SAME"):
    return nnx.Conv(n_in, n_out, (size, size), padding=padding, rngs=rngs)


class Gate(nnx.Module):
    def __init__(self, channels, rngs):
        self.down = nnx.Linear(channels, channels // SQUEEZE, rngs=rngs)
        self.up = nnx.Linear(channels // SQUEEZE, channels, rngs=rngs)

    def __call__(self, x):
        pooled = jnp.mean(x, axis=(1, 2))
        weights = nnx.sigmoid(self.up(nnx.relu(self.down(pooled))))
        return x * weights[:, None, None, :]


class Block(nnx.Module):
    def __init__(self, channels, rngs):
        self.first = conv(channels, channels, 3, rngs)
        self.second = conv(channels, channels, 3, rngs)
        self.gate = Gate(channels, rngs)

    def __call__(self, x):
        y = nnx.relu(self.first(x))
        y = self.gate(self.second(y))
        return x + RES_SCALE * y


def depth_to_space(x, r):
    b, h, w, c = x.shape
    x = x.reshape(b, h, w, c // r**2, r, r)
    x = x.transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(b, h * r, w * r, c // r**2)


class Upscaler(nnx.Module):
    def __init__(self, rngs):
        self.entry = conv(3, FEATURES, 3, rngs, padding="REFLECT")
        self.blocks = nnx.List([Block(FEATURES, rngs) for _ in range(BLOCKS)])
        self.merge = conv(FEATURES, FEATURES, 3, rngs)
        self.expand = conv(FEATURES, FEATURES * UPSCALE**2, 3, rngs)
        self.to_rgb = conv(FEATURES, 3, 3, rngs)

    def __call__(self, images):
        b, h, w, c = images.shape
        features = x = self.entry(images - jnp.array(RGB_MEAN))
        for block in self.blocks:
            x = block(x)
        x = features + self.merge(x)
        x = self.to_rgb(depth_to_space(self.expand(x), UPSCALE))
        base = jax.image.resize(images, (b, UPSCALE * h, UPSCALE * w, c), method="bilinear")
        return base + x


def charbonnier(difference):
    return jnp.mean(jnp.sqrt(jnp.square(difference) + CHARBONNIER**2))


def make_optimizer():
    schedule = optax.exponential_decay(LR, transition_steps=100, decay_rate=0.5, staircase=True)
    return optax.chain(
        optax.clip(CLIP),
        optax.add_decayed_weights(DECAY),
        optax.sgd(schedule, momentum=MOMENTUM, nesterov=True),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = EDSR()
    criterion = CharbonnierLoss(CHARBONNIER)
    low, high = make_batch()

    def loss_fn(low, high):
        output = model(low)
        inner = (..., slice(SHAVE, -SHAVE), slice(SHAVE, -SHAVE))
        return criterion(output[inner], high[inner])

    return stablenum_torch.program(
        loss_fn, torch.from_numpy(low), torch.from_numpy(high), model=model, optimizer=make_sgd(model)
    )


def right():
    graphdef, params = nnx.split(Upscaler(nnx.Rngs(5)), nnx.Param)
    low, high = (jnp.asarray(a.transpose(0, 2, 3, 1)) for a in make_batch())

    def loss_fn(params, low, high):
        restored = nnx.merge(graphdef, params)(low)
        difference = restored - high
        return charbonnier(difference[:, SHAVE:-SHAVE, SHAVE:-SHAVE])

    return stablenum_jax.program(loss_fn, params, low, high, optimizer=make_optimizer())
