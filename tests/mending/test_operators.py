"""Kinds of change: each turns a planted mistake back."""

import jax
import jax.numpy as jnp
import libcst as cst
import optax
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from stablenum.diagnosis.diff.mending.clues import Clues, clues_of, short
from stablenum.diagnosis.diff.mending.names import Held, names_seen
from stablenum.diagnosis.diff.mending.operators import OPERATORS
from stablenum.diagnosis.edits.tree import Tree


class Block:
    def __call__(self, x, train=False):
        return x


NAMES = {
    "jax": jax, "jnp": jnp, "optax": optax, "torch": torch, "F": F, "HEADS": 4, "is_matrix": len,
    "Block": Block,
}  # fmt: skip
A23, A32 = Held("array", (2, 3)), Held("array", (3, 2))
MASK = {"valid": Held("array", (2, 3), logical=True)}
ADAM_L2 = "optax.chain(optax.add_decayed_weights(w), optax.adam(r, b1=b))"
LIMIT = {"forgotten": ("LIMIT",)}


def changed(kind, text, clues):
    """Return what a kind of change makes of an expression and of its parts."""
    tree = Tree(f"{text}\n")
    found = []
    for node in tree.expressions(tree.statement_at(1)):
        parent = tree.parent(node)
        if kind == "function" or not (isinstance(parent, cst.Call) and parent.func is node):
            found += [tree.with_node(node, new).rstrip("\n") for new in OPERATORS[kind](node, clues)]
    return found


