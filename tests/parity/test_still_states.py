"""State that should follow a training: averages without buffers, target networks, codebooks."""

import pytest

from tests.checkups import checked
from tests.selection import REPEATS

TORCH = """
import copy, torch
from torch import nn
torch.manual_seed(0)
{net}
student = Net()
{name} = copy.deepcopy(student).requires_grad_(False).eval()
opt = torch.optim.SGD(student.parameters(), lr=0.02)
for step in range(40):
    x = 2 * torch.randn(32, 6)
    with torch.no_grad():
        goal = {name}(x)
    loss = (student(x) - goal - x[:, :3]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        {update}
"""
NET = """
def Net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
"""
PLAIN_NET = NET.replace("nn.BatchNorm1d(8), ", "")
AVERAGE = "for p, q in zip(student.parameters(), {0}.parameters()): q.lerp_(p, 0.05)"
BUFFERS = "; [b.copy_(a) for a, b in zip(student.buffers(), {0}.buffers())]"

JAX = """
import jax, jax.numpy as jnp, optax
k = jax.random.split(jax.random.key(0))
params = {{"w": jax.random.normal(k[0], (6, 8)) / 2, "v": jax.random.normal(k[1], (8, 3)) / 2}}
{name} = params
stats = ema_stats = {{"bn": {{"mean": jnp.zeros(8), "var": jnp.ones(8)}}}}
tx = optax.adam(1e-2)
state = tx.init(params)

def apply(p, s, x):
    h = (x @ p["w"] - s["bn"]["mean"]) / jnp.sqrt(s["bn"]["var"] + 1e-5)
    return jax.nn.relu(h) @ p["v"]

def averaged(s, h):
    new = {{"mean": h.mean(0), "var": h.var(0)}}
    return {{"bn": {{n: 0.9 * s["bn"][n] + 0.1 * new[n] for n in new}}}}

@jax.jit
def train(params, {name}, stats, ema_stats, state, x):
    def loss_fn(p):
        h = x @ p["w"]
        out = apply(p, {{"bn": {{"mean": h.mean(0), "var": h.var(0)}}}}, x)
        return jnp.mean((out - apply({name}, ema_stats, x) - x[:, :3]) ** 2), h
    (loss, h), g = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, state = tx.update(g, state)
    params = optax.apply_updates(params, updates)
    stats = averaged(stats, h)
    {update}
    return params, {name}, stats, ema_stats, state, loss

for step in range(40):
    x = 2 * jax.random.normal(jax.random.key(step), (32, 6))
    params, {name}, stats, ema_stats, state, loss = train(params, {name}, stats, ema_stats, state, x)
"""
JAX_AVERAGE = "{0} = optax.incremental_update(params, {0}, 0.05)"
JAX_BUFFERS = "; ema_stats = stats"


def torch_script(name, *, update="pass", net=NET):
    return TORCH.format(net=net, name=name, update=update.format(name))


def jax_script(name, update="pass"):
    return JAX.format(name=name, update=update.format(name))


STILL = [
    pytest.param(torch_script("teacher", update=AVERAGE), "zip(", id="torch an average without buffers"),
    pytest.param(torch_script("target_net", net=PLAIN_NET), "target_net", id="torch a target network"),
    pytest.param(
        jax_script("ema_params", JAX_AVERAGE), "incremental_update", id="jax an average without buffers"
    ),
    pytest.param(jax_script("target_params"), "target_params", id="jax a target network", marks=REPEATS),
]
MOVING = [
    pytest.param(torch_script("teacher", update=AVERAGE + BUFFERS), id="torch an average with buffers"),
    pytest.param(
        torch_script("target_net", update=AVERAGE, net=PLAIN_NET), id="torch a target", marks=REPEATS
    ),
    pytest.param(torch_script("reference", net=PLAIN_NET), id="torch a frozen reference"),
    pytest.param(
        torch_script("target_net", net=PLAIN_NET).replace("copy.deepcopy(student)", "Net()"),
        id="torch a random target",
    ),
    pytest.param(jax_script("ema_params", JAX_AVERAGE + JAX_BUFFERS), id="jax an average with buffers"),
    pytest.param(jax_script("reference"), id="jax a frozen reference", marks=REPEATS),
]


@pytest.mark.parametrize(("script", "line"), STILL)
def test_a_copy_that_is_left_behind_is_found(script, line, tmp_path):
    result, report = checked(script, tmp_path, "--once")
    found = {c["symptom"]: c for c in report["complaints"]}
    assert "still_state" in found, result.stdout + result.stderr
    places = [found["still_state"]["place"], *found["still_state"]["places"]]
    assert any(line in p["code"] for p in places)


