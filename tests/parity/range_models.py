"""One network, written in five ways: ``loud`` makes activations of 1e6, ``quiet`` has gradients of 1e-9."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

__all__ = ["FLAVOURS", "TorchNet", "batch", "jax_case", "torch_loss", "torch_net"]

LOUD, QUIET = 1e6, 1e-6
SIZES = {"first": (16, 16), "loud.lin": (16, 16), "quiet": (16, 4), "head": (16, 4)}
FLAVOURS = ("linen", "nnx", "equinox", "plain")


def numbers() -> dict[str, dict[str, np.ndarray]]:
    """Weights (inputs, outputs) and biases of each layer."""
    rng = np.random.default_rng(0)
    return {
        name: {
            "w": rng.normal(size=size).astype(np.float32) / 4,
            "b": rng.normal(size=size[1]).astype(np.float32) / 10,
        }
        for name, size in SIZES.items()
    }


def batch() -> tuple[np.ndarray, np.ndarray]:
    """64 inputs and their classes."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(64, 16)).astype(np.float32), rng.integers(0, 4, size=64)


# --- PyTorch -------------------------------------------------------------------------------------


class TorchLoud(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * LOUD


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.loud = torch.nn.Linear(16, 16), TorchLoud()
        self.quiet, self.head = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.loud(torch.tanh(self.first(x))) / LOUD
        return self.head(h) + QUIET * self.quiet(h)


def torch_net() -> TorchNet:
    """The network in PyTorch."""
    net = TorchNet()
    with torch.no_grad():
        for name, layer in numbers().items():
            net.get_submodule(name).weight.copy_(torch.as_tensor(layer["w"].T))
            net.get_submodule(name).bias.copy_(torch.as_tensor(layer["b"]))
    return net


def torch_loss(net: torch.nn.Module, xy: Any) -> torch.Tensor:
    """The mean cross entropy."""
    return torch.nn.functional.cross_entropy(net(torch.as_tensor(xy[0])), torch.as_tensor(xy[1]))


# --- JAX -----------------------------------------------------------------------------------------


class LinenLoud(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(16, name="lin")(x) * LOUD


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = LinenLoud(name="loud")(jnp.tanh(nn.Dense(16, name="first")(x))) / LOUD
        return nn.Dense(4, name="head")(h) + QUIET * nn.Dense(4, name="quiet")(h)


class NnxLoud(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.lin = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.lin(x) * LOUD


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.loud = nnx.Linear(16, 16, rngs=rngs), NnxLoud(rngs)
        self.quiet, self.head = nnx.Linear(16, 4, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        for name, layer in numbers().items():
            module = self.loud.lin if name == "loud.lin" else getattr(self, name)
            module.kernel[...], module.bias[...] = layer["w"], layer["b"]

    def __call__(self, x: Any) -> Any:
        h = self.loud(jnp.tanh(self.first(x))) / LOUD
        return self.head(h) + QUIET * self.quiet(h)


def equinox_linear(name: str) -> eqx.nn.Linear:
    layer = numbers()[name]
    made = eqx.nn.Linear(*SIZES[name], key=jax.random.key(0))
    weights = (jnp.asarray(layer["w"].T), jnp.asarray(layer["b"]))
    return eqx.tree_at(lambda linear: (linear.weight, linear.bias), made, weights)


class EquinoxLoud(eqx.Module):
    lin: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.lin(x) * LOUD


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    loud: EquinoxLoud
    quiet: eqx.nn.Linear
    head: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        h = self.loud(jnp.tanh(self.first(x))) / LOUD
        return self.head(h) + QUIET * self.quiet(h)


def plain_net(params: Any, x: Any) -> Any:
    def layer(name: str, params: Any, x: Any) -> Any:
        with jax.named_scope(name):
            return x @ params["w"] + params["b"]

    h = jnp.tanh(layer("first", params["first"], x))
    with jax.named_scope("loud"):
        h = layer("lin", params["loud"]["lin"], h) * LOUD
    h = h / LOUD
    return layer("head", params["head"], h) + QUIET * layer("quiet", params["quiet"], h)


def mean_cross_entropy(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def jax_case(flavour: str) -> tuple[Any, Any]:
    """``(loss, params)``: ``loss(params, x, y)``."""
    given = numbers()
    nested = {name: layer for name, layer in given.items() if "." not in name}
    nested["loud"] = {"lin": given["loud.lin"]}
    if flavour == "linen":
        renamed = jax.tree.map(
            lambda layer: {"kernel": layer["w"], "bias": layer["b"]}, nested, is_leaf=lambda node: "w" in node
        )
        net = LinenNet()
        return lambda v, x, y: mean_cross_entropy(net.apply(v, x), y), {
            "params": jax.tree.map(jnp.asarray, renamed)
        }
    if flavour == "nnx":
        return lambda net, x, y: mean_cross_entropy(net(x), y), NnxNet()
    if flavour == "equinox":
        made = {name.partition(".")[0]: equinox_linear(name) for name in SIZES}
        made["loud"] = EquinoxLoud(made["loud"])
        return lambda net, x, y: mean_cross_entropy(jax.vmap(net)(x), y), EquinoxNet(**made)
    return lambda p, x, y: mean_cross_entropy(plain_net(p, x), y), jax.tree.map(jnp.asarray, nested)
