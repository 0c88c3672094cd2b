"""The map of the weights where shapes do not tell it: square matrices, and several parameters of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

D = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, D)).astype(np.float32)
IMAGE = RNG.normal(size=(2, 3, 6, 6)).astype(np.float32)
Pair = tuple[Any, Any]


class Plain(nn.Module):
    """Parameters with names, and what is done with them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], body: Callable[..., Any], seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        for name, shape in shapes.items():
            data = rng.normal(size=shape) * 0.5
            self.register_parameter(name, nn.Parameter(torch.tensor(data, dtype=torch.float32)))
        self.body = body

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def in_torch(model: nn.Module, x: Any = X) -> Any:
    return stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(x), model=model)


def of_modules(seed: int, **modules: nn.Module) -> nn.ModuleDict:
    torch.manual_seed(seed)
    found = nn.ModuleDict(modules)
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return found


def arrays(shapes: dict[str, tuple[int, ...]], *, zeros: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(9)
    return {
        n: jnp.asarray(rng.normal(size=s) * (0.0 if zeros else 0.5), jnp.float32) for n, s in shapes.items()
    }


def in_jax(body: Callable[..., Any], params: Any, x: Any = X) -> Any:
    return stablenum_jax.program(lambda p, x: jnp.square(body(p, x)).mean(), params, x)


# --- square matrices ---------------------------------------------------------------------------------------


def used_alike_and_otherwise() -> Pair:
    """One matrix is used in the same way on both sides, two are transposed, one stands on the left."""

    def left(m: Any, x: Any) -> Any:
        h = torch.tanh(x @ m.first)
        h = torch.tanh(nn.functional.linear(h, m.second))
        h = torch.tanh((m.third @ h.transpose(1, 2)).transpose(1, 2))
        return torch.einsum("bsd,ed->bse", h, m.fourth)

    def right(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["first"])
        h = jnp.tanh(h @ p["second"])
        h = jnp.tanh(jnp.einsum("de,bse->bsd", p["third"], h))
        return h @ p["fourth"]

    shapes = dict.fromkeys(("first", "second", "third", "fourth"), (D, D))
    return in_torch(Plain(shapes, left)), in_jax(right, arrays(shapes))


def zeros_at_first() -> Pair:
    """The right program's matrices begin as zeros, whose entries do not tell where they lie."""

    def left(m: Any, x: Any) -> Any:
        return torch.tanh(x @ m.first) @ m.second.T

    def right(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["first"]) @ p["second"]

    shapes = {"first": (D, D), "second": (D, D)}
    return in_torch(Plain(shapes, left)), in_jax(right, arrays(shapes, zeros=True))


def conv1d_of_gpt2() -> Pair:
    """c_attn and c_proj of GPT-2 lie as (in, out), the linear layers of its port too."""
    shapes = {"c_attn": (D, 3 * D), "c_proj": (D, D), "fc": (D, D), "fc_proj": (D, D)}

    def left(m: Any, x: Any) -> Any:
        q, k, v = (x @ m.c_attn).split(D, dim=2)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) @ m.c_proj
        return x + nn.functional.gelu(x @ m.fc) @ m.fc_proj

    def right(p: Any, x: Any) -> Any:
        q, k, v = (x @ p[n] for n in "qkv")
        scores = jnp.where(jnp.tri(5, dtype=bool), q @ k.swapaxes(1, 2) / D**0.5, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ v @ p["o"]
        return x + jax.nn.gelu(x @ p["up"], approximate=False) @ p["down"]

    names = ("q", "k", "v", "o", "up", "down")
    return in_torch(Plain(shapes, left)), in_jax(right, arrays(dict.fromkeys(names, (D, D))))


def linear_of_equinox() -> Pair:
    """Equinox keeps the weights of a linear layer as PyTorch does."""
    modules = of_modules(0, a=nn.Linear(D, D), b=nn.Linear(D, D))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = modules

        def forward(self, x: Any) -> Any:
            return self.m["b"](torch.tanh(self.m["a"](x)))

    first, second = (eqx.nn.Linear(D, D, key=jax.random.key(i)) for i in range(2))
    flat = X.reshape(-1, D)
    return in_torch(Model(), flat), in_jax(
        lambda m, x: jax.vmap(lambda row: m[1](jnp.tanh(m[0](row))))(x), (first, second), flat
    )


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b = (nnx.Linear(D, D, rngs=nnx.Rngs(i)) for i in (3, 4))
        self.tail = nnx.Param(jnp.asarray(np.random.default_rng(5).normal(size=(D, D)), jnp.float32))

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x))) @ self.tail[...]


