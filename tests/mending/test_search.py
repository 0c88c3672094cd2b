"""Planted mistakes are found and turned back, in this process."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stablenum.commands.diff.pair import Origin, built, load_pair
from stablenum.diagnosis.diff.compare import examined
from stablenum.diagnosis.diff.mending.search import Mending, mended
from stablenum.diagnosis.diff.mending.trials import Trials, agree_elsewhere
from tests.mending.ports import with_mistakes
from tests.selection import only

EPSILON = "jnp.sqrt(var + 1e-3)", "jnp.sqrt(var + 1e-6)"
AXIS = "softmax(out, axis=-1)", "softmax(out, axis=0)"
GELU = ", approximate=False)", ")"
NESTEROV = "optax.sgd(RATE, momentum=0.9)", "optax.sgd(RATE, momentum=0.9, nesterov=True)"
STOPPED = "hidden @ params", "jax.lax.stop_gradient(hidden) @ params"
OUTSIDE = "jnp.sqrt(var + 1e-3)", "(jnp.sqrt(var) + 1e-3)"


def mend(tmp_path: Path, text: str, seconds: float = 300.0) -> tuple[Mending, str]:
    """What is found for a pair, and the text that comes out."""
    path = tmp_path / "a_port.py"
    path.write_text(text)
    linecache.checkcache()
    pair = load_pair(path)
    origin, real = Origin(path, "right"), str(path.resolve())

    def again(texts: Mapping[str, str]) -> Any:
        return examined(pair.left, built(origin, texts).program)

    found = mended(
        examined(pair.left, pair.right),
        "match",
        {real: text},
        lambda texts: built(origin, texts),
        again,
        seconds=seconds,
        say=lambda _: None,
    )
    return found, found.rewrites[-1].after if found.rewrites else text


@pytest.mark.parametrize(
    "mistake",
    only([GELU, NESTEROV], [EPSILON, AXIS, GELU, NESTEROV, STOPPED, OUTSIDE]),
)
def test_a_mistake_is_mended_as_its_author_would(tmp_path: Path, mistake: tuple[str, str]) -> None:
    found, text = mend(tmp_path, with_mistakes(mistake))
    assert found.agrees
    assert len(found.mended) == 1
    written = {
        EPSILON: with_mistakes(("jnp.sqrt(var + 1e-3)", "jnp.sqrt(var + 0.001)")),
        NESTEROV: with_mistakes((NESTEROV[0], NESTEROV[1].replace("True", "False"))),
    }
    assert text.replace("axis=1)", "axis=-1)") == written.get(mistake, with_mistakes())


@pytest.mark.slow
def test_mistakes_are_mended_one_after_another(tmp_path: Path) -> None:
    found, _ = mend(tmp_path, with_mistakes(EPSILON, AXIS, GELU))
    assert found.agrees
    assert [m.rewrite.kind for m in found.mended] == ["number", "keyword", "number"]


def test_to_compare_less_does_not_mend(tmp_path: Path) -> None:
    """Without an optimizer, no update differs."""
    path = tmp_path / "a_port.py"
    path.write_text(with_mistakes(("optax.sgd(RATE, momentum=0.9)", "optax.sgd(RATE * 1.07, momentum=0.9)")))
    pair = load_pair(path)
    report, comparison = examined(pair.left, pair.right)
    assert not report.ok
    less = path.read_text().replace("jnp.asarray(x), optimizer=optimizer)", "jnp.asarray(x))")
    assert less != path.read_text()
    program = built(Origin(path, "right"), {str(path.resolve()): less}).program
    assert examined(pair.left, program)[0].ok
    assert Trials(comparison, "match").of(program) is None


def test_nothing_is_offered_where_no_small_change_helps(tmp_path: Path) -> None:
    mistake = 'params["up"], app', '(params["up"] * 2 + jnp.sin(params["up"])), app'
    found, _ = mend(tmp_path, with_mistakes(mistake), seconds=3.0)
    assert not found.agrees
    assert not found.mended
    assert found.ended == "the time for it ran out"


MOMENTUM = "optax.sgd(RATE, momentum=0.9)"
SCHEDULED = "optax.sgd(optax.linear_schedule(RATE, RATE / 2, 5), momentum=0.9)"
CORRECTED = "optax.chain(optax.ema(0.9), optax.scale(-RATE))"


@pytest.mark.parametrize(
    ("mended", "before", "agrees"),
    [
        (MOMENTUM, MOMENTUM, True),
        ("optax.sgd(RATE)", "optax.sgd(RATE)", False),  # in the first step, a momentum does nothing
        (SCHEDULED, SCHEDULED, True),  # by a factor in the second step: the schedule of PyTorch is elsewhere
        (CORRECTED, CORRECTED.replace("0.9", "0.9, debias=False"), False),  # the change makes the factor
    ],
    ids=["equal", "no momentum", "a schedule", "a correction"],
)
def test_programs_must_agree_in_later_steps_too(
    tmp_path: Path, mended: str, before: str, agrees: bool
) -> None:
    path = tmp_path / "a_port.py"
    path.write_text(with_mistakes((MOMENTUM, mended)))
    pair = load_pair(path)
    report, comparison = examined(pair.left, pair.right)
    assert report.ok
    unchanged = built(Origin(path, "right"), {str(path.resolve()): with_mistakes((MOMENTUM, before))}).program
    assert agree_elsewhere(comparison.left, comparison.right, comparison.weights, unchanged) is agrees
