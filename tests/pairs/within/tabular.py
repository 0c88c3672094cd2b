"""Price regression: a gated network, and its rewriting."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

NUM_FEATURES, NUM_DISTRICTS, DISTRICT_DIM = 10, 7, 6
WIDTH, HIDDEN, DEPTH = 24, 32, 2


def make_batch():
    rng = np.random.default_rng(7)
    features = rng.normal(size=(8, NUM_FEATURES)).astype(np.float32)
    district = rng.integers(0, NUM_DISTRICTS, size=(8,))
    price = rng.normal(scale=1.5, size=(8,)).astype(np.float32)
    weight = rng.uniform(0.5, 2.0, size=(8,)).astype(np.float32)
    return features, district, price, weight


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(dim))

    def forward(self, x):
        ms = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(ms + self.eps) * self.weight


class GatedBlock(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(value * F.gelu(gate))


class PriceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.district = nn.Embedding(NUM_DISTRICTS, DISTRICT_DIM)
        self.stem = nn.Linear(NUM_FEATURES + DISTRICT_DIM, WIDTH)
        self.stem_norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(GatedBlock(WIDTH, HIDDEN) for _ in range(DEPTH))
        self.out_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        for norm in (self.stem_norm, self.out_norm):
            nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            nn.init.normal_(norm.bias, std=0.1)

    def forward(self, features, district):
        x = torch.cat([features, self.district(district)], dim=-1)
        x = F.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.out_norm(x)).squeeze(-1)


def left():
    torch.manual_seed(0)
    model = PriceNet()

    def loss_fn(features, district, price, weight):
        err = F.huber_loss(model(features, district), price, reduction="none", delta=1.0)
        return (weight * err).sum() / weight.sum()

    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    batch = [torch.from_numpy(a) for a in make_batch()]
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=optimizer)


class GatedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.value = nn.Linear(WIDTH, HIDDEN)
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.back = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        h = F.rms_norm(x, (WIDTH,), self.scale, eps=1e-5)
        gate = self.gate(h)
        gated = self.value(h) * (0.5 * gate * (1 + torch.erf(gate / 2**0.5)))
        return x + self.back(gated)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(NUM_DISTRICTS, DISTRICT_DIM)
        self.start = nn.Sequential(
            nn.Linear(NUM_FEATURES + DISTRICT_DIM, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()
        )
        self.units = nn.Sequential(*[GatedUnit() for _ in range(DEPTH)])
        self.end = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, features, district):
        place = self.places(district)
        x = self.start(torch.cat((features, place), dim=1))
        return self.end(self.units(x))[:, 0]


def right():
    torch.manual_seed(1)
    net = Regressor()

    def loss_fn(features, district, price, weight):
        error = net(features, district) - price
        size = error.abs().clamp(max=1.0)
        huber = size * (error.abs() - 0.5 * size)
        return torch.dot(weight / weight.sum(), huber)

    matrices = {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.05}
    vectors = {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0}
    adam = torch.optim.AdamW([matrices, vectors], lr=2e-3)
    batch = [torch.from_numpy(a) for a in make_batch()]
    return stablenum_torch.program(loss_fn, *batch, model=net, optimizer=adam)


RENAMED = {
    "district.": "places.",
    "stem.": "start.0.",
    "stem_norm.": "start.1.",
    "out_norm.": "end.0.",
    "blocks.": "units.",
    "norm.weight": "scale",
    "down.": "back.",
    "head.": "end.1.",
}


def weights(arrays):
    found = {}
    for name, array in arrays.items():
        if ".up." in name:
            for part, half in zip(("value", "gate"), (array[:HIDDEN], array[HIDDEN:]), strict=True):
                found[name.replace("blocks", "units").replace("up", part)] = half
            continue
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        found[name] = array
    return found