def linear_of_nnx() -> Pair:
    """The kernels of nnx are transposed, and the matrix of the user's own is not."""
    modules = of_modules(0, a=nn.Linear(D, D), b=nn.Linear(D, D))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m, self.tail = modules, nn.Parameter(torch.randn(D, D))

        def forward(self, x: Any) -> Any:
            return self.m["b"](torch.tanh(self.m["a"](x))) @ self.tail

    return in_torch(Model()), in_jax(lambda m, x: m(x), NnxModel())


def two_of_one_framework() -> Pair:
    """Between two programs of PyTorch, too, one may hold the transpose."""
    shapes = {"first": (D, D), "second": (D, D)}
    left = Plain(shapes, lambda m, x: torch.tanh(x @ m.first) @ m.second.T)
    right = Plain(shapes, lambda m, x: torch.tanh(x @ m.first.T) @ m.second.T, seed=8)
    return in_torch(left), in_torch(right)


def tied_table() -> Pair:
    """A table with as many rows as columns, which is the last matrix, too."""
    tokens = np.arange(12).reshape(3, 4) % D
    shapes = {"table": (D, D), "inner": (D, D)}

    def left(m: Any, x: Any) -> Any:
        return torch.tanh(nn.functional.linear(nn.functional.embedding(x, m.table), m.inner)) @ m.table.T

    def right(p: Any, x: Any) -> Any:
        return jnp.tanh(p["table"][x] @ p["inner"]) @ p["table"].T

    return in_torch(Plain(shapes, left), tokens), in_jax(right, arrays(shapes), tokens)


def table_as_one_hot() -> Pair:
    """A look-up takes the place of a product with one-hot rows, over which that product sums."""
    tokens = np.arange(12).reshape(3, 4) % D
    shapes = {"table": (D, D), "head": (D, 2)}

    def right(p: Any, x: Any) -> Any:
        return jax.nn.one_hot(x, D) @ p["table"] @ p["head"]

    left = Plain(shapes, lambda m, x: nn.functional.embedding(x, m.table) @ m.head)
    return in_torch(left, tokens), in_jax(right, arrays(shapes), tokens)


