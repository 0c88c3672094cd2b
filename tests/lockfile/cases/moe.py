"""Token classifier with a top-2 mixture-of-experts layer, balance loss and router z-loss."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

DIM, HIDDEN, EXPERTS, TOP_K, CLASSES = 32, 48, 6, 2, 9
BALANCE_COEF, Z_COEF = 0.05, 1e-2


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x):
        logits = self.proj(x)
        probs = torch.softmax(logits, dim=-1)
        weights, chosen = probs.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, probs, weights, chosen


class Experts(nn.Module):
    """All experts' two-layer MLPs, stacked along the first axis."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.b1 = nn.Parameter(0.1 * torch.randn(EXPERTS, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.b2 = nn.Parameter(0.1 * torch.randn(EXPERTS, DIM))

    def forward(self, x):
        h = torch.einsum("nd,edh->neh", x, self.w1) + self.b1
        h = F.gelu(h)
        return torch.einsum("neh,ehd->ned", h, self.w2) + self.b2


def balance_loss(probs, chosen):
    """Switch-style loss: experts * sum(share of tokens * mean router probability)."""
    counts = F.one_hot(chosen, EXPERTS).sum(dim=1).to(probs.dtype)
    share = counts.mean(dim=0) / TOP_K
    return EXPERTS * (share * probs.mean(dim=0)).sum()


def router_z_loss(logits):
    return torch.logsumexp(logits, dim=-1).pow(2).mean()


class MoEClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.router, self.experts = Router(), Experts()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, features):
        x = self.inp(features).flatten(0, 1)
        h = self.norm(x)
        logits, probs, weights, chosen = self.router(h)
        outputs = self.experts(h)
        index = chosen[..., None].expand(-1, -1, DIM)
        picked = outputs.gather(1, index)
        mixed = (weights[..., None] * picked).sum(dim=1)
        aux = BALANCE_COEF * balance_loss(probs, chosen) + Z_COEF * router_z_loss(logits)
        return self.head(x + mixed), aux


def make_data(batch=6, seq=10, seed=5):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(batch, seq, DIM)).astype("float32")
    labels = rng.integers(0, CLASSES, size=(batch, seq))
    return torch.from_numpy(features), torch.from_numpy(labels)


def program():
    torch.manual_seed(5)
    model = MoEClassifier()
    features, labels = make_data()

    def loss_fn(features, labels):
        scores, aux = model(features)
        return F.cross_entropy(scores, labels.flatten()) + aux

    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return stablenum_torch.program(loss_fn, features, labels, model=model, optimizer=optimizer)
