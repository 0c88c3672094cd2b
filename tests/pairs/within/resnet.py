"""A small residual ConvNet: layers by name, and in sequences."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

CLASSES = 7
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-4
PROBE_WEIGHT = 0.3


def make_batch():
    rng = np.random.default_rng(11)
    images = rng.normal(size=(6, 3, 16, 16)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=6).astype(np.int64)
    return images, labels


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

    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    return stablenum_torch.program(loss_fn, images, labels, model=model, optimizer=optimizer)


def conv_norm(channels_in, channels, size=3, stride=1):
    conv = nn.Conv2d(channels_in, channels, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


class Residual(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.first = nn.Sequential(conv_norm(channels_in, channels, stride=stride), nn.ReLU())
        self.second = conv_norm(channels, channels)
        self.skip = nn.Identity()
        if stride > 1:
            pool = nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
            self.skip = nn.Sequential(pool, conv_norm(channels_in, channels, size=1))

    def forward(self, x):
        total = self.second(self.first(x)) + self.skip(x)
        return total.relu()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Sequential(conv_norm(3, 12), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        self.shallow = Residual(12, 12, stride=1)
        self.deep = Residual(12, 24, stride=2)
        self.head = nn.Linear(24, CLASSES)
        self.probe = nn.Linear(12, CLASSES)

    def forward(self, images):
        shallow = self.shallow(self.start(images))
        with torch.no_grad():
            seen = F.adaptive_avg_pool2d(shallow, 1).flatten(1)
        deep = self.deep(shallow)
        return self.head(deep.flatten(2).mean(dim=-1)), self.probe(seen)


def right():
    torch.manual_seed(5)
    net = Classifier().train()
    images, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(images, labels):
        both = net(images)
        main, probe = (F.nll_loss(logits.log_softmax(dim=1), labels) for logits in both)
        return main + probe * PROBE_WEIGHT

    settings = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "nesterov": True}
    sgd = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, **settings)
    return stablenum_torch.program(loss_fn, images, labels, model=net, optimizer=sgd)


RENAMED = {
    "stem": "start.0.0",
    "stem_bn": "start.0.1",
    "block1": "shallow",
    "block2": "deep",
    "conv1": "first.0.0",
    "bn1": "first.0.1",
    "conv2": "second.0",
    "bn2": "second.1",
    "shortcut": "skip.1.0",
    "shortcut_bn": "skip.1.1",
    "fc": "head",
}


def weights(arrays):
    return {".".join(RENAMED.get(part, part) for part in name.split(".")): a for name, a in arrays.items()}