def layers_of_a_scan() -> Pair:
    """As many square layers as each is wide, stacked on the right; two matrices of each, one transposed."""

    def left(m: Any, x: Any) -> Any:
        for i in range(D):
            x = x + torch.tanh(x @ getattr(m, f"up{i}")) @ getattr(m, f"down{i}").T
        return x

    def right(p: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jax.lax.scan(layer, x, p)[0]

    shapes = {f"{n}{i}": (D, D) for i in range(D) for n in ("up", "down")}
    return in_torch(Plain(shapes, left)), in_jax(right, arrays({"up": (D, D, D), "down": (D, D, D)}))


def experts_of_a_vmap() -> Pair:
    """As many experts as each is wide: one list of layers against one array."""

    def left(m: Any, x: Any) -> Any:
        made = [
            torch.tanh(nn.functional.linear(x, getattr(m, f"up{i}"))) @ getattr(m, f"down{i}")
            for i in range(D)
        ]
        return torch.stack(made) * torch.softmax(x @ m.router, -1).permute(2, 0, 1)[..., None]

    def right(p: Any, x: Any) -> Any:
        made = jax.vmap(lambda up, down: jnp.tanh(x @ up) @ down)(p["up"], p["down"])
        return made * jnp.moveaxis(jax.nn.softmax(x @ p["router"]), -1, 0)[..., None]

    shapes = {f"{n}{i}": (D, D) for i in range(D) for n in ("up", "down")} | {"router": (D, D)}
    stacked = {"up": (D, D, D), "down": (D, D, D), "router": (D, D)}
    return in_torch(Plain(shapes, left)), in_jax(right, arrays(stacked))


def experts_of_two_layers() -> Pair:
    """Two lists of experts with three matrices each, all of one size but for the order of their axes."""
    count, inner = 3, 6
    names = {"w1": (D, inner), "w3": (D, inner), "w2": (inner, D)}
    rng = np.random.default_rng(4)

    def expert() -> nn.ParameterDict:
        made = {n: torch.tensor(rng.normal(size=s) * 0.5, dtype=torch.float32) for n, s in names.items()}
        return nn.ParameterDict({n: nn.Parameter(x) for n, x in made.items()})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList(expert() for _ in range(count)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                outs = [(nn.functional.silu(x @ e["w1"]) * (x @ e["w3"])) @ e["w2"] for e in layer]
                x = x + sum(out * (i + 1) for i, out in enumerate(outs))
            return x

    def right(p: Any, x: Any) -> Any:
        for layer in p:
            gate, up = (jnp.einsum("bsd,edf->bsef", x, layer[n]) for n in ("gate", "up"))
            out = jnp.einsum("bsef,efd->bsed", jax.nn.silu(gate) * up, layer["down"])
            x = x + jnp.einsum("bsed,e->bsd", out, jnp.arange(1.0, count + 1))
        return x

    stacked = {"gate": (count, D, inner), "up": (count, D, inner), "down": (count, inner, D)}
    return in_torch(Model()), in_jax(right, [arrays(stacked), arrays(stacked)])


def taps_of_a_scan() -> Pair:
    """A convolution of each channel against a sum over taps, whose weights a loop takes layer by layer."""
    taps = 3
    convs = of_modules(5, a=nn.Conv1d(D, D, taps, groups=D), b=nn.Conv1d(D, D, taps, groups=D))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = convs

        def forward(self, x: Any) -> Any:
            x = x.transpose(1, 2)
            for conv in self.convs.values():
                x = torch.tanh(conv(nn.functional.pad(x, (taps - 1, 0))))
            return x

    def right(p: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
            moved = [padded[:, i : i + x.shape[1]] * w["taps"][i] for i in range(taps)]
            return jnp.tanh(sum(moved) + w["bias"]), None

        return jax.lax.scan(layer, x, p)[0]

    return in_torch(Model()), in_jax(right, arrays({"taps": (2, taps, D), "bias": (2, D)}))


def kernels_that_are_rounded() -> Pair:
    """Kernels are rounded before they are used, so that their use does not show that they are kernels."""

    def left(m: Any, x: Any) -> Any:
        for w in (m.first, m.second):
            x = torch.tanh(nn.functional.conv2d(x, torch.round(w * 8) / 8 + w, padding=1))
        return x

    def right(p: Any, x: Any) -> Any:
        x, numbers = x.transpose(0, 2, 3, 1), ("NHWC", "HWIO", "NHWC")
        for w in (p["first"], p["second"]):
            made = jnp.round(w * 8) / 8 + w
            x = jnp.tanh(jax.lax.conv_general_dilated(x, made, (1, 1), "SAME", dimension_numbers=numbers))
        return x

    shapes = {"first": (3, 3, 3, 3), "second": (3, 3, 3, 3)}
    return in_torch(Plain(shapes, left), IMAGE), in_jax(right, arrays(shapes), IMAGE)


def heads_of_einsum() -> Pair:
    """Heads as many as each is wide: (width, heads, size) against (heads size, width)."""

    def left(m: Any, x: Any) -> Any:
        q = nn.functional.linear(x, m.query).unflatten(-1, (2, 2))
        return nn.functional.linear(torch.tanh(q).flatten(-2), m.out)

    def right(p: Any, x: Any) -> Any:
        return jnp.einsum("bshd,hde->bse", jnp.tanh(jnp.einsum("bse,ehd->bshd", x, p["query"])), p["out"])

    left_shapes, right_shapes = (
        dict.fromkeys(("query", "out"), (4, 4)),
        {"query": (4, 2, 2), "out": (2, 2, 4)},
    )
    return in_torch(Plain(left_shapes, left)), in_jax(right, arrays(right_shapes))


def kernels_of_one_size() -> Pair:
    """Kernels all of whose axes are of one size, and one that is turned on the left."""

    def left(m: Any, x: Any) -> Any:
        x = torch.tanh(nn.functional.conv2d(x, m.first, padding=1))
        return nn.functional.conv_transpose2d(x, m.second)

    def right(p: Any, x: Any) -> Any:
        x, numbers = x.transpose(0, 2, 3, 1), ("NHWC", "HWIO", "NHWC")
        x = jnp.tanh(jax.lax.conv_general_dilated(x, p["first"], (1, 1), "SAME", dimension_numbers=numbers))
        kernel = p["second"][::-1, ::-1]
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), [(2, 2)] * 2, dimension_numbers=numbers)

    shapes = {"first": (3, 3, 3, 3), "second": (3, 3, 3, 3)}
    return in_torch(Plain(shapes, left), IMAGE), in_jax(right, arrays(shapes), IMAGE)


def averaged_target() -> Pair:
    """The moving average of an encoder of square layers is computed from both before it is used."""
    shapes = {f"{side}_{n}": (D, D) for side in ("online", "target") for n in ("a", "z")}

    def left(m: Any, x: Any) -> Any:
        new = {n: 0.9 * getattr(m, f"target_{n}") + 0.1 * getattr(m, f"online_{n}") for n in "az"}
        goal = torch.tanh(nn.functional.linear(x, new["z"])) @ new["a"]
        return torch.tanh(nn.functional.linear(x, m.online_z)) @ m.online_a - goal.detach()

    def right(p: Any, x: Any) -> Any:
        mixed = jax.tree.map(lambda t, o: 0.9 * t + 0.1 * o, p["target"], p["online"])

        def encode(w: Any) -> Any:
            return jnp.tanh(x @ w["first"]) @ w["second"]

        return encode(p["online"]) - jax.lax.stop_gradient(encode(mixed))

    made = arrays({f"{s}.{n}": (D, D) for s in ("online", "target") for n in ("first", "second")})
    params = {s: {n: made[f"{s}.{n}"] for n in ("first", "second")} for s in ("online", "target")}
    return in_torch(Plain(shapes, left)), in_jax(right, params)


# --- several of one size -----------------------------------------------------------------------------------


class Shortcut(nn.Module):
    """The shortcut is computed first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.side = nn.Conv2d(3, 8, 1)
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(2, 8) for _ in range(3))
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.2 * torch.randn_like(p))

    def forward(self, x: Any) -> Any:
        short = self.norm3(self.side(x))
        return short + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))


class LinenShortcut(linen.Module):
    """The shortcut is computed last."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        norm = lambda: linen.GroupNorm(num_groups=2, epsilon=1e-5)  # noqa: E731 - as users write it
        y = linen.relu(norm()(linen.Conv(8, (3, 3))(x)))
        y = norm()(linen.Conv(8, (3, 3))(y))
        return y + norm()(linen.Conv(8, (1, 1))(x))


def norms_of_a_shortcut() -> Pair:
    model = LinenShortcut()
    params = model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 3)))
    body = lambda p, x: model.apply(p, x.transpose(0, 2, 3, 1))  # noqa: E731
    return in_torch(Shortcut(), IMAGE), in_jax(body, params, IMAGE)


