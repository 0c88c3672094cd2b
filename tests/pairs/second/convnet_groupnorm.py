"""A residual ConvNet with GroupNorm and a fake-quantized embedding: PyTorch and its port to plain JAX."""
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax
from torch import nn

import stablenum_jax
import stablenum_torch

CLASSES, GROUPS, LEVELS = 5, 4, 16
WIDTHS = (8, 8, 16)


def make_batch():
    rng = np.random.default_rng(41)
    images = rng.normal(size=(3, 3, 16, 16)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=(3,))
    return images, labels


# ---------------------------------------------------------------- PyTorch

class FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * LEVELS) / LEVELS

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if stride > 1 else None

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        skip = x if self.shortcut is None else self.shortcut(x)
        return F.relu(y + skip)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(GROUPS, WIDTHS[0])
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.block1 = ResidualBlock(WIDTHS[0], WIDTHS[1], stride=1)
        self.block2 = ResidualBlock(WIDTHS[1], WIDTHS[2], stride=2)
        self.head = nn.Linear(WIDTHS[2], CLASSES)

    def forward(self, images):
        x = self.stem(images)
        x = F.relu(self.stem_norm(x))
        x = self.pool(x)
        x = self.block1(x)
        x = self.block2(x)
        features = x.mean(dim=(2, 3))
        features = FakeQuantize.apply(features)
        return self.head(features)


def left():
    torch.manual_seed(12)
    model = ConvNet()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                module.weight.add_(0.2 * torch.randn_like(module.weight))
                module.bias.add_(0.2 * torch.randn_like(module.bias))

    def loss_fn(images, labels):
        return F.cross_entropy(model(images), labels)

    images, labels = make_batch()
    return stablenum_torch.program(loss_fn, torch.from_numpy(images), torch.from_numpy(labels), model=model)


# ---------------------------------------------------------------- plain JAX

def init_conv(key, size, inputs, outputs):
    return jax.random.normal(key, (size, size, inputs, outputs)) * (2.0 / (size * size * inputs)) ** 0.5


def init_norm(key, channels):
    scale_key, bias_key = jax.random.split(key)
    scale = 1.0 + 0.2 * jax.random.normal(scale_key, (channels,))
    return {"scale": scale, "bias": 0.2 * jax.random.normal(bias_key, (channels,))}


def init_block(key, inputs, outputs, stride):
    k1, k2, k3, k4, k5 = jax.random.split(key, 5)
    block = {
        "conv1": init_conv(k1, 3, inputs, outputs),
        "norm1": init_norm(k2, outputs),
        "conv2": init_conv(k3, 3, outputs, outputs),
        "norm2": init_norm(k4, outputs),
    }
    if stride > 1:
        block["shortcut"] = init_conv(k5, 1, inputs, outputs)
    return block


def init_params(key):
    k1, k2, k3, k4, k5, k6 = jax.random.split(key, 6)
    return {
        "stem": init_conv(k1, 3, 3, WIDTHS[0]),
        "stem_norm": init_norm(k2, WIDTHS[0]),
        "block1": init_block(k3, WIDTHS[0], WIDTHS[1], 1),
        "block2": init_block(k4, WIDTHS[1], WIDTHS[2], 2),
        "head_w": jax.random.normal(k5, (WIDTHS[2], CLASSES)) * 0.3,
        "head_b": jax.random.normal(k6, (CLASSES,)) * 0.1,
    }


def conv(kernel, x, stride=1):
    pad = kernel.shape[0] // 2
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=dimensions)


def group_norm(norm, x, eps=1e-5):
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height, width, GROUPS, channels // GROUPS)
    axes = (1, 2, 4)
    mean = jnp.mean(grouped, axis=axes, keepdims=True)
    variance = jnp.mean(grouped**2, axis=axes, keepdims=True) - mean**2
    normed = (grouped - mean) * lax.rsqrt(variance + eps)
    return normed.reshape(x.shape) * norm["scale"] + norm["bias"]


def average_pool(x):
    def window_sum(values):
        padding = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lax.reduce_window(values, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), padding)

    return window_sum(x) / 9.0


def fake_quantize(x):
    quantized = jnp.round(x * LEVELS) / LEVELS
    return x + lax.stop_gradient(quantized - x)


def residual_block(block, x, stride):
    y = conv(block["conv1"], x, stride)
    y = jax.nn.relu(group_norm(block["norm1"], y))
    y = conv(block["conv2"], y)
    skip = conv(block["shortcut"], x, stride) if "shortcut" in block else x
    return jax.nn.relu(skip + group_norm(block["norm2"], y))


def forward(params, images):
    x = conv(params["stem"], images)
    x = jax.nn.relu(group_norm(params["stem_norm"], x))
    x = average_pool(x)
    x = residual_block(params["block1"], x, 1)
    x = residual_block(params["block2"], x, 2)
    pooled = fake_quantize(jnp.mean(x, axis=(1, 2)))
    return pooled @ params["head_w"] + params["head_b"]


def loss_fn(params, images, labels):
    log_probs = jax.nn.log_softmax(forward(params, images))
    return -jnp.mean(log_probs[jnp.arange(labels.shape[0]), labels])


def right():
    images, labels = make_batch()
    params = init_params(jax.random.key(13))
    return stablenum_jax.program(loss_fn, params, jnp.asarray(images.transpose(0, 2, 3, 1)), jnp.asarray(labels))
