"""The map of the weights that a caller gives: beside the match, again from a report, or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.weights.weights import UnmappedError
from tests.parity.test_diff import run

V, D, H = 7, 4, 2
TOKENS = np.random.default_rng(0).integers(0, V, (3, 5))
NEXT = np.roll(TOKENS, -1, axis=1)


class Model(nn.Module):
    """An embedding, attention without biases, a layer, and a head that may be the embedding's matrix."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.up = nn.Linear(D, D)
        if not tied:
            self.head = nn.Linear(D, V, bias=False)

    def forward(self, x: Any) -> Any:
        h = self.emb(x)
        q, k, v = (f(h).unflatten(-1, (H, D // H)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(a.transpose(1, 2).flatten(2))
        h = h + nn.functional.gelu(self.up(h))
        return self.head(h) if hasattr(self, "head") else h @ self.emb.weight.T


def original(*, tied: bool = True, optimizer: Any = None) -> Any:
    torch.manual_seed(0)
    model = Model(tied=tied)
    made = None if optimizer is None else optimizer(model.parameters())

    def loss_fn(x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    x, y = torch.tensor(TOKENS), torch.tensor(NEXT)
    return stablenum_torch.program(loss_fn, x, y, model=model, optimizer=made)


def port(
    *,
    fused: bool = False,
    approximate: bool = False,
    detached: bool = False,
    bias: bool = False,
    **options: Any,
) -> Any:
    """The port, whose head is always its own."""
    shapes = {"embedding": (V, D), "o": (D, D), "up": (D, D), "up_bias": (D,), "head": (D, V)}
    shapes |= {"qkv": (D, 3 * D)} if fused else dict.fromkeys("qkv", (D, D))
    shapes |= {"extra": (V,)} if bias else {}
    rng = np.random.default_rng(1)
    params = {n: jnp.asarray(rng.normal(size=s) * (n != "extra"), jnp.float32) for n, s in shapes.items()}

    def loss_fn(p: Any, x: Any, y: Any) -> Any:
        h = p["embedding"][x]
        parts = jnp.split(h @ p["qkv"], 3, axis=-1) if fused else [h @ p[n] for n in "qkv"]
        q, k, v = (part.reshape(3, 5, H, D // H) for part in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (D // H) ** 0.5
        scores = jnp.where(jnp.tri(5, dtype=bool), scores, -jnp.inf)
        a = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
        h = h + a @ p["o"]
        h = h + jax.nn.gelu(h @ p["up"] + p["up_bias"], approximate=approximate)
        head = jax.lax.stop_gradient(p["head"]) if detached else p["head"]
        logits = h @ head + (p["extra"] if bias else 0.0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return stablenum_jax.program(loss_fn, params, TOKENS, NEXT, **options)


HEAD = {"head": "emb.weight"}


# --- entries beside the match ------------------------------------------------------------------------------


def test_an_untied_head_stops_with_the_entry_that_is_missing() -> None:
    with pytest.raises(UnmappedError) as caught:
        stablenum.diff(original(), port())
    assert "weights=('match', {'head': 'emb.weight'})" in str(caught.value)


def test_an_entry_beside_the_match_leaves_the_rest_to_it() -> None:
    report = stablenum.diff(original(), port(), weights=("match", HEAD))
    assert report.ok, report
    assert report.weights["head"] == "emb.weight, transposed"
    assert report.weights["q"] == "q.weight, transposed"
    (note,) = report.notes
    assert "emb.weight, which the left program trains as one, goes to embedding and head" in note
    assert "the sum of their gradients" in note


def test_the_untied_head_hides_no_difference() -> None:
    report = stablenum.diff(original(), port(approximate=True), weights=("match", HEAD))
    assert [cause.code for cause in report.causes] == ["gelu_variant"]
    assert len(report.differences) == 1
    stopped = stablenum.diff(original(), port(detached=True), weights=("match", HEAD))
    assert stopped.causes[0].code == "stopped_gradient", stopped


def test_updates_of_an_untied_head_are_not_compared_and_others_are() -> None:
    def adam(p: Any) -> Any:
        return torch.optim.Adam(p, lr=1e-2)

    same = stablenum.diff(original(optimizer=adam), port(optimizer=optax.adam(1e-2)), weights=("match", HEAD))
    assert same.ok, same
    other = stablenum.diff(
        original(optimizer=adam), port(optimizer=optax.adam(2e-2)), weights=("match", HEAD)
    )
    assert other.first is not None
    assert other.first.result.endswith("after the update")


def test_an_entry_takes_the_place_of_what_the_match_finds() -> None:
    """What an entry names is not given to another parameter, if all find something without it."""
    weights = ("match", {"head": "head.weight", "q": "k.weight"})
    report = stablenum.diff(original(tied=False), port(), weights=weights)
    assert (report.weights["q"], report.weights["k"]) == ("k.weight, transposed", "q.weight, transposed")
    assert not report.ok


def test_an_entry_may_leave_a_parameter_alone() -> None:
    with pytest.raises(UnmappedError, match="extra"):
        stablenum.diff(original(tied=False), port(bias=True))
    report = stablenum.diff(original(tied=False), port(bias=True), weights=("match", {"extra": None}))
    assert report.ok, report
    assert "extra" not in report.weights
    assert any("extra of the right program, which keeps its own values" in note for note in report.notes)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("match", {"heads": "emb.weight"}), "'heads', which is not a parameter of the right"),
        (("match", {"head": "emb"}), "'emb', which is not a parameter of the left"),
        (("match", {"head": "up.bias"}), "no transposition or reshape"),
        (("as they are", {"head": "emb.weight"}), "weights must be"),
        (("match", "head"), "weights must be"),
        (("match",), "weights must be"),
        ({"head": 3}, "weights must be"),
    ],
)
def test_a_wrong_entry_is_refused(weights: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stablenum.diff(original(), port(), weights=weights)


FILE = """
import torch
import stablenum_torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
    def forward(self, x):
        return self.emb(x) @ self.emb.weight.T

class Untied(Tied):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
    def forward(self, x):
        return self.head(self.emb(x))

def made(model):
    x = torch.arange(7)
    return stablenum_torch.program(lambda: nn.functional.cross_entropy(model(x), x.flip(0)), model=model)

def left():
    return made(Tied())

def right():
    return made(Untied())
"""


def test_the_file_of_the_command_may_define_weights(tmp_path: Path) -> None:
    stopped = run(tmp_path, FILE)
    said = " ".join(stopped.stderr.replace("│", " ").split())
    assert stopped.returncode == 2
    assert "('match', {'head.weight': 'emb.weight'})" in said
    assert "PAIR.py may define weights" in said
    result = run(tmp_path, FILE + '\nweights = ("match", {"head.weight": "emb.weight"})\n')
    assert result.returncode == 0, result.stdout + result.stderr
    assert "goes to emb.weight and head.weight" in result.stdout
    result = run(tmp_path, FILE + "\nweights = 3\n")
    assert result.returncode == 2
    assert "weights must be" in " ".join(result.stderr.replace("│", " ").split())


def test_a_head_that_only_the_port_ties_is_noted() -> None:
    torch.manual_seed(0)
    tied = Model(tied=True)
    x, y = torch.tensor(TOKENS), torch.tensor(NEXT)
    right = stablenum_torch.program(
        lambda: nn.functional.cross_entropy(tied(x).flatten(0, 1), y.flatten()), model=tied
    )
    report = stablenum.diff(original(tied=False), right)
    assert not report.ok
    assert "No parameter of the right program comes from these of the left one: head.weight." in report.notes


# --- the map of a report -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_the_map_of_a_report_can_be_given_again(*, fused: bool) -> None:
    first = stablenum.diff(original(tied=False), port(fused=fused))
    assert first.ok, first
    again = stablenum.diff(original(tied=False), port(fused=fused), weights=first.weights)
    assert again.ok
    assert again.weights == first.weights
    assert not again.notes


def test_the_map_of_a_report_can_be_changed_by_hand() -> None:
    first = stablenum.diff(original(tied=False), port())
    changed = {**first.weights, "q": first.weights["k"], "k": first.weights["q"]}
    report = stablenum.diff(original(tied=False), port(), weights=changed)
    assert not report.ok
    assert report.weights["q"] == "k.weight, transposed"


def test_parts_of_a_fused_matrix_and_the_map_of_a_function_go_round() -> None:
    fused = stablenum.diff(port(fused=True), original(tied=False))
    assert fused.weights["q.weight"] == "qkv, part 1 of 3, transposed"
    assert stablenum.diff(port(fused=True), original(tied=False), weights=fused.weights).ok
    function = stablenum.diff(original(tied=False), port(), weights=right_ones)
    assert (function.weights["o"], function.weights["up_bias"]) == ("o.weight, transposed", "up.bias")
    assert stablenum.diff(original(tied=False), port(), weights=function.weights).ok


def test_words_that_were_copied_are_refused_with_what_to_give() -> None:
    with pytest.raises(
        ValueError, match=r"'q\.weight, transposed', which is not a parameter .*report\.weights"
    ):
        stablenum.diff(original(tied=False), port(), weights={"q": "q.weight, transposed"})


def test_the_map_of_a_report_of_other_programs_is_refused() -> None:
    first = stablenum.diff(port(fused=True), original(tied=False))
    with pytest.raises(ValueError, match=r"report of other programs|not a parameter of the left"):
        stablenum.diff(original(tied=False), original(tied=False), weights=first.weights)


# --- functions that are wrong ------------------------------------------------------------------------------


def right_ones(a: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of the port; only the number of entries of each has to fit."""
    found = {n: a[f"{n}.weight"].T.ravel() for n in ("q", "k", "v", "o", "up", "head")}
    return {**found, "embedding": a["emb.weight"], "up_bias": a["up.bias"]}


def exchanged(a: Mapping[str, Any]) -> dict[str, Any]:
    return {**right_ones(a), "q": a["k.weight"].T, "k": a["q.weight"].T}


def straight(a: Mapping[str, Any]) -> dict[str, Any]:
    return {**right_ones(a), "o": a["o.weight"]}


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (exchanged, ["q is what the match gives k", "k is what the match gives q"]),
        (straight, ["o is transposed"]),
    ],
)
def test_a_note_names_what_a_function_gives_otherwise_than_the_match(
    function: Any, said: list[str], *, approximate: bool
) -> None:
    report = stablenum.diff(original(tied=False), port(approximate=approximate), weights=function)
    notes = [note for note in report.notes if "the match" in note]
    assert len(notes) == 1, report
    assert all(words in notes[0] for words in said), notes
    assert ("the forward passes agree" in notes[0]) is not approximate


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="the function given as weights failed: KeyError: 'no'"):
        stablenum.diff(original(tied=False), port(), weights=lambda a: {"q": a["no"]})


def test_a_right_function_gets_no_note() -> None:
    for approximate in (False, True):
        report = stablenum.diff(original(tied=False), port(approximate=approximate), weights=right_ones)
        assert report.ok is not approximate
        assert not report.notes
