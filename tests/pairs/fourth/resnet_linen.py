"""A small ResNet-D style classifier: PyTorch (NCHW) against flax.linen (NHWC)."""
from functools import partial
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CLASSES, WIDTH, BATCH, SIZE = 10, 8, 6, 16
SMOOTHING = 0.1
LR, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-3


def make_batch():
    rng = np.random.default_rng(5)
    images = rng.normal(size=(BATCH, 3, SIZE, SIZE)).astype(np.float32)
    images += rng.normal(size=(BATCH, 3, 1, 1)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=(BATCH,))
    return images, labels


# ---------------------------------------------------------------- PyTorch


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = conv3x3(in_planes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(
                nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False),
                nn.Conv2d(in_planes, planes, 1, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = conv3x3(3, WIDTH)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = BasicBlock(WIDTH, WIDTH)
        self.layer2 = BasicBlock(WIDTH, 2 * WIDTH, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * WIDTH, CLASSES)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                nn.init.uniform_(m.weight, 0.6, 1.4)
                nn.init.normal_(m.bias, std=0.2)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def left():
    torch.manual_seed(0)
    model = ResNet()
    model.train()
    criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    images, labels = make_batch()

    def loss_fn(images, labels):
        return criterion(model(images), labels)

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(labels), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- JAX, flax.linen


class ResidualUnit(linen.Module):
    features: int
    strides: int
    conv: Any
    norm: Any

    @linen.compact
    def __call__(self, x):
        same = ((1, 1), (1, 1))
        y = self.conv(self.features, (3, 3), strides=(self.strides, self.strides), padding=same)(x)
        y = linen.relu(self.norm()(y))
        y = self.conv(self.features, (3, 3), padding=same)(y)
        y = self.norm()(y)
        if y.shape != x.shape:
            x = linen.avg_pool(
                x, (3, 3), strides=(self.strides, self.strides), padding=same, count_include_pad=False
            )
            x = self.conv(self.features, (1, 1), name="proj_conv")(x)
            x = self.norm(name="proj_norm")(x)
        return linen.relu(x + y)


class FlaxResNet(linen.Module):
    width: int = WIDTH
    num_classes: int = CLASSES

    @linen.compact
    def __call__(self, x, train: bool = True):
        conv = partial(linen.Conv, use_bias=False)
        norm = partial(linen.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
        x = conv(self.width, (3, 3), padding=((1, 1), (1, 1)), name="stem_conv")(x)
        x = norm(name="stem_norm")(x)
        x = linen.relu(x)
        x = linen.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        x = ResidualUnit(self.width, 1, conv, norm, name="stage1")(x)
        x = ResidualUnit(2 * self.width, 2, conv, norm, name="stage2")(x)
        x = jnp.mean(x, axis=(1, 2))
        return linen.Dense(self.num_classes, name="head")(x)


def right():
    net = FlaxResNet()
    images, labels = make_batch()
    variables = net.init(jax.random.key(1), jnp.zeros((1, SIZE, SIZE, 3)))
    params, batch_stats = variables["params"], variables["batch_stats"]

    def loss_fn(params, images, labels):
        x = jnp.transpose(images, (0, 2, 3, 1))
        logits, _ = net.apply(
            {"params": params, "batch_stats": batch_stats}, x, train=True, mutable=["batch_stats"]
        )
        onehot = jax.nn.one_hot(labels, CLASSES)
        targets = optax.smooth_labels(onehot, SMOOTHING)
        return optax.softmax_cross_entropy(logits, targets).mean()

    optimizer = optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY),
        optax.sgd(LR, momentum=MOMENTUM, nesterov=True),
    )
    return stablenum_jax.program(loss_fn, params, images, labels, optimizer=optimizer)
