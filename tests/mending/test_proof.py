"""What the proof does not take for one: other modules, other code of both sides, other random numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from stablenum.commands.diff.pair import Origin, built
from stablenum.commands.diff.proof import Proof, Task, proof_of
from stablenum.diagnosis.diff.compare import examined
from stablenum.diagnosis.diff.mending.search import mended
from stablenum.diagnosis.diff.mending.trials import _rate
from stablenum.diagnosis.diff.places.results import Update

HEAD = "import numpy as np\nimport torch\nimport stablenum_torch\n\n"
SHARED = (
    HEAD
    + """S = 0.1
w = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)


def made(scale):
    model = torch.nn.ParameterDict({"w": torch.tensor(w)})
    loss = lambda x: (x @ model["w"] * scale).tanh().sum()
    return stablenum_torch.program(loss, torch.ones(4, 2), model=model)


def left():
    return made(S)


def right():
    return made(2 * S)
"""
)


def proof(left: tuple[Path, str], right: tuple[Path, str], texts: dict[Path, str]) -> Proof:
    """What a proof says."""
    kept, paths = dict(sys.modules), list(sys.path)
    changed = {str(path.resolve()): text for path, text in texts.items()}
    sides = [(str(path), function) for path, function in (left, right)]
    task = Task(left=sides[0], right=sides[1], texts=changed, steps=None, results=(), paths=tuple(sys.path))
    try:
        return proof_of(task)
    finally:
        sys.path[:] = paths
        for name in set(sys.modules) - set(kept):
            if getattr(sys.modules[name], "__file__", "") and "site-packages" not in str(
                sys.modules[name].__file__
            ):
                sys.modules.pop(name)


def test_a_change_of_the_right_side_alone_is_proven(tmp_path: Path) -> None:
    path = tmp_path / "a_pair.py"
    path.write_text(SHARED)
    found = proof((path, "left"), (path, "right"), {path: SHARED.replace("made(2 * S)", "made(S)")})
    assert found.proven, found


def test_a_constant_of_both_sides_is_not_changed_for_one(tmp_path: Path) -> None:
    path = tmp_path / "a_pair.py"
    path.write_text(SHARED)
    found = proof((path, "left"), (path, "right"), {path: SHARED.replace("S = 0.1", "S = 0.05")})
    assert not found.proven
    assert "in code of both programs" in found.error


def test_each_side_gets_the_modules_beside_it(tmp_path: Path) -> None:
    pair = (
        SHARED.replace("S = 0.1\n", "from scale_of import S\n")
        .replace("2 * S", "S")
        .replace("def right", "def program")
    )
    for folder, scale in (("a", 0.1), ("b", 0.2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"run_{folder}.py").write_text(pair)
        (tmp_path / folder / "scale_of.py").write_text(f"S = {scale}\n")
    left, right = tmp_path / "a" / "run_a.py", tmp_path / "b" / "run_b.py"
    module = tmp_path / "b" / "scale_of.py"
    assert not proof((left, "program"), (right, "program"), {module: "S = 0.3\n"}).ok
    assert proof((left, "program"), (right, "program"), {module: "S = 0.1\n"}).proven


def test_programs_that_differ_by_their_random_numbers_are_not_mended(tmp_path: Path) -> None:
    path = tmp_path / "a_pair.py"
    text = SHARED.replace(
        "w = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)", "rng = np.random.default_rng()"
    )
    text = text.replace("torch.ones(4, 2)", "torch.tensor(rng.normal(size=(4, 2)), dtype=torch.float32)")
    text = text.replace("torch.tensor(w)", "torch.ones(2, 3)").replace("2 * S", "S")
    path.write_text(text)
    sides = [built(Origin(path, name), {}).program for name in ("left", "right")]
    found = mended(
        examined(*sides),
        "match",
        {str(path.resolve()): text},
        lambda texts: built(Origin(path, "right"), texts),
        lambda texts: examined(sides[0], built(Origin(path, "right"), texts).program),
        seconds=60.0,
        say=lambda _: None,
    )
    assert not found.mended
    assert found.tried == 0
    assert "give its random numbers a seed" in found.ended


def test_a_program_that_agrees_unchanged_is_not_mended(tmp_path: Path) -> None:
    path = tmp_path / "a_pair.py"
    path.write_text(SHARED.replace("2 * S", "S"))
    found = proof((path, "left"), (path, "right"), {path: SHARED.replace("2 * S", "S * 1.0")})
    assert not found.proven
    assert "also agree without the changes" in found.error


@pytest.mark.parametrize(("factor", "rate"), [(0.5, 2.0), (-0.5, None), (0.0, None)])
def test_updates_may_differ_by_a_positive_rate(factor: float, rate: float | None) -> None:
    x = np.asarray([1.0, -2.0, 3.0])
    assert _rate([Update(x, x, factor * x, x)]) in (rate, rate and 1 / rate)
    assert _rate([Update(x, x, factor * x + [0.1, 0.0, 0.0], x)]) is None
