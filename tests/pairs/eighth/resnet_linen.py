"""Pre-activation ResNet for small images: PyTorch (NCHW) and flax.linen (NHWC), batch norm in training mode."""

from functools import partial
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CLASSES = 5
LR, MOMENTUM, DECAY, MAX_NORM = 0.05, 0.9, 5e-4, 1.0


def make_batch():
    rng = np.random.default_rng(8)
    images = rng.normal(size=(6, 3, 16, 16)).astype(np.float32)
    labels = rng.integers(0, CLASSES, 6).astype(np.int32)
    return images, labels


# --------------------------------------------------------------- PyTorch


class PreActBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, kernel_size=1, stride=stride, bias=False)
            )

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class PreActResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, padding=1, bias=False)
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.layer1 = PreActBlock(8, 8)
        self.layer2 = PreActBlock(8, 16, stride=2)
        self.bn = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16 * 2 * 2, CLASSES)

    def forward(self, x):
        out = self.pool(self.conv1(x))
        out = self.layer1(out)
        out = self.layer2(out)
        out = F.relu(self.bn(out))
        out = F.max_pool2d(out, 2)
        out = out.view(out.size(0), -1)
        return self.linear(out)


# --------------------------------------------------------------- JAX


class ResidualUnit(fnn.Module):
    features: int
    norm: Any
    strides: int = 1

    @fnn.compact
    def __call__(self, x):
        conv = partial(fnn.Conv, use_bias=False)
        pre = fnn.relu(self.norm(name="norm_a")(x))
        residual = x
        if self.strides != 1 or x.shape[-1] != self.features:
            residual = conv(self.features, (1, 1), strides=self.strides, name="project")(pre)
        y = conv(self.features, (3, 3), strides=self.strides, padding=1, name="conv_a")(pre)
        y = fnn.relu(self.norm(name="norm_b")(y))
        y = conv(self.features, (3, 3), padding=1, name="conv_b")(y)
        return residual + y


class SmallResNet(fnn.Module):
    classes: int

    @fnn.compact
    def __call__(self, x, train):
        norm = partial(fnn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = fnn.Conv(8, (3, 3), use_bias=False, name="stem")(x)
        x = fnn.avg_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        x = ResidualUnit(8, norm, name="unit1")(x)
        x = ResidualUnit(16, norm, strides=2, name="unit2")(x)
        x = fnn.relu(norm(name="norm")(x))
        x = fnn.max_pool(x, (2, 2), strides=(2, 2))
        x = jnp.moveaxis(x, -1, 1)
        x = x.reshape(x.shape[0], -1)
        return fnn.Dense(self.classes, name="head")(x)


def clip_grads(max_norm, eps=1e-6):
    def update(updates, state, params=None):
        total = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(updates)))
        ratio = jnp.where(total + eps > max_norm, max_norm / (total + eps), 1.0)
        return jax.tree.map(lambda g: g * ratio, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def make_optimizer():
    return optax.chain(
        clip_grads(MAX_NORM),
        optax.add_decayed_weights(DECAY),
        optax.sgd(LR, momentum=MOMENTUM, nesterov=True),
    )


# --------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = PreActResNet()
    model.train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True
    )
    optimizer.register_step_pre_hook(
        lambda *_: (nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM), None)[1]
    )
    images, labels = make_batch()

    def loss_fn(images, labels):
        return F.cross_entropy(model(images), labels)

    return stablenum_torch.program(
        loss_fn, torch.from_numpy(images), torch.from_numpy(labels).long(), model=model, optimizer=optimizer
    )


def right():
    model = SmallResNet(CLASSES)
    images, labels = make_batch()
    images = jnp.asarray(images.transpose(0, 2, 3, 1))
    variables = model.init(jax.random.key(0), images, train=True)

    def loss_fn(params, batch_stats, images, labels):
        logits, updated = model.apply(
            {"params": params, "batch_stats": batch_stats}, images, train=True, mutable=["batch_stats"]
        )
        one_hot = jax.nn.one_hot(labels, CLASSES)
        loss = optax.softmax_cross_entropy(logits, one_hot).mean()
        return loss, updated["batch_stats"]

    return stablenum_jax.program(
        loss_fn,
        variables["params"],
        variables["batch_stats"],
        images,
        jnp.asarray(labels),
        optimizer=make_optimizer(),
    )
