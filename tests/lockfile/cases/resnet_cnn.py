"""CIFAR-style residual network with our own batch norm and label smoothing."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

CLASSES, SMOOTHING = 7, 0.1


class BatchNorm(nn.Module):
    """Batch norm over NCHW, kept by hand because the export tool needs it."""

    def __init__(self, channels, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def update(self, mean, var, count):
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)

    def forward(self, x):
        if self.training:
            mean = x.mean(dim=(0, 2, 3))
            var = x.var(dim=(0, 2, 3), unbiased=False)
            self.update(mean, var, x.numel() // x.size(1))
        else:
            mean, var = self.running_mean, self.running_var
        inv_std = 1.0 / torch.sqrt(var + self.eps)
        scale = self.weight * inv_std
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def conv3x3(c_in, c_out, stride=1):
    return nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(c_in, c_out, stride), BatchNorm(c_out)
        self.conv2, self.bn2 = conv3x3(c_out, c_out), BatchNorm(c_out)
        self.project = None
        if stride != 1 or c_in != c_out:
            self.project = nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False)
            self.project_bn = BatchNorm(c_out)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.project is None else self.project_bn(self.project(x))
        return F.relu(out + shortcut)


class ResNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.stem, self.stem_bn = conv3x3(3, width), BatchNorm(width)
        self.layer1 = BasicBlock(width, width)
        self.layer2 = BasicBlock(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, CLASSES)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images):
        x = F.relu(self.stem_bn(self.stem(images)))
        x = self.layer2(self.layer1(x))
        pooled = x.mean(dim=(2, 3))
        return self.head(pooled)


def smoothed_cross_entropy(logits, labels):
    log_probs = torch.log_softmax(logits, dim=-1)
    nll = -log_probs.gather(1, labels[:, None]).squeeze(1)
    uniform = -log_probs.mean(dim=-1)
    return ((1 - SMOOTHING) * nll + SMOOTHING * uniform).mean()


def make_data(n=16, size=12, seed=1):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size=n)
    images = rng.normal(0.3, 0.25, size=(n, 3, size, size))
    images += 0.1 * labels[:, None, None, None]
    return torch.from_numpy(images).float(), torch.from_numpy(labels)


def program():
    torch.manual_seed(1)
    model = ResNet()
    model.train()
    images, labels = make_data()

    def loss_fn(images, labels):
        return smoothed_cross_entropy(model(images), labels)

    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    return stablenum_torch.program(loss_fn, images, labels, model=model, optimizer=optimizer)
