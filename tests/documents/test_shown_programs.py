"""Every program that README and the pages show is run by ``explain`` and ``checkup``, which blame none.

A program that fails on purpose is listed with what is to be found in it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.test_edit_runs import TORCH, explained
from tests.test_docs import BLOCKS, ON_TWO_RANKS, ROOT, blocks

# A loop that takes steps. Programs that only build something have nothing to be blamed for.
TRAINS = re.compile(r"^for .*:\n(?:.*\n)*? .*step\(", re.M)
SHOWN = {f"README.md:{i}": block for i, block in enumerate(blocks(ROOT / "README.md", "python"))}
SHOWN |= {name: block for name, block in BLOCKS.items() if name not in ON_TWO_RANKS}
TRAININGS = {name: block for name, block in SHOWN.items() if TRAINS.search(block)}
# Program -> command -> the cause, or the symptom, that it shows on purpose.
BATCH = {"explain": "batch"}  # a bad batch that a guard skips, in a run of too few good steps to pass it by
PLANTED = {
    "audit.md:0": {"checkup": "bad_state"},
    "distributed.md:0": BATCH,
    "faq.md:1": {"explain": "boundary_derivative"},
    "faq.md:4": BATCH | {"checkup": "loss_not_finite"},
    "faq.md:6": BATCH,
    "jax.md:0": BATCH,
    "nan-and-cure.md:4": BATCH | {"checkup": "not_finite"},
    "precision.md:9": {"checkup": "saturated"},
    "pytorch.md:0": BATCH,
    "recipes/accumulation.md:0": BATCH,
    "recipes/equinox.md:0": {"explain": "unknown"},  # skipped, and the replay does not see why
    "recipes/train-state.md:0": {"checkup": "loss_not_finite"},
    "same-decisions.md:0": BATCH | {"checkup": "loss_not_finite"},
    "tutorial.md:0": {"explain": "boundary_derivative", "checkup": "not_finite"},
    "verify.md:0": {"checkup": "bad_state"},
}
# Lightning imports torchvision, whose compiled part needs CUDA's libraries.
WITHOUT_CUDA = "from benchmarks.partners import torchvision_on_cpu; torchvision_on_cpu.allow()\n"


def cases():
    for name in TRAININGS:
        fast = name.startswith("README")
        yield pytest.param(name, marks=[] if fast else [pytest.mark.slow(reason="runs a program twice")])


def found_by(command, name, folder):
    head = WITHOUT_CUDA if "lightning" in TRAININGS[name] else ""
    (folder / "train.py").write_text(head + TRAININGS[name], encoding="utf-8")
    line = [sys.executable, "-m", "stablenum", command, "train.py", "--json", "report.json", "--once"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    return done, json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", ["explain", "checkup"])
@pytest.mark.parametrize("name", list(cases()))
def test_a_program_that_is_shown_is_not_blamed(name, command, tmp_path: Path):
    done, report = found_by(command, name, tmp_path)
    said = done.stdout + done.stderr
    planted = PLANTED.get(name, {}).get(command, "")
    if planted:
        found = (
            (report["verdict"] or {}).get("cause")
            if command == "explain"
            else report["complaints"][0]["symptom"]
        )
        assert found == planted, said
    else:
        assert done.returncode == 0, said
        assert report["ok"], said


def without_losses(text):
    """A text without the losses in it, which differ in the last digits from machine to machine."""
    return re.sub(r"\d\.\d+", "LOSS", text)


def test_the_page_shows_the_trial_of_a_remedy_as_it_is_printed(tmp_path: Path):
    done, _ = explained(tmp_path, TORCH)
    shown = done.stdout[done.stdout.index("Remedy:") :].partition("\n\n")[0].rstrip()
    page = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    assert without_losses(shown) in without_losses(page)


def test_programs_are_found():
    assert sum(name.startswith("README") for name in TRAININGS) == 2
    assert len(TRAININGS) > 20
    assert TRAININGS.keys() >= PLANTED.keys()