def gains_of_two_branches() -> Pair:
    """Gains without a name: one before a wide layer, one before a narrow one, in another order."""
    left_shapes = {"a": (D,), "b": (D,), "wide": (D, 6), "narrow": (D, 2)}

    def left(m: Any, x: Any) -> Any:
        return torch.tanh(x * m.a) @ m.wide @ torch.ones(6, 1) + torch.tanh(x * m.b) @ m.narrow @ torch.ones(
            2, 1
        )

    def right(p: Any, x: Any) -> Any:
        last = jnp.tanh(x * p["b"]) @ p["narrow"]
        return last @ jnp.ones((2, 1)) + jnp.tanh(x * p["a"]) @ p["wide"] @ jnp.ones((6, 1))

    def renamed(p: Any, x: Any) -> Any:
        return right({"a": p["v"], "b": p["u"], "wide": p["s"], "narrow": p["t"]}, x)

    shapes = {"u": (D,), "v": (D,), "s": (D, 6), "t": (D, 2)}
    return in_torch(Plain(left_shapes, left)), in_jax(renamed, arrays(shapes))


def actor_and_critic() -> Pair:
    """Two networks behind one trunk, told apart by their last layers only, in another order."""
    shapes = {
        "trunk": (D, 6),
        "pi1": (6, 6),
        "pi2": (6, 6),
        "pi3": (6, 3),
        "v1": (6, 6),
        "v2": (6, 6),
        "v3": (6, 1),
    }

    def left(m: Any, x: Any) -> Any:
        h = torch.tanh(x @ m.trunk)
        policy = torch.tanh(torch.tanh(h @ m.pi1) @ m.pi2) @ m.pi3
        return policy.sum(-1, keepdim=True) + 2 * torch.tanh(torch.tanh(h @ m.v1) @ m.v2) @ m.v3

    def right(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["base"])
        value = jnp.tanh(jnp.tanh(h @ p["l0"]) @ p["l1"]) @ p["l2"]
        return 2 * value + (jnp.tanh(jnp.tanh(h @ p["l3"]) @ p["l4"]) @ p["l5"]).sum(-1, keepdims=True)

    named = {
        "base": (D, 6),
        "l0": (6, 6),
        "l1": (6, 6),
        "l2": (6, 1),
        "l3": (6, 6),
        "l4": (6, 6),
        "l5": (6, 3),
    }
    return in_torch(Plain(shapes, left)), in_jax(right, arrays(named))


