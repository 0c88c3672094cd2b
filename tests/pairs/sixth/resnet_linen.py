"""A small quantisation-aware ResNet with BatchNorm: PyTorch (NCHW) and flax linen (NHWC)."""
import functools

import flax.linen as nn_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CLASSES, WIDTH, SIZE = 6, 8, 16
LR, MOMENTUM, WEIGHT_DECAY, MAX_NORM, WARMUP = 0.1, 0.9, 5e-4, 0.5, 5


def make_batch():
    rng = np.random.default_rng(7)
    images = rng.normal(size=(8, 3, SIZE, SIZE)).astype(np.float32) * 0.6 + 0.3
    labels = rng.integers(0, CLASSES, size=(8,)).astype(np.int64)
    return images, labels


# ---------------------------------------------------------------- PyTorch

class QuantConv2d(nn.Conv2d):
    """Convolution whose weight is rounded to 6 bits per output channel; straight-through gradient."""

    def forward(self, x):
        scale = self.weight.abs().amax(dim=(1, 2, 3), keepdim=True) / 31
        quantized = torch.round(self.weight / scale) * scale
        weight = self.weight + (quantized - self.weight).detach()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = QuantConv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = QuantConv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride=stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.conv1(x)
        out = self.bn1(out)
        out = F.relu(out)
        out = self.bn2(self.conv2(out))
        return F.relu(out + identity)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTH)
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.layer1 = BasicBlock(WIDTH, WIDTH, 1)
        self.layer2 = BasicBlock(WIDTH, 2 * WIDTH, 2)
        self.fc = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = self.pool(x)
        x = self.layer2(self.layer1(x))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.fc(x)


class ClippedSGD(torch.optim.SGD):
    def __init__(self, params, max_norm, **kwargs):
        super().__init__(params, **kwargs)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, self.max_norm)
        return super().step(closure)


def left():
    torch.manual_seed(0)
    model = ResNet()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = ClippedSGD(groups, max_norm=MAX_NORM, lr=LR, momentum=MOMENTUM, nesterov=True)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP)
    images, labels = make_batch()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss_fn(images, labels):
        return criterion(model(images), labels)

    return stablenum_torch.program(loss_fn, torch.tensor(images), torch.tensor(labels), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (flax linen)

def fake_quant(kernel):
    step = jnp.max(jnp.abs(kernel), axis=(0, 1, 2)) / 31
    rounded = jnp.round(kernel / step) * step
    return kernel + jax.lax.stop_gradient(rounded - kernel)


class QConv(nn_jax.Module):
    features: int
    strides: int = 1

    @nn_jax.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn_jax.initializers.he_normal(), (3, 3, x.shape[-1], self.features))
        return jax.lax.conv_general_dilated(
            x, fake_quant(kernel), (self.strides, self.strides), ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"))


class ResidualBlock(nn_jax.Module):
    features: int
    strides: int = 1

    @nn_jax.compact
    def __call__(self, x, train=False):
        norm = functools.partial(nn_jax.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
        y = QConv(self.features, self.strides)(x)
        y = nn_jax.relu(norm()(y))
        y = norm()(QConv(self.features)(y))
        if x.shape != y.shape:
            x = nn_jax.Conv(self.features, (1, 1), (self.strides, self.strides), use_bias=False, name="proj")(x)
            x = norm(name="proj_norm")(x)
        return nn_jax.relu(x + y)


class JaxResNet(nn_jax.Module):
    @nn_jax.compact
    def __call__(self, x, train=False):
        x = nn_jax.Conv(WIDTH, (3, 3), padding=1, use_bias=False, name="stem")(x)
        x = nn_jax.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name="stem_norm")(x)
        x = nn_jax.avg_pool(nn_jax.relu(x), (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        x = ResidualBlock(WIDTH, name="block1")(x, train)
        x = ResidualBlock(2 * WIDTH, strides=2, name="block2")(x, train)
        x = x.mean(axis=(1, 2))
        return nn_jax.Dense(CLASSES, name="head")(x)


def clip_grad_norm(max_norm):
    """torch.nn.utils.clip_grad_norm_ as an optax transformation."""

    def update(updates, state, params=None):
        norm = optax.global_norm(updates)
        factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def right():
    images, labels = make_batch()
    model = JaxResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)))
    params, batch_stats = variables["params"], variables["batch_stats"]
    warmup = optax.linear_schedule(LR / WARMUP, LR, WARMUP)
    optimizer = optax.chain(
        clip_grad_norm(MAX_NORM),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.sgd(warmup, momentum=MOMENTUM, nesterov=True),
    )

    def loss_fn(params, images, labels):
        x = jnp.transpose(images, (0, 2, 3, 1))
        logits, _ = model.apply({"params": params, "batch_stats": batch_stats}, x, train=True, mutable=["batch_stats"])
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()

    return stablenum_jax.program(loss_fn, params, images, labels, optimizer=optimizer)
