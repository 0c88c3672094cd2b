"""The parts of the demo: each is a process of its own, and two run at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stablenum.commands.demo.training import Training

__all__ = ["BACKENDS", "SHOWN", "Shown", "Tour", "copy_scripts", "run", "scripts"]

# Framework -> the backend of ``stablenum compare`` and its name.
BACKENDS = {"torch": ("torch", "PyTorch"), "jax": ("jax-jit", "JAX")}
# No part takes that long on two slow cores.
_MOST_SECONDS = 600
# Beyond this many columns, lines of reports are hard to read.
_COLUMNS = "96"


@dataclass(frozen=True, slots=True)
class Shown:
    """A command that is shown on a script.

    Attributes:
        words: the command and its arguments.
        script: the script, in ``examples``.
        about: what it shows, in a sentence.
        needs: the frameworks that the script imports.
        lines: how many lines of the output are shown in the terminal; the page has all.
    """

    words: tuple[str, ...]
    script: str
    about: str
    needs: tuple[str, ...]
    lines: int

    @property
    def line(self) -> str:
        """The command line as it is typed."""
        return " ".join(("stablenum", *self.words))


SHOWN = (
    Shown(
        ("diff", "port.py"),
        "mending/port.py",
        "A network in PyTorch and its port to JAX do not agree. Which operation differs first, and why?",
        ("torch", "jax"),
        16,
    ),
    Shown(
        ("explain", "train.py", "--", "--lr", "0.01"),
        "explain/train.py",
        "A loss becomes NaN. Which line made it, and what should be written there?",
        ("torch",),
        22,
    ),
    Shown(
        ("checkup", "finetune.py"),
        "checkup/finetune.py",
        "All numbers are finite, and the loss does not fall. What keeps the script from learning?",
        ("torch",),
        12,
    ),
)


@dataclass(slots=True)
class Tour:
    """What the parts gave.

    Attributes:
        trainings: framework -> its training.
        outputs: command line -> what it printed.
        failed: what could not be shown, and why.
    """

    trainings: dict[str, Training] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def scripts() -> Path:
    """Return the folder of the scripts: in the installed package, or in the source beside it."""
    inside = Path(__file__).parent / "examples"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "examples"


def copy_scripts(folder: Path) -> list[Path]:
    """Copy the scripts into a folder, which is made if it is not there.

    Raises:
        FileExistsError: one of them is there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / Path(shown.script).name for shown in SHOWN]
    for path in made:
        if path.exists():
            raise FileExistsError(f"{path} is there already.")
    for shown, path in zip(SHOWN, made, strict=True):
        shutil.copyfile(scripts() / shown.script, path)
    return made


def run(done: Callable[[str], object] = lambda _: None) -> Tour:
    """Run all parts for which the frameworks are installed.

    Args:
        done: called with the name of each part that has ended.
    """
    there = [name for name in BACKENDS if importlib.util.find_spec(name) is not None]
    tour = Tour()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_scripts(folder)
        with ThreadPoolExecutor(2) as pool:
            parts = dict[Future[Any], str]()
            for shown in SHOWN:
                if set(shown.needs) <= set(there):
                    parts[pool.submit(_output, shown, folder)] = shown.line
                else:
                    tour.failed.append(f"{shown.line} needs {' and '.join(shown.needs)}")
            for name in there:
                parts[pool.submit(_training, name, folder)] = name
            for part in as_completed(parts):
                name = parts[part]
                try:
                    found = part.result()
                except (OSError, ValueError, subprocess.SubprocessError) as error:
                    tour.failed.append(f"{name}: {error}")
                else:
                    if isinstance(found, Training):
                        tour.trainings[name] = found
                    else:
                        tour.outputs[name] = found
                done(BACKENDS[name][1] if name in BACKENDS else name)
    tour.trainings = {name: tour.trainings[name] for name in BACKENDS if name in tour.trainings}
    return tour


def _training(name: str, folder: Path) -> Training:
    done = _process(["-m", "stablenum.commands.demo.training", BACKENDS[name][0]], folder)
    if done.returncode:
        raise ValueError(f"the training ended with the code {done.returncode}: {_last(done.stderr)}")
    found: Any = {k: tuple(x) if isinstance(x, list) else x for k, x in json.loads(done.stdout).items()}
    return Training(**found)


def _output(shown: Shown, folder: Path) -> str:
    done = _process(["-m", "stablenum", *shown.words], folder)
    if done.returncode != 1 or not done.stdout:  # 1: it has found something
        raise ValueError(f"it ended with the code {done.returncode}: {_last(done.stderr)}")
    return done.stdout.strip("\n")


def _process(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=_environment(os.environ),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_MOST_SECONDS,
        check=False,
    )


def _environment(known: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process finds the package and writes plain text of a fixed width."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [known.get("PYTHONPATH")])])
    plain = {"COLUMNS": _COLUMNS, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": path}
    return {**known, **plain, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "nothing was printed"