def twin_critics() -> Pair:
    """Two equal networks: one after the other on the left, layer by layer on the right."""
    shapes = {f"{q}{i}": (D, D) for q in ("one", "two") for i in range(3)}

    def left(m: Any, x: Any) -> Any:
        def critic(q: str) -> Any:
            h = torch.tanh(x @ getattr(m, f"{q}0"))
            return torch.tanh(h @ getattr(m, f"{q}1")) @ getattr(m, f"{q}2")

        return torch.minimum(critic("one"), critic("two"))

    def right(p: Any, x: Any) -> Any:
        a, b = jnp.tanh(x @ p["s"]), jnp.tanh(x @ p["t"])
        a, b = jnp.tanh(a @ p["u"]), jnp.tanh(b @ p["v"])
        return jnp.minimum(a @ p["w"], b @ p["z"])

    return in_torch(Plain(shapes, left)), in_jax(right, arrays(dict.fromkeys("stuvwz", (D, D))))


PAIRS = [
    used_alike_and_otherwise, zeros_at_first, conv1d_of_gpt2, linear_of_equinox, linear_of_nnx,
    two_of_one_framework, tied_table, table_as_one_hot, layers_of_a_scan, experts_of_a_vmap, heads_of_einsum,
    experts_of_two_layers, taps_of_a_scan, kernels_that_are_rounded,
    kernels_of_one_size, averaged_target, norms_of_a_shortcut, gains_of_two_branches, actor_and_critic,
    twin_critics,
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.__name__)
def test_two_equal_programs_are_the_same(pair: Callable[[], Pair]) -> None:
    report = stablenum.diff(*pair())
    assert report.ok, report.weights
    by_trial = any("share most values" in note for note in report.notes)
    assert by_trial == (pair is experts_of_a_vmap)  # whose router is as large as an expert


def test_the_report_says_which_matrices_are_transposed() -> None:
    weights = stablenum.diff(*used_alike_and_otherwise()).weights
    transposed = {name for name, origin in weights.items() if origin.endswith("transposed")}
    assert transposed == {"second", "fourth"}