@pytest.mark.parametrize(
    ("kind", "before", "after", "clues"),
    [
        ("number", "x + 1e-6", "x + 1e-05", {"old": (1e-6,), "new": (1e-5,)}),
        ("number", "f(x, axis=-2)", "f(x, axis=-1)", {}),
        ("number", "jnp.tril(m, k=1)", "jnp.tril(m, k=0)", {}),
        ("number", "f(x, nesterov=True)", "f(x, nesterov=False)", {}),
        ("number", "0.1 * m", "0.01 * m", {"old": (0.9,), "new": (0.99,)}),  # of 1 - 0.1
        ("number", "x[1:]", "x[0:]", {}),
        ("word", 'f(x, padding="SAME")', 'f(x, padding="VALID")', {}),
        ("word", 'f(x, padding="SAME")', "f(x, padding=((1, 1), (1, 1)))", {}),
        ("word", "f(x, reduction='mean')", 'f(x, reduction="sum")', {}),
        ("keyword", "jax.nn.gelu(x)", "jax.nn.gelu(x, approximate=False)", {}),
        ("keyword", "jax.nn.gelu(x, approximate=True)", "jax.nn.gelu(x)", {}),
        (
            "keyword",
            "optax.adamw(1e-3)",
            "optax.adamw(1e-3, weight_decay=0.01)",
            {"old": (1e-4,), "new": (0.01,)},
        ),
        (
            "keyword",
            "optax.adamw(1e-3)",
            "optax.adamw(1e-3, mask=is_matrix)",
            {"unused": ("is_matrix",)},
        ),
        ("keyword", "optax.sgd(0.1, momentum=0.9)", "optax.sgd(0.1, momentum=0.9, nesterov=True)", {}),
        ("keyword", "jnp.std(x, axis=1)", "jnp.std(x, axis=1, ddof=1)", {}),
        ("function", "jnp.mean(x)", "jnp.sum(x)", {}),
        ("function", "F.gelu(x)", "F.silu(x)", {}),
        ("function", "optax.ema(0.9)", "optax.trace(0.9)", {}),
        ("variable", "q * dim ** -0.5", "q * (dim // HEADS) ** -0.5", {}),
        ("variable", "f(k, q)", "f(q, q)", {"variables": ("q", "k")}),
        ("variable", "f(k, q)", "f(v, q)", {"variables": ("v", "m"), "held": {"k": A23, "v": A23, "m": A32}}),
        ("exchange", 'jnp.einsum("bti,oi->bto", x, w)', 'jnp.einsum("bti,io->bto", x, w)', {}),
        ("word", 'f(x, indexing="ij")', 'f(x, indexing="xy")', {}),
        ("number", "f(x, axis=(1, 2))", "f(x, axis=(0, 1))", {}),
        ("keyword", "optax.adam(1e-3)", "optax.adam(1e-3, eps=EPS)", {"forgotten": ("EPS",)}),
        ("keyword", "Block(4)(x)", "Block(4)(x, train=train)", {"variables": ("train",)}),
        ("function", "x.at[i].set(y)", "x.at[i].add(y)", {}),
        ("operand", "f(x)", "f(x * HEADS ** 0.5)", {"operands": (("mul", 2.0),)}),
        ("operand", "f(x)", "f(x / 0.3)", {"operands": (("div", 0.3),)}),
        ("mask", "f(x)", 'f(jnp.where(valid, x, float("-inf")))', {"variables": ("valid",), "held": MASK}),
        ("clip", "optax.sgd(0.1)", "optax.chain(optax.clip_by_global_norm(LIMIT), optax.sgd(0.1))", LIMIT),
        ("clip", "optax.chain(a)", "optax.chain(optax.clip_by_global_norm(LIMIT), a)", LIMIT),
        ("operand", "f(x)", "f(x * self.scale)", {"kept": ("scale",)}),
        ("keyword", "x.std(axis=0)", "x.std(axis=0, ddof=1)", {}),
        ("keyword", "F.gelu(x)", 'F.gelu(x, approximate="tanh")', {"framework": "torch"}),
        ("decay", "optax.adamw(r, weight_decay=w, b1=b)", ADAM_L2, {}),
        ("decay", ADAM_L2, "optax.adamw(r, b1=b, weight_decay=w)", {}),
        (
            "wrap",
            "jax.nn.one_hot(y, 3)",
            "optax.smooth_labels(jax.nn.one_hot(y, 3), 0.1)",
            {"code": "label_smoothing", "new": (0.1,)},
        ),
        ("exchange", "a - b", "b - a", {}),
        ("exchange", "jnp.concatenate([a, b])", "jnp.concatenate([b, a])", {}),
        ("exchange", "m[:, None, :, None]", "m[:, None, None, :]", {}),
        ("exchange", "x.reshape(n, t, h, d)", "x.reshape(n, h, t, d)", {}),
        ("operator", "i > j", "i >= j", {}),
        ("operator", "a + b", "a - b", {}),
        ("drop", "jax.lax.stop_gradient(x)", "x", {}),
        ("drop", "x[::-1]", "x", {}),
        ("drop", "total / count", "total", {}),
        ("drop", "1.0 - jnp.concatenate([d[1:], d[:1]])", "1.0 - d", {}),
        ("drop", "optax.chain(a, b)", "optax.chain(b)", {}),
        ("move", "x / (jnp.sqrt(v) + eps)", "x / jnp.sqrt(v + eps)", {}),
        ("move", "x / jnp.sqrt(v + eps)", "x / (jnp.sqrt(v) + eps)", {}),
        ("move", "(a + b) * c", "a + (b * c)", {}),
        ("stop", "jnp.mean(x)", "jnp.mean(jax.lax.stop_gradient(x))", {}),
        ("stop", "torch.mean(x)", "torch.mean(x.detach())", {"framework": "torch"}),
        ("unstop", "jnp.mean(jax.lax.stop_gradient(x))", "jnp.mean(x)", {}),
        ("unstop", "torch.mean(x.detach())", "torch.mean(x)", {"framework": "torch"}),
        ("straight_through", "q", "z + jax.lax.stop_gradient(q - z)", {"variables": ("z",)}),
        ("turn", "x @ w", "x @ w.T", {}),
        ("turn", "f(x)", "f(x[::-1])", {}),
        ("wrap", "f(x)", "f(jax.nn.relu(x))", {"functions": ("relu",)}),
        ("wrap", "f(x)", "f(x * 0.5)", {"said": (0.5,)}),
    ],
)
def test_a_mistake_is_turned_back(kind, before, after, clues):
    found = changed(kind, before, Clues(namespace=NAMES, **clues))
    assert after in found
    for text in found:
        compile(text, "<changed>", "exec")


