"""Regression MLP: PyTorch with a hand-written AdamW, plain JAX with a per-example function under vmap and optax."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn

SIZES, CLASSES = (10, 32, 24, 16), 6


def make_batch():
    rng = np.random.default_rng(31)
    inputs = rng.normal(0.5, 1.5, size=(7, SIZES[0])).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=7)
    weights = rng.uniform(0.5, 2.0, size=7).astype(np.float32)
    return inputs, labels, weights


# ---------------------------------------------------------------- PyTorch


class NormedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return nn.functional.softplus(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(NormedLinear(a, b) for a, b in zip(SIZES, SIZES[1:])))
        self.head = nn.Linear(SIZES[-1], CLASSES)

    def forward(self, x):
        return self.head(self.layers(x))


class PlainAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, beta1=0.9, beta2=0.98, eps=1e-8, decay=0.05):
        super().__init__(params, dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                state["m"] = group["beta1"] * state["m"] + (1 - group["beta1"]) * p.grad
                state["v"] = group["beta2"] * state["v"] + (1 - group["beta2"]) * p.grad**2
                m_hat = state["m"] / (1 - group["beta1"] ** state["t"])
                v_hat = state["v"] / (1 - group["beta2"] ** state["t"])
                direction = m_hat / (v_hat.sqrt() + group["eps"])
                p.copy_(p - group["lr"] * (direction + group["decay"] * p))


def left():
    torch.manual_seed(14)
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    inputs, labels, weights = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(inputs, labels, weights):
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        return (losses * weights).sum() / weights.sum()

    return stablenum_torch.program(
        loss_fn, inputs, labels, weights, model=model, optimizer=PlainAdamW(model.parameters(), lr=1e-3)
    )


# ---------------------------------------------------------------- JAX


def init(key):
    params = []
    for a, b in zip(SIZES, SIZES[1:] + (CLASSES,)):
        key, k1, k2, k3 = jax.random.split(key, 4)
        layer = {"w": jax.random.normal(k1, (a, b)) / np.sqrt(a), "b": 0.1 * jax.random.normal(k2, (b,))}
        if b != CLASSES:
            gain, bias = 0.1 * jax.random.normal(k3, (2, a))
            layer.update(gain=1.0 + gain, bias=bias)
        params.append(layer)
    return params


def standardize(x, gain, bias):
    mean = jnp.mean(x)
    variance = jnp.mean(x * x) - mean * mean
    return (x - mean) / jnp.sqrt(variance + 1e-5) * gain + bias


def logits_of_one(params, x):
    *hidden, head = params
    for layer in hidden:
        x = standardize(x, layer["gain"], layer["bias"])
        x = jax.nn.softplus(x @ layer["w"] + layer["b"])
    return x @ head["w"] + head["b"]


def loss_of_one(params, x, label):
    log_probs = jax.nn.log_softmax(logits_of_one(params, x))
    return -log_probs[label]


def batch_loss(params, inputs, labels, weights):
    losses = jax.vmap(loss_of_one, in_axes=(None, 0, 0))(params, inputs, labels)
    return jnp.average(losses, weights=weights)


def right():
    inputs, labels, weights = (jnp.asarray(a) for a in make_batch())
    tx = optax.adamw(1e-3, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.05)
    return stablenum_jax.program(batch_loss, init(jax.random.key(3)), inputs, labels, weights, optimizer=tx)