class Stack(nn.Module):
    """Residual blocks of two norms and four linear layers, after places that are added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, D))
        self.blocks = nn.ModuleList(nn.ModuleDict(self.block()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def block(self) -> dict[str, nn.Module]:
        linear = {
            "qkv": nn.Linear(D, 6),
            "out": nn.Linear(6, D),
            "up": nn.Linear(D, 8),
            "down": nn.Linear(8, D),
        }
        return {"norm1": nn.LayerNorm(D), "norm2": nn.LayerNorm(D), **linear}

    def forward(self, x: Any) -> Any:
        x = x + self.places
        for b in self.blocks:
            x = x + b["out"](torch.tanh(b["qkv"](b["norm1"](x))))
            x = x + b["down"](torch.tanh(b["up"](b["norm2"](x))))
        return self.head(self.norm(x).mean(dim=1))


class PortedStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.places = nnx.Param(jnp.zeros((5, D)))
        self.blocks = nnx.List(nnx.Dict(self.block(rngs)) for _ in range(2))
        self.norm, self.head = nnx.LayerNorm(D, rngs=rngs), nnx.Linear(D, 3, rngs=rngs)

    def block(self, rngs: nnx.Rngs) -> dict[str, Any]:
        shapes = {"qkv": (D, 6), "out": (6, D), "up": (D, 8), "down": (8, D)}
        norms = {name: nnx.LayerNorm(D, rngs=rngs) for name in ("norm1", "norm2")}
        return norms | {name: nnx.Linear(*shape, rngs=rngs) for name, shape in shapes.items()}

    def __call__(self, x: Any) -> Any:
        x = x + self.places
        for b in self.blocks:
            x = x + b["out"](jnp.tanh(b["qkv"](b["norm1"](x))))
            x = x + b["down"](jnp.tanh(b["up"](b["norm2"](x))))
        return self.head(self.norm(x).mean(axis=1))


def test_equal_blocks_are_mapped_by_name_where_a_fault_hides_what_they_share() -> None:
    """flax's default epsilon is another one, so that no value after the first norm is shared."""
    torch.manual_seed(0)
    right = stablenum_jax.program(lambda m, x: jnp.square(m(x)).mean(), PortedStack(nnx.Rngs(0)), X)
    report = stablenum.diff(in_torch(Stack()), right)
    layers = [[n.split(".")[:3] for n in p] for p in report.weights.items() if p[0].startswith("blocks")]
    assert all(mine == theirs for mine, theirs in layers)
    assert {d.causes[0].code for d in report.differences} == {"epsilon_value"}


# --- weights that may be exchanged -------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lead = nn.Linear(4, 4)
        self.gate, self.up = (nn.Linear(4, 6, bias=False) for _ in range(2))
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.lead(x))
        return self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def gated(active: str, other: str) -> Any:
    """Return the report on a port whose weights have other names; ``active`` is the one before silu."""
    x = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
    branches = dict.fromkeys(sorted((active, other)), (4, 6))
    shapes: dict[str, tuple[int, ...]] = {"a_lead": (4, 4), "a_bias": (4,), **branches, "out": (6, 4)}

    def loss_fn(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["a_lead"] + p["a_bias"])
        return jnp.square((jax.nn.silu(h @ p[active]) * (h @ p[other])) @ p["out"]).mean()

    model = Gated()
    left = stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(x), model=model)
    right = stablenum_jax.program(loss_fn, {k: jnp.zeros(s) for k, s in shapes.items()}, x)
    return stablenum.diff(left, right)


@pytest.mark.parametrize(("active", "other"), [("wu", "wg"), ("wn", "wm")])
def test_weights_that_fit_against_their_names_or_order_are_listed_first_and_noted(
    active: str, other: str
) -> None:
    report = gated(active, other)
    assert report.ok
    assert sorted(list(report.weights)[:2]) == sorted((active, other))
    assert report.weights[active] == "gate.weight, transposed"
    (note,) = report.notes
    assert f"{active} <- gate.weight, transposed" in note
    assert "not their names" in note


@pytest.mark.parametrize(("active", "other"), [("wg", "wu"), ("wm", "wn"), ("z_gate", "a_up")])
def test_weights_that_names_or_order_tell_apart_are_not_noted(active: str, other: str) -> None:
    report = gated(active, other)
    assert report.ok
    assert report.notes == ()
    assert next(iter(report.weights)) not in (active, other)


# --- kernels that patches in a row are multiplied by -------------------------------------------------------


