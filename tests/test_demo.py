"""``stablenum demo``: what it says of the trainings, its page and its scripts, and what fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stablenum.cli import app
from stablenum.commands.demo import page, story, tour
from stablenum.commands.demo.picture import death_of
from stablenum.commands.demo.training import Training

NAN = float("nan")
STEPS = 40
TORCH = Training(
    plain=(2.0,) * 15 + (NAN,) * 25,
    plain_score=0.1,
    losses=(2.0,) * 15 + (NAN,) + (1.0,) * 24,
    score=0.9,
    reasons=("OK",) * 15 + ("NONFINITE_LOSS",) + ("OK",) * 24,
    scales=(4.0,) * STEPS,
    norms=(1.0,) * STEPS,
    skipped=(15,),
)
FOUND = tour.Tour({"torch": TORCH, "jax": TORCH}, {shown.line: f"<{shown.script}>" for shown in tour.SHOWN})


def test_the_trainings_are_told_by_their_numbers() -> None:
    assert death_of(TORCH) == 15
    text = story.outcome({"torch": TORCH})
    assert "1 of the 40 batches are bad" in text
    assert "NaN from step 15 on, and the network ends with 10.0% of the held-out" in text
    assert "ends with 90.0%" in text
    assert "same in 40 of 40 steps" in story.agreement({"torch": TORCH, "jax": TORCH})
    assert list(story.events({"torch": TORCH})) == [(15, ["NONFINITE_LOSS, loss scale 4"])]


@pytest.mark.parametrize("field", ["reasons", "scales"])
def test_a_step_that_is_decided_otherwise_is_counted(field: str) -> None:
    values = list(getattr(TORCH, field))
    values[1] = 8.0 if field == "scales" else "CLIPPED"
    other = Training(**{name: getattr(TORCH, name) for name in TORCH.__slots__} | {field: tuple(values)})
    assert "same in 39 of 40 steps" in story.agreement({"torch": TORCH, "jax": other})


def test_the_page_has_the_pictures_and_all_that_was_printed() -> None:
    text = page.as_html(FOUND)
    assert text.count("<svg") == 2
    for shown in tour.SHOWN:
        assert f"&lt;{shown.script}&gt;" in text  # escaped
        assert shown.line in text
    assert not re.search(r"""(?:src|href)=["']https?:""", text)


def command(*words: str, monkeypatch: pytest.MonkeyPatch, found: tour.Tour) -> tuple[int, str]:
    monkeypatch.setattr(tour, "run", lambda done: found)
    result = CliRunner().invoke(app("demo"), ["demo", *words])
    return result.exit_code, result.output


def test_the_command_shows_the_first_lines_and_the_path_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    many = tour.Tour(FOUND.trainings, {tour.SHOWN[0].line: "\n".join(f"line {n}" for n in range(40))})
    code, output = command("--html", str(target), monkeypatch=monkeypatch, found=many)
    assert code == 0
    assert "line 15" in output
    assert "line 16" not in output
    assert "... 24 more lines are on the page" in output
    assert output.strip().endswith(str(target))
    assert "line 39" in target.read_text(encoding="utf-8")


def test_a_part_that_failed_is_said_and_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    some = tour.Tour({}, dict(FOUND.outputs), ["jax: it ended"])
    code, output = command("--html", str(target), monkeypatch=monkeypatch, found=some)
    assert code == 1
    assert "not shown: jax: it ended" in output
    assert "Not shown: jax: it ended" in target.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    result = CliRunner().invoke(app("demo"), ["demo", "--html", str(tmp_path / "nowhere" / "page.html")])
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_without_a_framework_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    find = tour.importlib.util.find_spec
    monkeypatch.setattr(tour.importlib.util, "find_spec", lambda n: None if n == "jax" else find(n))
    monkeypatch.setattr(tour, "_training", lambda name, folder: TORCH)
    monkeypatch.setattr(tour, "_output", lambda shown, folder: "said")
    found = tour.run()
    assert list(found.trainings) == ["torch"]
    assert found.failed == ["stablenum diff port.py needs torch and jax"]
    assert len(found.outputs) == 2


def test_a_process_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        tour, "_process", lambda words, folder: subprocess.CompletedProcess(words, 3, "", "first\nlast\n")
    )
    found = tour.run()
    assert not found.trainings
    assert not found.outputs
    assert all(re.search(r"the code 3: last$", why) for why in found.failed)
    assert len(found.failed) == len(tour.SHOWN) + len(tour.BACKENDS)


def test_the_scripts_are_written_where_none_is(tmp_path: Path) -> None:
    result = CliRunner().invoke(app("demo"), ["demo", "--scripts", str(tmp_path / "demo")])
    assert result.exit_code == 0
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert names == {"finetune.py", "port.py", "train.py"}
    (tmp_path / "demo" / "port.py").unlink()
    result = CliRunner().invoke(app("demo"), ["demo", "--scripts", str(tmp_path / "demo")])
    assert result.exit_code == 2
    assert "is there already" in result.output
    assert not (tmp_path / "demo" / "port.py").exists()  # nothing is half done


@pytest.mark.slow(reason="two trainings and three diagnoses")
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stablenum", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "decided the same in 300 of 300 steps" in done.stdout
    assert "why (confirmed, epsilon_value)" in done.stdout
    assert "train.py:20: the derivative of sqrt gives NaN" in done.stdout
    assert "not_in_model" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"stablenum-demo.html"}
