"""Molecular properties with missing labels: GATv2Conv and GINEConv of PyTorch Geometric (a ragged batch) against
flax.linen with segment sums over a batch padded as jraph does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch_geometric.nn import AttentionalAggregation, GATv2Conv, GINEConv, GraphNorm, global_mean_pool

import stablenum_jax
import stablenum_torch

ATOMS, BONDS, TASKS = 7, 3, 4
WIDTH, HEADS, SLOPE = 16, 4, 0.2
BETA, TAU = 0.4, 0.5
LR, EMBED_LR, DECAY, STEPS = 0.01, 0.002, 0.05, 40


def make_graphs():
    rng = np.random.default_rng(21)
    graphs = []
    for size in (5, 7, 4):
        pairs = [(i, int(rng.integers(0, i))) for i in range(1, size - 1)]
        pairs += [(0, 2)] if (2, 0) not in pairs else [(0, 3)]
        bonds = rng.normal(size=(len(pairs), BONDS)).astype(np.float32)
        both = np.array(pairs + [(j, i) for i, j in pairs])
        graphs.append(
            {
                "atoms": rng.integers(0, ATOMS, size),
                "charge": rng.normal(size=(size, 2)).astype(np.float32),
                "senders": both[:, 0],
                "receivers": both[:, 1],
                "bonds": np.concatenate([bonds, bonds + 0.3]).astype(np.float32),
                "labels": rng.normal(size=TASKS).astype(np.float32),
            }
        )
    graphs[0]["labels"][1] = np.nan
    graphs[2]["labels"][[0, 3]] = np.nan
    return graphs


# ---------------------------------------------------------------- PyTorch


class PropertyNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.atom_emb = torch.nn.Embedding(ATOMS, WIDTH)
        self.charge_lin = torch.nn.Linear(2, WIDTH)
        self.gat = GATv2Conv(
            WIDTH, WIDTH // HEADS, heads=HEADS, edge_dim=BONDS, negative_slope=SLOPE, fill_value="mean"
        )
        self.norm1 = GraphNorm(WIDTH)
        self.gin = GINEConv(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH)
            ),
            train_eps=True,
            edge_dim=BONDS,
        )
        self.norm2 = GraphNorm(WIDTH)
        self.readout = AttentionalAggregation(torch.nn.Linear(WIDTH, 1, bias=False))
        self.head = torch.nn.Linear(2 * WIDTH, TASKS)

    def forward(self, atoms, charge, edge_index, bonds, batch):
        x = self.atom_emb(atoms) + self.charge_lin(charge)
        x = x + F.elu(self.norm1(self.gat(x, edge_index, bonds), batch))
        x = x + F.elu(self.norm2(self.gin(x, edge_index, bonds), batch))
        pooled = torch.cat([self.readout(x, batch), global_mean_pool(x, batch)], dim=1)
        return self.head(pooled)


def multitask_loss(prediction, labels):
    known = ~torch.isnan(labels)
    error = F.smooth_l1_loss(prediction, torch.nan_to_num(labels), reduction="none", beta=BETA)
    per_task = (error * known).sum(0) / known.sum(0)
    weights = torch.softmax(per_task.detach() / TAU, dim=0)
    return (weights * per_task).sum()


def collate(graphs):
    offsets = np.cumsum([0] + [len(g["atoms"]) for g in graphs])
    edges = [np.stack([g["senders"], g["receivers"]]) + o for g, o in zip(graphs, offsets)]
    arrays = (
        np.concatenate([g["atoms"] for g in graphs]),
        np.concatenate([g["charge"] for g in graphs]),
        np.concatenate(edges, axis=1),
        np.concatenate([g["bonds"] for g in graphs]),
        np.repeat(np.arange(len(graphs)), np.diff(offsets)),
        np.stack([g["labels"] for g in graphs]),
    )
    return [torch.from_numpy(a) for a in arrays]


def make_adamw(model):
    decayed, plain = [], []
    for name, p in model.named_parameters():
        if name.startswith("atom_emb"):
            continue
        plain.append(p) if name.endswith(("bias", "att", "eps")) or "norm" in name else decayed.append(p)
    groups = [
        {"params": decayed, "lr": LR, "weight_decay": DECAY},
        {"params": plain, "lr": LR, "weight_decay": 0.0},
        {"params": model.atom_emb.parameters(), "lr": EMBED_LR, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [LR, LR, EMBED_LR], total_steps=STEPS, div_factor=10.0, cycle_momentum=False
    )
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def segment_mean(values, segments, count):
    total = jax.ops.segment_sum(values, segments, count)
    size = jax.ops.segment_sum(jnp.ones(len(segments)), segments, count)
    return total / jnp.maximum(size, 1.0)[:, None]


def segment_softmax(scores, segments, count):
    peak = jax.lax.stop_gradient(jax.ops.segment_max(scores, segments, count))
    weights = jnp.exp(scores - peak[segments])
    total = jax.ops.segment_sum(weights, segments, count) + 1e-16
    return weights / total[segments]


class NormPerGraph(nn.Module):
    @nn.compact
    def __call__(self, x, owner, n_graph):
        width = x.shape[-1]
        shift = self.param("shift", nn.initializers.ones, (width,))
        gain = self.param("gain", nn.initializers.ones, (width,))
        offset = self.param("offset", nn.initializers.zeros, (width,))
        centred = x - shift * segment_mean(x, owner, n_graph)[owner]
        power = segment_mean(jnp.square(centred), owner, n_graph)
        return gain * centred * jax.lax.rsqrt(power + 1e-5)[owner] + offset


class AttentionLayer(nn.Module):
    @nn.compact
    def __call__(self, x, bonds, senders, receivers):
        n = len(x)
        own = jnp.arange(n)
        loops = segment_mean(bonds, receivers, n)
        bonds = jnp.concatenate([bonds, loops])
        senders, receivers = jnp.concatenate([senders, own]), jnp.concatenate([receivers, own])

        shape = (HEADS, WIDTH // HEADS)
        sent = nn.DenseGeneral(shape, name="source")(x)[senders]
        hidden = sent + nn.DenseGeneral(shape, name="target")(x)[receivers]
        hidden = hidden + nn.DenseGeneral(shape, use_bias=False, name="bond")(bonds)
        hidden = nn.leaky_relu(hidden, negative_slope=SLOPE)
        query = self.param("query", nn.initializers.lecun_normal(), shape)
        weights = segment_softmax(jnp.sum(hidden * query, axis=-1), receivers, n)
        gathered = jax.ops.segment_sum(weights[..., None] * sent, receivers, n)
        return gathered.reshape(n, WIDTH) + self.param("bias", nn.initializers.zeros, (WIDTH,))


class IsomorphismLayer(nn.Module):
    @nn.compact
    def __call__(self, x, bonds, senders, receivers):
        messages = nn.relu(x[senders] + nn.Dense(WIDTH, name="bond")(bonds))
        epsilon = self.param("epsilon", nn.initializers.zeros, (1,))
        y = (1.0 + epsilon) * x + jax.ops.segment_sum(messages, receivers, len(x))
        return nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(2 * WIDTH, name="up")(y)))


class Properties(nn.Module):
    @nn.compact
    def __call__(self, graph, n_graph):
        bonds, senders, receivers, owner = (graph[k] for k in ("bonds", "senders", "receivers", "owner"))
        x = nn.Embed(ATOMS, WIDTH, name="atoms")(graph["atoms"])
        x = x + nn.Dense(WIDTH, name="charge")(graph["charge"])
        y = AttentionLayer(name="attend")(x, bonds, senders, receivers)
        x = x + nn.elu(NormPerGraph(name="norm_a")(y, owner, n_graph))
        y = IsomorphismLayer(name="isomorph")(x, bonds, senders, receivers)
        x = x + nn.elu(NormPerGraph(name="norm_b")(y, owner, n_graph))
        gates = segment_softmax(nn.Dense(1, use_bias=False, name="gate")(x), owner, n_graph)
        summary = jax.ops.segment_sum(gates * x, owner, n_graph)
        averaged = segment_mean(x, owner, n_graph)
        return nn.Dense(TASKS, name="head")(jnp.concatenate([summary, averaged], axis=-1))


def pad_graphs(graphs, n_node=20, n_edge=48, n_graph=4):
    """The last graph and the last node take the padding."""
    padded = {
        "atoms": np.zeros(n_node, np.int32),
        "charge": np.zeros((n_node, 2), np.float32),
        "senders": np.full(n_edge, n_node - 1, np.int32),
        "receivers": np.full(n_edge, n_node - 1, np.int32),
        "bonds": np.zeros((n_edge, BONDS), np.float32),
        "owner": np.full(n_node, n_graph - 1, np.int32),
        "labels": np.full((n_graph, TASKS), np.nan, np.float32),
    }
    node = edge = 0
    for i, g in enumerate(graphs):
        nodes, edges = slice(node, node + len(g["atoms"])), slice(edge, edge + len(g["senders"]))
        for key in ("atoms", "charge"):
            padded[key][nodes] = g[key]
        for key in ("senders", "receivers"):
            padded[key][edges] = g[key] + node
        padded["bonds"][edges], padded["owner"][nodes], padded["labels"][i] = g["bonds"], i, g["labels"]
        node, edge = nodes.stop, edges.stop
    return {key: jnp.asarray(value) for key, value in padded.items()}


def task_balanced(outputs, labels):
    there = jnp.isfinite(labels)
    cost = optax.losses.huber_loss(outputs, jnp.where(there, labels, 0.0), delta=BETA) / BETA
    tasks = jnp.sum(cost, axis=0, where=there) / jnp.sum(there, axis=0)
    return jnp.dot(jax.nn.softmax(jax.lax.stop_gradient(tasks) / TAU), tasks)


def make_optimizer():
    def adamw(peak, decay):
        schedule = optax.cosine_onecycle_schedule(STEPS, peak, pct_start=0.3, div_factor=10.0)
        return optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-6, weight_decay=decay)

    def label(path, leaf):
        names = [p.key for p in path]
        if "atoms" in names:
            return "embedding"
        return "matrix" if names[-1] == "kernel" else "rest"

    return optax.multi_transform(
        {"matrix": adamw(LR, DECAY), "rest": adamw(LR, 0.0), "embedding": adamw(EMBED_LR, 0.0)},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = PropertyNet()
    with torch.no_grad():
        for norm in (model.norm1, model.norm2):
            norm.mean_scale.uniform_(0.5, 1.0)
            norm.weight.uniform_(0.8, 1.2)
            norm.bias.normal_(0.0, 0.1)
        model.gat.bias.normal_(0.0, 0.1)
        model.gin.eps.fill_(0.2)

    def loss_fn(atoms, charge, edge_index, bonds, batch, labels):
        return multitask_loss(model(atoms, charge, edge_index, bonds, batch), labels)

    return stablenum_torch.program(loss_fn, *collate(make_graphs()), model=model, optimizer=make_adamw(model))


def right():
    batch = pad_graphs(make_graphs())
    labels = batch.pop("labels")
    net = Properties()
    params = net.init(jax.random.key(3), batch, len(labels))["params"]

    def loss_fn(params, graph, labels):
        return task_balanced(net.apply({"params": params}, graph, len(labels)), labels)

    return stablenum_jax.program(loss_fn, params, batch, labels, optimizer=make_optimizer())