@pytest.mark.parametrize("script", MOVING)
def test_a_copy_that_follows_or_is_frozen_on_purpose_is_not(script, tmp_path):
    result, report = checked(script, tmp_path, "--once")
    assert "watching failed" not in result.stderr
    assert "still_state" not in [c["symptom"] for c in report["complaints"]], result.stdout


QUANTIZER = """
import torch
from torch import nn
torch.manual_seed(0)
class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codebook", torch.randn(16, 4))
        self.register_buffer("sums", torch.randn(16, 4))
        self.register_buffer("sizes", torch.ones(16))
    def forward(self, z):
        i = torch.cdist(z, self.codebook).argmin(-1)
        q = self.codebook[i]
        if self.training:
            with torch.no_grad():
                one = nn.functional.one_hot(i, 16).float()
                self.sizes.lerp_(one.sum(0), 0.1)
                self.sums.lerp_(one.T @ z, 0.1)
                {update}
        return z + (q - z).detach(), (z - q.detach()).square().mean()
enc, dec, vq = nn.Linear(8, 4), nn.Linear(4, 8), Quantizer()
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-2)
for step in range(40):
    x = torch.randn(64, 8)
    q, commit = vq(enc(x))
    loss = (dec(q) - x).square().mean() + commit
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
QUANTIZER_IN_JAX = """
import jax, jax.numpy as jnp, optax
k = jax.random.split(jax.random.key(0), 3)
params = {{"enc": jax.random.normal(k[0], (8, 4)) / 3, "dec": jax.random.normal(k[1], (4, 8)) / 2}}
codebook = jax.random.normal(k[2], (16, 4))
tx = optax.adam(1e-2)
state = tx.init(params)

@jax.jit
def train(params, codebook, state, x):
    def loss_fn(p):
        z = x @ p["enc"]
        i = jnp.argmin(((z[:, None] - codebook) ** 2).sum(-1), -1)
        q = codebook[i]
        out = (z + jax.lax.stop_gradient(q - z)) @ p["dec"]
        return jnp.mean((out - x) ** 2) + jnp.mean((z - q) ** 2), (z, i)
    (loss, (z, i)), g = jax.value_and_grad(loss_fn, has_aux=True)(params)
    up, state = tx.update(g, state)
    one = jax.nn.one_hot(i, 16)
    new = 0.9 * codebook + 0.1 * (one.T @ z) / (one.sum(0)[:, None] + 1)
    return optax.apply_updates(params, up), {kept}, state, loss

for step in range(40):
    x = jax.random.normal(jax.random.key(step), (64, 8))
    params, codebook, state, loss = train(params, codebook, state, x)
"""
TABLES = [
    pytest.param(QUANTIZER.format(update="pass"), True, id="torch still"),
    pytest.param(
        QUANTIZER.format(update="self.codebook.copy_(self.sums / self.sizes[:, None].clamp(min=0.1))"),
        False,
        id="torch moving",
    ),
    pytest.param(QUANTIZER_IN_JAX.format(kept="codebook"), True, id="jax still", marks=REPEATS),
    pytest.param(QUANTIZER_IN_JAX.format(kept="new"), False, id="jax moving", marks=REPEATS),
]


@pytest.mark.parametrize(("script", "still"), TABLES)
def test_a_codebook_in_use_that_never_changes_is_found(script, still, tmp_path):
    result, report = checked(script, tmp_path, "--once")
    found = [c for c in report["complaints"] if c["symptom"] == "still_state"]
    assert bool(found) is still, result.stdout + result.stderr
    assert not found or "codebook" in found[0]["place"]["code"]


ONLY_WITHOUT_GRADIENTS = """
import torch
from torch import nn
torch.manual_seed(0)
features = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU()).{mode}()
head = nn.Linear(16, 1)
opt = torch.optim.Adam(head.parameters(), 1e-2)
for step in range(40):
    x = torch.randn(64, 6)
    with torch.no_grad():
        h = features(x)
    loss = (head(h) - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_statistics_that_nothing_has_moved_are_found_also_without_gradients(mode, tmp_path):
    result, report = checked(ONLY_WITHOUT_GRADIENTS.format(mode=mode), tmp_path, "--once")
    assert ("batch_norm" in [c["symptom"] for c in report["complaints"]]) is (mode == "eval"), result.stdout
