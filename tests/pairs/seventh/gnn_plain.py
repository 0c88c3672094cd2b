"""Attentive message passing on padded molecular graphs with hard edge gates, trained with AdaBelief.

PyTorch: index_add / scatter_reduce, separate projections, GRUCell, AdaBelief as an Optimizer class.
JAX: plain functions over a dict of arrays, segment sums, one fused projection, optax.scale_by_belief.
"""
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

NODES, EDGES, GRAPHS = 20, 44, 3
TYPES, WIDTH, HEADS, RBF, LAYERS = 7, 16, 2, 8, 2
CUTOFF = 5.0


def make_batch():
    rng = np.random.default_rng(3)
    sizes = [5, 7, 4]
    graph_id = np.concatenate([np.repeat(np.arange(3), sizes), np.full(NODES - 16, GRAPHS - 1)])
    node_mask = np.arange(NODES) < 16
    types = np.where(node_mask, rng.integers(1, TYPES, NODES), 0)
    senders, receivers, start = [], [], 0
    for size, count in zip(sizes, [12, 16, 10]):
        senders.append(start + rng.integers(0, size, count))
        receivers.append(start + np.arange(count) % size)
        start += size
    pad = np.full(EDGES - 38, NODES - 1)
    edge_index = np.stack([np.concatenate(senders + [pad]), np.concatenate(receivers + [pad])])
    edge_mask = np.arange(EDGES) < 38
    distance = np.where(edge_mask, rng.uniform(0.8, 4.8, EDGES), 0.0)
    target = rng.normal(0.0, 0.8, GRAPHS)
    return dict(
        types=types.astype(np.int32),
        edge_index=edge_index.astype(np.int32),
        distance=distance.astype(np.float32),
        edge_mask=edge_mask,
        node_mask=node_mask,
        graph_id=graph_id.astype(np.int32),
        target=target.astype(np.float32),
    )


# ----------------------------------------------------------------------------- PyTorch


class ShiftedSoftplus(nn.Module):
    def forward(self, x):
        return F.softplus(x) - math.log(2.0)


class GaussianSmearing(nn.Module):
    def __init__(self, start=0.0, stop=CUTOFF, num=RBF):
        super().__init__()
        self.register_buffer("offset", torch.linspace(start, stop, num))
        self.coeff = -0.5 / (stop / (num - 1)) ** 2

    def forward(self, dist):
        return torch.exp(self.coeff * (dist[:, None] - self.offset[None, :]) ** 2)


def segment_softmax(logits, index, num_nodes):
    slots = index[:, None].expand_as(logits)
    peak = logits.new_full((num_nodes, logits.shape[1]), -1e30)
    peak = peak.scatter_reduce(0, slots, logits.detach(), reduce="amax")
    exp = (logits - peak[index]).exp()
    total = exp.new_zeros(num_nodes, logits.shape[1]).index_add(0, index, exp)
    return exp / (total[index] + 1e-16)


class AttentiveLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.filter = nn.Sequential(
            nn.Linear(RBF, width), ShiftedSoftplus(), nn.Linear(width, heads, bias=False)
        )
        self.gate = nn.Linear(RBF, 1)
        self.update = nn.GRUCell(width, width)

    def forward(self, h, edge_index, rbf, edge_mask):
        src, dst = edge_index
        n, width = h.shape
        split = (n, self.heads, width // self.heads)
        q, k, v = self.query(h).view(split), self.key(h).view(split), self.value(h).view(split)
        logits = (q[dst] * k[src]).sum(dim=-1) / math.sqrt(width // self.heads)
        logits = logits + self.filter(rbf)
        logits = logits.masked_fill(~edge_mask[:, None], -1e9)
        alpha = segment_softmax(logits, dst, n)

        prob = torch.sigmoid(self.gate(rbf))
        hard = (prob > 0.5).to(prob.dtype)
        gate = hard + prob - prob.detach()
        alpha = alpha * gate * edge_mask[:, None]

        messages = (alpha[:, :, None] * v[src]).reshape(-1, width)
        incoming = torch.zeros_like(h).index_add(0, dst, messages)
        return self.update(incoming, h)


class MoleculeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TYPES, WIDTH)
        self.smearing = GaussianSmearing()
        self.layers = nn.ModuleList([AttentiveLayer(WIDTH, HEADS) for _ in range(LAYERS)])
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), ShiftedSoftplus(), nn.Linear(WIDTH, 1))

    def forward(self, types, edge_index, distance, edge_mask, node_mask, graph_id):
        h = self.embed(types)
        envelope = 0.5 * (torch.cos(distance * math.pi / CUTOFF) + 1.0)
        rbf = self.smearing(distance) * envelope[:, None]
        for layer in self.layers:
            h = layer(h, edge_index, rbf, edge_mask)
        real = node_mask[:, None].to(h.dtype)
        summed = h.new_zeros(GRAPHS, WIDTH).index_add(0, graph_id, h * real)
        counts = h.new_zeros(GRAPHS, 1).index_add(0, graph_id, real)
        return self.readout(summed / counts).squeeze(-1)


