"""What ``docs/porting.md`` says was computed, and what it recommends is code of the pairs."""

from __future__ import annotations

import re
from pathlib import Path

import equinox
import flax
import jax
import optax
import pytest
import torch

import stablenum
from tests.pairs.real import layers, optimizers
from tests.pairs.real.formulas import distance, trained

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "pairs" / "real"
PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
TABLES = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line[:2] == "| "
]


def short(x: float, digits: int) -> str:
    """Return a number as the page writes it."""
    return f"{float(f'{x:.{digits}g}'):g}".replace("e-0", "e-")


def joined(code: str) -> str:
    """Code without its space, and without the commas before closing brackets."""
    return re.sub(r",([)}\]])", r"\1", re.sub(r"\s+", "", code))


def test_what_makes_two_calls_agree_is_code_of_the_pairs() -> None:
    names = ("optimizers", "layers")
    tested = joined("".join((HERE / f"{name}.py").read_text(encoding="utf-8") for name in names))
    found = [code for row in TABLES for code in re.findall(r"`([^`]+)`", row[-1])]
    assert len(found) > 30
    assert [code for code in found if joined(code) not in tested] == []


def test_the_functions_of_the_page_are_those_of_the_pairs() -> None:
    own = joined((HERE / "optimizers.py").read_text(encoding="utf-8"))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    blocks = [block for block in blocks if "assert" not in block]  # which compare by themselves
    functions = re.findall(r"^def .*?(?=^\S|\Z)", "".join(blocks), re.M | re.S)
    assert len(functions) == 2
    # Annotations are left out on the page.
    plain = re.sub(r"(?<=[(,\w]):(?:float|Any)|->[\w.]+", "", own)
    assert [f for f in functions if joined(f) not in plain] == []


def test_the_versions_are_named() -> None:
    libraries = {"PyTorch": torch, "JAX": jax, "flax": flax, "optax": optax, "equinox": equinox}
    for name in libraries:
        assert re.search(rf"\b{name} \d+\.\d+\.\d+", PAGE), name


@pytest.mark.parametrize("name", [n for n, p in optimizers.PAIRS.items() if p.cause != ""])
def test_the_distance_of_two_optimizers_is_measured(name: str) -> None:
    pair = optimizers.PAIRS[name]
    left, right = (trained(rule, 20, matrices=pair.matrices) for rule in pair.formulas)
    assert any(f"{short(100 * distance(left, right), 2)}%" in row for row in TABLES)


# The encoder differs by the epsilon of its norms.
OTHERS = ("TransformerEncoderLayer, linen", "attention mask, linen, a row that sees nothing")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, p in layers.PAIRS.items() if p.cause != "" and n not in OTHERS])
def test_the_difference_of_two_layers_is_measured(name: str) -> None:
    pair = layers.PAIRS[name]
    found = stablenum.diff(pair.left(), pair.right(), weights=pair.weights).first
    assert found is not None
    assert any(short(found.error, 1) in row for row in TABLES)