@pytest.mark.parametrize(
    "axes", [(0, 1, 3, 2, 4, 5), (0, 1, 3, 5, 2, 4), (0, 1, 3, 5, 4, 2), (0, 1, 3, 4, 2, 5)]
)
def test_the_order_of_a_patch_is_found_by_trial(axes: tuple[int, ...]) -> None:
    model = of_modules(0, stem=nn.Conv2d(3, 7, 2, stride=2))

    def patches(p: Any, x: Any) -> Any:
        b, c, h, w = x.shape
        y = x.transpose(0, 2, 3, 1).reshape(b, h // 2, 2, w // 2, 2, c).transpose(axes)
        return jnp.tanh(y.reshape(b, h // 2, w // 2, -1) @ p["kernel"] + p["bias"])

    left = stablenum_torch.program(
        lambda x: model["stem"](x).tanh().square().mean(), torch.tensor(IMAGE), model=model
    )
    report = stablenum.diff(left, in_jax(patches, arrays({"kernel": (12, 7), "bias": (7,)}), IMAGE))
    assert report.ok, str(report)


def test_biases_that_the_other_side_stacks_lie_one_after_another() -> None:
    """Their number divides their length, and is not the larger side of the stack."""
    width = 6
    left = of_modules(1, gate=nn.Linear(D, width), up=nn.Linear(D, width), down=nn.Linear(width, 1))

    def body(m: Any, x: Any) -> Any:
        return m["down"](torch.nn.functional.silu(m["gate"](x)) * m["up"](x))

    def loss(p: Any, x: Any) -> Any:
        gate, up = jnp.moveaxis(jnp.einsum("btd,dcf->btcf", x, p["wi"]) + p["bi"], 2, 0)
        return jnp.mean(((jax.nn.silu(gate) * up) @ p["wd"] + p["bd"]) ** 2)

    params = arrays({"wi": (D, 2, width), "bi": (2, width), "wd": (width, 1), "bd": (1,)})
    report = stablenum.diff(
        stablenum_torch.program(lambda x: body(left, x).square().mean(), torch.tensor(X), model=left),
        stablenum_jax.program(loss, params, X),
    )
    assert report.ok, str(report)


class BiasInABuffer(nn.Module):
    """A layer whose bias is not trained, as that of BART's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D, bias=False)
        self.register_buffer("final_bias", torch.zeros(1, D))

    def forward(self, x: Any) -> Any:
        return self.proj(x) + self.final_bias


def test_a_parameter_may_come_from_a_buffer_of_its_name() -> None:
    model = BiasInABuffer()
    params = {
        "proj": {"kernel": np.zeros((D, D), np.float32)},
        "final_bias": np.ones((1, D), np.float32),
    }
    report = stablenum.diff(
        stablenum_torch.program(lambda x: torch.sin(model(x)).mean(), torch.tensor(X), model=model),
        stablenum_jax.program(
            lambda p, x: jnp.mean(jnp.sin(x @ p["proj"]["kernel"] + p["final_bias"])), params, X
        ),
    )
    assert report.ok, str(report)
    assert report.weights["final_bias"].startswith("final_bias")
    assert any("keeps final_bias as a buffer" in note for note in report.notes)


class Block(nn.Module):
    """A residual block whose branches have kernels of one shape."""

    def __init__(self) -> None:
        super().__init__()
        for i in (1, 2, 3):
            self.add_module(f"conv{i}", nn.Conv2d(6, 6, 1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(6))
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Any) -> Any:
        main = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(main + self.bn3(self.conv3(x)))


class ShortcutFirst(nnx.Module):
    """Its port, which computes the shortcut first."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        for i in (1, 2, 3):
            setattr(self, f"conv{i}", nnx.Conv(6, 6, (1, 1), use_bias=False, rngs=rngs))
            setattr(self, f"bn{i}", nnx.BatchNorm(6, momentum=0.9, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        shortcut = self.bn3(self.conv3(x))
        return jax.nn.relu(self.bn2(self.conv2(jax.nn.relu(self.bn1(self.conv1(x))))) + shortcut)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_full_names_count_for_more_than_the_order_of_use(factor: float) -> None:
    """Also if a difference before the block leaves nothing that the sides share in it."""
    torch.manual_seed(0)
    model, image = Block(), RNG.normal(size=(4, 6, 5, 5)).astype(np.float32)

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model(factor * jnp.transpose(x, (0, 2, 3, 1))) ** 2)

    report = stablenum.diff(
        stablenum_torch.program(lambda x: model(1.0 * x).square().mean(), torch.tensor(image), model=model),
        stablenum_jax.program(loss, ShortcutFirst(nnx.Rngs(0)), image),
    )
    assert report.ok == (factor == 1.0), str(report)
    own = {name: str(source).partition(".")[0] for name, source in report.weights.items()}
    assert own == {name: name.partition(".")[0] for name in report.weights}