class AdaBelief(torch.optim.Optimizer):
    """AdaBelief as published by its authors (decoupled decay, no rectification)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_var"] = torch.zeros_like(p)
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                exp_avg, exp_avg_var = state["exp_avg"], state["exp_avg_var"]
                state["step"] += 1
                bias_correction1 = 1 - beta1 ** state["step"]
                bias_correction2 = 1 - beta2 ** state["step"]
                exp_avg.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                residual = p.grad - exp_avg
                exp_avg_var.mul_(beta2).addcmul_(residual, residual, value=1 - beta2)
                denom = (exp_avg_var.add_(group["eps"]).sqrt() / math.sqrt(bias_correction2)).add_(group["eps"])
                p.addcdiv_(exp_avg, denom, value=-group["lr"] / bias_correction1)


# ----------------------------------------------------------------------------- plain JAX


def init_params(seed=0):
    rng = np.random.default_rng(seed)

    def w(*shape):
        return jnp.asarray(rng.normal(0.0, 1.0 / math.sqrt(shape[0]), shape), jnp.float32)

    def b(*shape):
        return jnp.zeros(shape, jnp.float32)

    layers = []
    for _ in range(LAYERS):
        layers.append(
            {
                "qkv": w(WIDTH, 3 * WIDTH),
                "filter": {"w1": w(RBF, WIDTH), "b1": b(WIDTH), "w2": w(WIDTH, HEADS)},
                "gate": {"w": w(RBF, 1), "b": b(1)},
                "gru": {
                    "w_in": w(WIDTH, 3 * WIDTH),
                    "b_in": b(3 * WIDTH),
                    "w_hidden": w(WIDTH, 3 * WIDTH),
                    "b_hidden": b(3 * WIDTH),
                },
            }
        )
    readout = {"w1": w(WIDTH, WIDTH), "b1": b(WIDTH), "w2": w(WIDTH, 1), "b2": b(1)}
    return {"embed": w(TYPES, WIDTH), "layers": layers, "readout": readout}


def ssp(x):
    return jnp.logaddexp(x, 0.0) - np.log(2.0)


def radial_basis(distance):
    centers = jnp.linspace(0.0, CUTOFF, RBF)
    width = centers[1] - centers[0]
    basis = jnp.exp(-0.5 * jnp.square((distance[:, None] - centers) / width))
    envelope = 0.5 + 0.5 * jnp.cos(np.pi / CUTOFF * distance)
    return basis * envelope[:, None]


def edge_attention(scores, receivers):
    top = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, num_segments=NODES)
    unnormalised = jnp.exp(scores - top[receivers])
    norm = jax.ops.segment_sum(unnormalised, receivers, num_segments=NODES)
    return unnormalised / (norm[receivers] + 1e-16)


def hard_gate(logits):
    """0 or 1 forward, gradient of the sigmoid backward."""
    soft = jax.nn.sigmoid(logits)
    step = jnp.where(soft > 0.5, 1.0, 0.0)
    return soft + jax.lax.stop_gradient(step - soft)


def gru(p, x, h):
    x_reset, x_update, x_cand = jnp.split(x @ p["w_in"] + p["b_in"], 3, axis=-1)
    h_reset, h_update, h_cand = jnp.split(h @ p["w_hidden"] + p["b_hidden"], 3, axis=-1)
    reset = jax.nn.sigmoid(x_reset + h_reset)
    update = jax.nn.sigmoid(x_update + h_update)
    candidate = jnp.tanh(x_cand + reset * h_cand)
    return candidate + update * (h - candidate)


def message_layer(p, h, edge_index, rbf, edge_mask):
    senders, receivers = edge_index[0], edge_index[1]
    qkv = (h @ p["qkv"]).reshape(NODES, 3, HEADS, WIDTH // HEADS)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    scores = jnp.einsum("ehd,ehd->eh", q[receivers], k[senders]) * (WIDTH // HEADS) ** -0.5
    hidden = ssp(rbf @ p["filter"]["w1"] + p["filter"]["b1"])
    scores = scores + hidden @ p["filter"]["w2"]
    scores = jnp.where(edge_mask[:, None], scores, -1e9)
    weights = edge_attention(scores, receivers)
    gate = hard_gate(rbf @ p["gate"]["w"] + p["gate"]["b"])
    weights = jnp.where(edge_mask[:, None], weights * gate, 0.0)
    messages = jnp.einsum("eh,ehd->ehd", weights, v[senders])
    incoming = jax.ops.segment_sum(messages, receivers, num_segments=NODES)
    return gru(p["gru"], incoming.reshape(NODES, WIDTH), h)


def predict(params, graph):
    h = jnp.take(params["embed"], graph["types"], axis=0)
    rbf = radial_basis(graph["distance"])
    for layer in params["layers"]:
        h = message_layer(layer, h, graph["edge_index"], rbf, graph["edge_mask"])
    mask = graph["node_mask"].astype(h.dtype)
    total = jax.ops.segment_sum(h * mask[:, None], graph["graph_id"], num_segments=GRAPHS)
    atoms = jax.ops.segment_sum(mask, graph["graph_id"], num_segments=GRAPHS)
    pooled = total / atoms[:, None]
    out = params["readout"]
    hidden = ssp(pooled @ out["w1"] + out["b1"])
    return (hidden @ out["w2"] + out["b2"])[:, 0]


# ----------------------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = MoleculeNet()
    optimizer = AdaBelief(model.parameters(), lr=1e-3, eps=1e-8, weight_decay=1e-2)
    batch = {name: torch.tensor(value) for name, value in make_batch().items()}

    def loss_fn(types, edge_index, distance, edge_mask, node_mask, graph_id, target):
        pred = model(types, edge_index, distance, edge_mask, node_mask, graph_id)
        return F.smooth_l1_loss(pred, target, beta=0.5)

    return stablenum_torch.program(loss_fn, *batch.values(), model=model, optimizer=optimizer)


def right():
    params = init_params()
    names, values = zip(*make_batch().items())

    def loss_fn(params, *arrays):
        graph = dict(zip(names, arrays))
        losses = optax.huber_loss(predict(params, graph), graph["target"], delta=0.5) / 0.5
        return losses.mean()

    optimizer = optax.chain(
        optax.scale_by_belief(b1=0.9, b2=0.999, eps=1e-8, eps_root=1e-8),
        optax.add_decayed_weights(1e-2),
        optax.scale_by_learning_rate(1e-3),
    )
    return stablenum_jax.program(loss_fn, params, *map(jnp.asarray, values), optimizer=optimizer)
