"""The fixture ``numerics`` of the pytest plugin."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stablenum.diagnosis.diff.compare import reported
from stablenum.diagnosis.diff.lockfile.saving import recording_of
from tests.forking import FRESH
from tests.lockfile.torch_program import in_torch

pytest_plugins = ["pytester"]

TEST = """
import os

import pytest
import torch

import stablenum_torch


def program(epsilon=1e-5, form=torch.float32):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    x = torch.linspace(0, 2, 8).reshape(2, 4)

    def loss():
        h = x @ weight.T.to(form).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
        return h.exp().sum()

    return stablenum_torch.program(loss)
"""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What a run inside a test imports is forgotten after it, and torch cannot be imported twice."""
    reported(recording_of(in_torch()), in_torch(epsilon=1e-6)).to_html()


@pytest.fixture
def here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the program, on a machine that is not CI."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


def write(here: pytest.Pytester, test: str) -> None:
    here.makepyfile(test_it=f"{TEST}\n\n{test}")


ONE = "def test_loss(numerics):\n    numerics.check(program({}), 'loss')\n"


def test_the_first_run_records_and_later_runs_compare(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    first = here.runpytest("-q")
    first.assert_outcomes(passed=1)
    first.stdout.fnmatch_lines(["*loss.snum: recorded. Commit it*"])
    assert [p.name for p in (here.path / "numerics").iterdir()] == ["loss.snum"]
    second = here.runpytest("-q")
    second.assert_outcomes(passed=1)
    second.stdout.no_fnmatch_line("*recorded*")


def test_a_change_fails_with_the_first_screen_of_the_report(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    here.runpytest("-q")
    before = (here.path / "numerics" / "loss.snum").read_bytes()
    write(here, ONE.format("epsilon=1e-6"))
    failed = here.runpytest("-q")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        [
            "*loss.snum and the program differ.",
            "The two programs differ: loss*rounding explains*",
            "First difference, forward:",
            "  left*",
            "*rsqrt*",
            "*why (confirmed, epsilon_value)*",
            "The whole report: *loss.html",
            "--numerics-update records again what is meant to change.",
        ]
    )
    failed.stdout.no_fnmatch_line("*Traceback*")
    assert (here.path / "numerics" / "loss.snum").read_bytes() == before
    page = here.path / ".pytest_cache" / "d" / "numerics" / "loss.html"
    assert page.read_text().lower().startswith("<!doctype html>")


@pytest.mark.slow
def test_an_update_shows_what_changed_and_records_it(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    here.runpytest("-q")
    write(here, ONE.format("form=torch.bfloat16"))
    updated = here.runpytest("-q", "--numerics-update")
    updated.assert_outcomes(passed=1)
    updated.stdout.fnmatch_lines(
        ["*loss.snum: recorded again. What changed:", "*in float64 they agree*", "*computed in bfloat16*"]
    )
    here.runpytest("-q").assert_outcomes(passed=1)


@pytest.mark.slow
def test_an_update_leaves_recordings_alone_that_agree(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    here.runpytest("-q")
    file = here.path / "numerics" / "loss.snum"
    before = file.stat().st_mtime_ns
    here.runpytest("-q", "--numerics-update").assert_outcomes(passed=1)
    assert file.stat().st_mtime_ns == before


@pytest.mark.slow
def test_names_come_from_the_test_and_its_parameters(here: pytest.Pytester) -> None:
    write(
        here,
        "@pytest.mark.parametrize('epsilon', [1e-5, 1e-6])\n"
        "def test_norm(numerics, epsilon):\n"
        "    numerics.check(program(epsilon))\n"
        "    numerics.check(program(epsilon), f'a/b {epsilon}', steps=2)\n",
    )
    here.runpytest("-q").assert_outcomes(passed=2)
    names = sorted(p.name for p in (here.path / "numerics").iterdir())
    assert names == [
        "a-b-1e-05.snum",
        "a-b-1e-06.snum",
        "test_it-test_norm-1e-05.snum",
        "test_it-test_norm-1e-06.snum",
    ]
    here.runpytest("-q").assert_outcomes(passed=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "said"),
    [
        (
            "numerics.check(program(), 'a'); numerics.check(program(), 'a')",
            "name must be another one for each check",
        ),
        ("numerics.check(program(), '///')", "name must have a letter or a digit"),
        ("numerics.check(3, 'a')", "program must be made by stablenum_torch.program"),
    ],
)
def test_a_wrong_call_says_how_to_mend_it(here: pytest.Pytester, test: str, said: str) -> None:
    write(here, f"def test_it(numerics):\n    {test}\n")
    result = here.runpytest("-q")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{said}*"])


@pytest.mark.slow
def test_other_steps_than_the_recorded_ones_are_a_change(here: pytest.Pytester) -> None:
    write(here, "def test_it(numerics):\n    numerics.check(program(), 'a')\n")
    here.runpytest("-q")
    write(here, "def test_it(numerics):\n    numerics.check(program(), 'a', steps=2)\n")
    result = here.runpytest("-q")
    result.stdout.fnmatch_lines(["*holds 1 training steps; the test asks for 2*"])
    here.runpytest("-q", "--numerics-update").assert_outcomes(passed=1)
    here.runpytest("-q").assert_outcomes(passed=1)


def test_where_ci_is_set_nothing_is_recorded(here: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    write(here, ONE.format(""))
    result = here.runpytest("-q")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*There is no recording *loss.snum*commit the file*"])
    assert not (here.path / "numerics").exists()


@pytest.mark.slow
def test_a_damaged_recording_fails_and_can_be_recorded_again(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    here.runpytest("-q")
    (here.path / "numerics" / "loss.snum").write_bytes(b"<<<<<<< HEAD")
    result = here.runpytest("-q")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*loss.snum is not a recording*"])
    here.runpytest("-q", "--numerics-update").assert_outcomes(passed=1)
    here.runpytest("-q").assert_outcomes(passed=1)


@pytest.mark.slow
def test_recordings_lie_in_the_folder_that_is_given(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    here.runpytest("-q", "--numerics-dir", "golden/here").assert_outcomes(passed=1)
    assert (here.path / "golden" / "here" / "loss.snum").exists()
    assert not (here.path / "numerics").exists()


@pytest.mark.slow
def test_workers_of_xdist_hand_on_what_they_recorded(here: pytest.Pytester) -> None:
    write(
        here,
        "@pytest.mark.parametrize('epsilon', [1e-5, 1e-6])\n"
        "def test_norm(numerics, epsilon):\n"
        "    numerics.check(program(epsilon))\n",
    )
    first = here.runpytest("-q", "-n2")
    first.assert_outcomes(passed=2)
    first.stdout.fnmatch_lines(["*test_norm-1e-0?.snum: recorded. Commit it*"] * 2)
    here.runpytest("-q", "-n2").assert_outcomes(passed=2)


def test_the_plugin_imports_nothing_until_a_test_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n"
        "    assert not {'stablenum', 'numpy', 'torch', 'jax'} & {m.partition('.')[0] for m in sys.modules}\n"
    )
    command = [FRESH, "-m", "pytest", "-q", "-p", "stablenum_pytest", "test_it.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others import NumPy
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_an_update_records_a_program_that_cannot_be_compared_any_more(here: pytest.Pytester) -> None:
    two = "def test_it(numerics):\n    numerics.check(stablenum_torch.program(lambda: {}), 'a')\n"
    write(here, two.format("torch.arange(6.0)"))
    here.runpytest("-q")
    write(here, two.format("(torch.arange(6.0), torch.arange(3.0))"))
    failed = here.runpytest("-q")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*a.snum cannot be compared with the program: *no results in common*"])
    here.runpytest("-q", "--numerics-update").assert_outcomes(passed=1)
    here.runpytest("-q").assert_outcomes(passed=1)


@pytest.mark.slow
def test_tests_of_one_name_have_recordings_of_their_own(here: pytest.Pytester) -> None:
    both = "class Test{}:\n    def test_x(self, numerics):\n        numerics.check(program({}))\n\n\n"
    here.makepyfile(
        test_one=f"{TEST}\n\n{both.format('A', '1e-5')}{both.format('B', '1e-6')}",
        test_two=f"{TEST}\n\n{both.format('A', '1e-4')}",
    )
    here.runpytest("-q").assert_outcomes(passed=3)
    here.runpytest("-q").assert_outcomes(passed=3)
    names = sorted(p.name for p in (here.path / "numerics").iterdir())
    assert names == ["test_one-TestA-test_x.snum", "test_one-TestB-test_x.snum", "test_two-TestA-test_x.snum"]


@pytest.mark.slow
def test_names_that_become_one_file_are_refused(here: pytest.Pytester) -> None:
    write(
        here,
        "@pytest.mark.parametrize('sign', ['<', '>'])\n"
        "def test_it(numerics, sign):\n    numerics.check(program())\n",
    )
    result = here.runpytest("-q", "-p", "no:xdist")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*belongs to one of *test_it*"])


@pytest.mark.slow
def test_without_a_cache_the_report_is_shown_alone(here: pytest.Pytester) -> None:
    write(here, ONE.format(""))
    here.runpytest("-q")
    write(here, ONE.format("epsilon=1e-6"))
    failed = here.runpytest("-q", "-p", "no:cacheprovider")
    failed.stdout.fnmatch_lines(["*why (confirmed, epsilon_value)*"])
    failed.stdout.no_fnmatch_line("*The whole report*")