@pytest.mark.parametrize("kind", sorted(OPERATORS))
@pytest.mark.parametrize(
    "text", ["f()", "()", "lambda x: x", "'a' 'b'", "[*a, b]", "f(*a, **b)", "x if y else z"]
)
def test_expressions_of_any_form_are_taken(kind, text):
    clues = Clues(
        namespace=NAMES, variables=("q",), said=(2.0,), old=(1.0,), new=(2.0,), unused=("is_matrix",)
    )
    for found in changed(kind, text, clues):
        compile(found, "<changed>", "exec")


def test_numbers_of_the_lines_come_first_and_those_of_both_sides_are_no_clue():
    clues = clues_of(
        "decay_coupling",
        None,
        ({1e-3, 1e-4}, {1e-3, 0.99999}),
        ["optimizer = AdamW(lr=1e-3, weight_decay=0.01)"],
        "optax.add_decayed_weights: mul",
        [],
        {},
        "jax",
    )
    assert clues.old == (1e-4,)
    assert clues.new[:2] == (1e-3, 0.01)
    assert 0.99999 in clues.new
    assert clues.functions == ("AdamW", "mul")
    assert short(float(torch.tensor(0.1))) == 0.1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("optax.sgd(\n    0.1,\n)", "optax.sgd(\n    0.1, nesterov=True,\n)"),
        ("optax.sgd(\n    0.1\n)", "optax.sgd(\n    0.1, nesterov=True\n)"),
        ("optax.sgd()", "optax.sgd(nesterov=True)"),
    ],
)
def test_a_keyword_leaves_the_end_of_a_call_as_it_is(before, after):
    assert after in changed("keyword", before, Clues(namespace=NAMES))


def test_variables_that_cannot_stand_there_are_not_offered():
    held = {"x": A23, "y": A32, "n": Held("number"), "p": Held("other"), "u": Held()}
    clues = Clues(namespace=NAMES, variables=("y", "n", "p", "u"), held=held)
    assert changed("variable", "f(x)", clues) == ["f(u)"]
    assert "f(p.T)" not in changed("turn", "f(p)", clues)


def test_names_are_watched_while_functions_run(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("def run(x, n):\n    for y in (x, x[0], n):\n        z = y\n    return z\n")
    code, names = compile(path.read_text(), str(path), "exec"), {}
    exec(code, names)
    with names_seen([str(path.resolve())]) as seen:
        names["run"](torch.ones(2, 3) > 0, 2)
    found = seen[str(path.resolve()), "run"]
    assert found["x"] == Held("array", (2, 3), logical=True)
    assert found["y"] == found["z"] == Held()
    assert found["n"] == Held("number")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("kind", sorted(OPERATORS))
def test_a_call_over_several_lines_is_taken_as_a_whole(kind, framework):
    held = {"m": Held("array", (2, 3), logical=True)}
    clues = Clues(
        namespace=NAMES, framework=framework, variables=("m",), held=held, new=(2.0,), forgotten=("LIMIT",),
        operands=(("mul", 2.0),), kept=("scale",), code="label_smoothing",
    )  # fmt: skip
    for text in ("f(\n    x\n    .square()\n    .sum()\n)", "optax.sgd(\n    0.1,\n)"):
        for found in changed(kind, text, clues):
            compile(found, "<changed>", "exec")


def test_infinite_numbers_of_the_other_side_are_no_clues():
    clues = clues_of("", (1.0, float("inf")), ((), ()), [], None, [("add", float("-inf"))], {}, "jax")
    assert clues.operands == ()
    assert clues.ratio == 0.0


def test_a_name_that_holds_what_has_no_shape_yet_is_no_array(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("def run(layer):\n    weight = layer.weight\n    return weight\n")
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with names_seen([str(path.resolve())]) as seen:
        names["run"](torch.nn.LazyLinear(2))
    assert seen[str(path.resolve()), "run"]["weight"] == Held("other")


def test_arrays_and_numbers_or_words_are_not_exchanged():
    clues = Clues(namespace=NAMES, held={"x": A23, "y": A32, "n": Held("number")})
    assert changed("exchange", "f(x, y)", clues) == ["f(y, x)"]
    assert not changed("exchange", "f(x, n)", clues)
    assert not changed("exchange", 'f(x, "mean")', clues)
