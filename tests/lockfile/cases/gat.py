"""Graph attention network for node classification; the graph is an edge list."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

NODES, FEATURES, HIDDEN, HEADS, CLASSES = 40, 16, 8, 3, 5


def add_self_loops(edges, n):
    loops = torch.arange(n).expand(2, n)
    return torch.cat([edges, loops], dim=1)


def segment_sum(values, index, n):
    out = values.new_zeros((n,) + values.shape[1:])
    return out.index_add(0, index, values)


def segment_softmax(scores, index, n):
    """Softmax over all edges that end in the same node."""
    highest = scores.detach().new_full((n, scores.size(1)), float("-inf"))
    expanded = index[:, None].expand_as(scores)
    highest = highest.scatter_reduce(0, expanded, scores.detach(), reduce="amax")
    exp = torch.exp(scores - highest[index])
    return exp / segment_sum(exp, index, n)[index]


class GATLayer(nn.Module):
    def __init__(self, dim, hidden, heads):
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.proj = nn.Linear(dim, heads * hidden, bias=False)
        self.att_src = nn.Parameter(0.3 * torch.randn(heads, hidden))
        self.att_dst = nn.Parameter(0.3 * torch.randn(heads, hidden))
        self.edge_weight = nn.Parameter(0.3 * torch.randn(heads))

    def forward(self, x, src, dst, length):
        n = x.size(0)
        h = self.proj(x).view(n, self.heads, self.hidden)
        from_src = (h * self.att_src).sum(dim=-1)
        to_dst = (h * self.att_dst).sum(dim=-1)
        scores = from_src[src] + to_dst[dst] + length[:, None] * self.edge_weight
        scores = F.leaky_relu(scores, negative_slope=0.2)
        alpha = segment_softmax(scores, dst, n)
        messages = alpha[..., None] * h[src]
        return segment_sum(messages, dst, n).flatten(1)


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = GATLayer(FEATURES, HIDDEN, HEADS)
        self.norm = nn.LayerNorm(HEADS * HIDDEN)
        self.layer2 = GATLayer(HEADS * HIDDEN, CLASSES, 1)
        self.skip = nn.Linear(FEATURES, CLASSES)

    def forward(self, x, edges, pos):
        edges = add_self_loops(edges, x.size(0))
        src, dst = edges
        length = (pos[src] - pos[dst]).pow(2).sum(dim=-1)
        h = F.elu(self.norm(self.layer1(x, src, dst, length)))
        return self.layer2(h, src, dst, length) + self.skip(x)


def make_graph(seed=6, edges=150):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(NODES, FEATURES))).float()
    pos = torch.from_numpy(rng.random((NODES, 3))).float()
    pairs = torch.from_numpy(rng.integers(0, NODES, size=(2, edges)))
    pairs = pairs[:, pairs[0] != pairs[1]]
    labels = torch.from_numpy(rng.integers(0, CLASSES, size=NODES))
    labelled = torch.from_numpy(rng.random(NODES) < 0.6)
    return x, pos, pairs, labels, labelled


def program():
    torch.manual_seed(6)
    model = GAT()
    x, pos, edges, labels, labelled = make_graph()

    def loss_fn(x, pos, edges, labels, labelled):
        logits = model(x, edges, pos)
        nll = F.cross_entropy(logits, labels, reduction="none")
        return nll[labelled].mean()

    return stablenum_torch.program(loss_fn, x, pos, edges, labels, labelled, model=model)
