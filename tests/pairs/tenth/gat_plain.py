"""Graph attention network on a batch of graphs: PyTorch with index_add, plain JAX with segment operations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

FEATURES, HIDDEN, HEADS, OUT, CLASSES = 7, 5, 3, 8, 4
LR, B1, B2, EPS, L2 = 5e-3, 0.9, 0.999, 1e-8, 1e-3


def make_batch():
    rng = np.random.default_rng(29)
    sizes = (5, 3, 7, 4)
    batch = np.repeat(np.arange(len(sizes)), sizes)
    edges, first = [], 0
    for n in sizes:
        for i in range(n):
            for j in rng.choice(n, size=2, replace=False):
                if i != j:
                    edges.append((first + j, first + i))
        first += n
    x = rng.normal(size=(sum(sizes), FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(sizes))
    return x, np.array(edges).T.astype(np.int32), batch.astype(np.int32), y.astype(np.int32)


# ------------------------------------------------------------------ PyTorch


def scatter_softmax(src, index, num_nodes):
    index = index.unsqueeze(-1).expand_as(src)
    top = src.new_full((num_nodes, src.size(1)), float("-inf"))
    top = top.scatter_reduce(0, index, src.detach(), reduce="amax")
    out = (src - top.gather(0, index)).exp()
    total = torch.zeros_like(top).scatter_add(0, index, out)
    return out / (total.gather(0, index) + 1e-16)


class GATConv(nn.Module):
    def __init__(self, in_channels, out_channels, heads, concat=True, negative_slope=0.2):
        super().__init__()
        self.heads, self.out_channels, self.concat = heads, out_channels, concat
        self.negative_slope = negative_slope
        self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.bias = nn.Parameter(torch.zeros(heads * out_channels if concat else out_channels))
        nn.init.xavier_uniform_(self.lin.weight)
        nn.init.xavier_uniform_(self.att_src)
        nn.init.xavier_uniform_(self.att_dst)

    def forward(self, x, edge_index):
        n = x.size(0)
        loops = torch.arange(n).expand(2, n)
        src, dst = torch.cat([edge_index, loops], dim=1)
        h = self.lin(x).view(n, self.heads, self.out_channels)
        alpha = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        alpha = F.leaky_relu(alpha, self.negative_slope)
        alpha = scatter_softmax(alpha, dst, n)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * alpha.unsqueeze(-1))
        out = out.view(n, -1) if self.concat else out.mean(dim=1)
        return out + self.bias


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATConv(FEATURES, HIDDEN, HEADS)
        self.conv2 = GATConv(HEADS * HIDDEN, OUT, HEADS, concat=False)
        self.lin = nn.Linear(OUT, CLASSES)

    def forward(self, x, edge_index, batch, num_graphs):
        x = F.elu(self.conv1(x, edge_index))
        x = self.conv2(x, edge_index)
        pooled = x.new_zeros(num_graphs, x.size(1)).index_add(0, batch, x)
        count = torch.bincount(batch, minlength=num_graphs).clamp(min=1)
        return self.lin(pooled / count.unsqueeze(1))


# ------------------------------------------------------------------ JAX


def init_layer(key, fan_in, width, concat):
    k1, k2, k3 = jax.random.split(key, 3)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "w": glorot(k1, (fan_in, HEADS * width)),
        "a_send": glorot(k2, (HEADS, width)),
        "a_recv": glorot(k3, (HEADS, width)),
        "b": jnp.zeros(HEADS * width if concat else width),
    }


def init_params(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "gat1": init_layer(k1, FEATURES, HIDDEN, True),
        "gat2": init_layer(k2, HEADS * HIDDEN, OUT, False),
        "readout": {"w": 0.3 * jax.random.normal(k3, (OUT, CLASSES)), "b": jnp.zeros(CLASSES)},
    }


def segment_softmax(logits, segments, num_segments):
    top = jax.lax.stop_gradient(jax.ops.segment_max(logits, segments, num_segments))
    unnormalised = jnp.exp(logits - top[segments])
    normaliser = jax.ops.segment_sum(unnormalised, segments, num_segments)
    return unnormalised / normaliser[segments]


def attend(layer, nodes, senders, receivers):
    n = nodes.shape[0]
    width = layer["a_send"].shape[-1]
    h = (nodes @ layer["w"]).reshape(n, HEADS, width)
    from_sender = jnp.einsum("nhd,hd->nh", h, layer["a_send"])
    from_receiver = jnp.einsum("nhd,hd->nh", h, layer["a_recv"])
    logits = jax.nn.leaky_relu(from_sender[senders] + from_receiver[receivers], 0.2)
    coefficients = segment_softmax(logits, receivers, n)
    messages = coefficients[:, :, None] * h[senders]
    return jax.ops.segment_sum(messages, receivers, n)


def network(params, nodes, edges, graph_ids, n_graphs):
    n = nodes.shape[0]
    senders = jnp.concatenate([edges[0], jnp.arange(n)])
    receivers = jnp.concatenate([edges[1], jnp.arange(n)])

    h = attend(params["gat1"], nodes, senders, receivers).reshape(n, -1)
    h = jax.nn.elu(h + params["gat1"]["b"])
    h = attend(params["gat2"], h, senders, receivers)
    h = jnp.mean(h, axis=1) + params["gat2"]["b"]

    membership = jax.nn.one_hot(graph_ids, n_graphs, axis=0)
    sums = membership @ h
    pooled = sums / jnp.sum(membership, axis=1, keepdims=True)
    return pooled @ params["readout"]["w"] + params["readout"]["b"]


def adam_with_l2():
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(grads, state, params):
        count, mu, nu = state
        count = count + 1
        grads = jax.tree.map(lambda g, p: g + L2 * p, grads, params)
        mu = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, mu, grads)
        nu = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, nu, grads)
        c1 = 1 - B1**count
        c2 = 1 - B2**count
        updates = jax.tree.map(lambda m, v: -LR * (m / c1) / (jnp.sqrt(v / c2) + EPS), mu, nu)
        return updates, (count, mu, nu)

    return optax.GradientTransformation(init, update)


# ------------------------------------------------------------------ the pair


def left():
    torch.manual_seed(0)
    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(B1, B2), eps=EPS, weight_decay=L2)
    x, edge_index, batch, y = make_batch()

    def loss_fn(x, edge_index, batch, y):
        out = model(x, edge_index, batch, y.size(0))
        return F.cross_entropy(out, y)

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(x),
        torch.tensor(edge_index).long(),
        torch.tensor(batch).long(),
        torch.tensor(y).long(),
        model=model,
        optimizer=optimizer,
    )


def right():
    params = init_params(jax.random.key(12))

    def loss_fn(params, nodes, edges, graph_ids, labels):
        logits = network(params, nodes, edges, graph_ids, labels.shape[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    return stablenum_jax.program(
        loss_fn, params, *map(jnp.asarray, make_batch()), optimizer=adam_with_l2()
    )
