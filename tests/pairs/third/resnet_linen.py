"""A small residual ConvNet: the PyTorch original (NCHW) and its flax linen port (NHWC)."""
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

CLASSES = 7
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-4
PROBE_WEIGHT = 0.3


def make_batch():
    rng = np.random.default_rng(11)
    images = rng.normal(size=(6, 3, 16, 16)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=6).astype(np.int64)
    return images, labels


# ---------------------------------------------------------------- PyTorch

class BasicBlock(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        if stride > 1:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, bias=False)
            self.shortcut_bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = self.conv1(x)
        out = F.relu(self.bn1(out))
        out = self.conv2(out)
        out = self.bn2(out)
        if self.stride > 1:
            x = F.avg_pool2d(x, 3, stride=self.stride, padding=1, count_include_pad=False)
            x = self.shortcut(x)
            x = self.shortcut_bn(x)
        return F.relu(out + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(12)
        self.block1 = BasicBlock(12, 12, stride=1)
        self.block2 = BasicBlock(12, 24, stride=2)
        self.fc = nn.Linear(24, CLASSES)
        self.probe = nn.Linear(12, CLASSES)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))

    def forward(self, x):
        x = F.relu(self.stem_bn(self.stem(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.block1(x)
        pooled = x.mean(dim=(2, 3))
        probe_logits = self.probe(pooled.detach())
        x = self.block2(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x), probe_logits


def left():
    torch.manual_seed(4)
    model = ResNet()
    model.train()
    images, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(images, labels):
        logits, probe_logits = model(images)
        main = F.cross_entropy(logits, labels)
        probe = F.cross_entropy(probe_logits, labels)
        return main + PROBE_WEIGHT * probe

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM,
                                weight_decay=WEIGHT_DECAY, nesterov=True)
    return stablenum_torch.program(loss_fn, images, labels, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- flax linen

def conv3x3(features, stride, name):
    return linen.Conv(features, (3, 3), strides=(stride, stride), padding=((1, 1), (1, 1)),
                      use_bias=False, name=name)


def batch_norm(name):
    return linen.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, name=name)


class ResidualBlock(linen.Module):
    features: int
    stride: int = 1

    @linen.compact
    def __call__(self, h):
        y = conv3x3(self.features, self.stride, "conv_a")(h)
        y = batch_norm("norm_a")(y)
        y = linen.relu(y)
        y = conv3x3(self.features, 1, "conv_b")(y)
        y = batch_norm("norm_b")(y)
        if self.stride > 1:
            strides = (self.stride, self.stride)
            h = linen.avg_pool(h, (3, 3), strides=strides, padding=((1, 1), (1, 1)), count_include_pad=False)
            h = linen.Conv(self.features, (1, 1), use_bias=False, name="project")(h)
            h = batch_norm("project_norm")(h)
        total = y + h
        return linen.relu(total)


class Network(linen.Module):
    @linen.compact
    def __call__(self, images):
        h = conv3x3(12, 1, "stem_conv")(images)
        h = linen.relu(batch_norm("stem_norm")(h))
        h = linen.max_pool(h, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        h = ResidualBlock(12, name="stage_1")(h)
        features = jax.lax.stop_gradient(jnp.mean(h, axis=(1, 2)))
        probe_logits = linen.Dense(CLASSES, name="probe")(features)
        h = ResidualBlock(24, stride=2, name="stage_2")(h)
        summary = jnp.mean(h, axis=(1, 2))
        return linen.Dense(CLASSES, name="classifier")(summary), probe_logits


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def right():
    network = Network()
    images, labels = make_batch()
    images, labels = jnp.asarray(images.transpose(0, 2, 3, 1)), jnp.asarray(labels)
    variables = network.init(jax.random.key(5), images)
    leaves, treedef = jax.tree.flatten(variables["params"])
    keys = jax.random.split(jax.random.key(6), len(leaves))
    leaves = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)]
    params = jax.tree.unflatten(treedef, leaves)

    def loss_fn(params, batch_stats, images, labels):
        (logits, probe_logits), _ = network.apply(
            {"params": params, "batch_stats": batch_stats}, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels) + PROBE_WEIGHT * cross_entropy(probe_logits, labels)

    tx = optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY),
        optax.trace(decay=MOMENTUM, nesterov=True),
        optax.scale_by_learning_rate(LEARNING_RATE),
    )
    return stablenum_jax.program(loss_fn, params, variables["batch_stats"], images, labels, optimizer=tx)
