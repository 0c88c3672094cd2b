"""msprobe (PyPI ``mindstudio-probe``): both programs dump what they compute, and it compares the dumps.

It patches functions of PyTorch for good, so that each dump is made in a process of its own. The processes
are forked from one that has imported the libraries and run nothing. The pairs are compared together, as if
each were a rank of a distributed program: nothing is communicated, so that each rank is judged by itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.answers import Answer
from benchmarks.peers.runs import Arrays, torch_step
from benchmarks.steps.errors import BenchmarkError
from tests.pairs.judged import cases, sides_of

__all__ = ["MODES", "answer_of", "msprobe"]

# What is compared of a tensor: maximum, minimum, mean and norm, one of which must differ by half; a checksum.
MODES = ("statistics", "md5")
_SIDES = ("left", "right")
_PATIENCE_S = 1800
_FORKS = multiprocessing.get_context("forkserver")


def msprobe(name: str, weights: Mapping[str, Arrays]) -> dict[str, dict[str, Answer]]:
    """Compare pairs of a set, and return what is said of each, by mode.

    Args:
        weights: the parameters and buffers that the right program is given, by the name of the case.
    """
    _FORKS.set_forkserver_preload([__name__, "msprobe.pytorch", "torch", "stablenum_torch"])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for rank, (case, arrays) in enumerate(weights.items()):
            np.savez(folder / "arrays.npz", **arrays)
            for side in _SIDES:
                _forked(_dump, name, case, side, folder / "md5", rank, folder / "arrays.npz")
        _without_checksums(folder / "md5", folder / "statistics")
        return {mode: _compared(folder / mode, list(weights)) for mode in MODES}


def _forked(work: Any, *args: Any) -> None:
    process = _FORKS.Process(target=_quietly, args=(work, *args))
    process.start()
    process.join(_PATIENCE_S)
    if process.exitcode != 0:
        process.kill()
        raise BenchmarkError(f"msprobe: {work.__name__.strip('_')}{args[:3]} ended with {process.exitcode}")


def _quietly(work: Any, *args: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            work(*args)
        except BaseException as error:
            error.add_note(said.getvalue()[-2000:])
            raise


def _dump(name: str, case: str, side: str, folder: Path, rank: int, weights: Path) -> None:
    import torch
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    settings = {
        "task": "statistics",
        "dump_path": str(folder / "made"),
        "rank": [],
        "step": [],
        "level": "mix",  # modules and functions
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"},
    }
    config = folder / "config.json"
    folder.mkdir(exist_ok=True)
    config.write_text(json.dumps(settings), encoding="utf-8")
    with sides_of(name, cases(name)[case], folder) as sides:
        arrays = dict(np.load(weights)) if side == "right" else None
        step = torch_step(getattr(sides, side), arrays)
        debugger = PrecisionDebugger(config_path=str(config))
        debugger.start(model=step.model)
        step.gradients()
        step.update()
        debugger.stop()
        debugger.step()
    (made,) = (folder / "made" / "step0").iterdir()
    (folder / side).mkdir(exist_ok=True)
    made.rename(folder / side / f"rank{rank}")


def _without_checksums(source: Path, target: Path) -> None:
    """Copy dumps, without the checksums that they hold in addition to the statistics."""

    def stripped(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: stripped(part) for key, part in x.items() if key != "md5"}
        return [stripped(part) for part in x] if isinstance(x, list) else x

    for side in _SIDES:
        shutil.copytree(source / side, target / side)
        for file in (target / side).glob("rank*/dump.json"):
            dump = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps(stripped(dump)), encoding="utf-8")


def _compared(folder: Path, names: list[str]) -> dict[str, Answer]:
    _forked(_compare, folder)
    reports = list((folder / "compared").glob("diff_analyze_*.json"))
    report = json.loads(reports[0].read_text(encoding="utf-8")) if reports else {}
    found = {}
    for rank, case in enumerate(names):
        nodes = report.get(f"rank_{rank}")
        stacks = json.loads((folder / "right" / f"rank{rank}" / "stack.json").read_text(encoding="utf-8"))
        found[case] = answer_of(nodes[0], stacks, f"{case}.py") if nodes else Answer(False)
    return found


def _compare(folder: Path) -> None:
    """What ``msprobe compare -tp right -gp left -o compared --diff_analyze`` calls."""
    from msprobe.core.compare.find_first.analyzer import DiffAnalyzer

    left, right = (str(folder / side) for side in _SIDES)
    DiffAnalyzer(right, left, str(folder / "compared")).analyze()


def answer_of(node: Mapping[str, Any], stacks: Mapping[str, Any], file: str) -> Answer:
    """Read the first node that msprobe names: a module's path, or else the innermost line of a file.

    Args:
        stacks: where everything was called in the forward pass, which also places what belongs to the
            backward pass.
    """
    kind, *parts = node["op_name"].split(".")
    phase = "forward" if "forward" in parts else "backward"
    called = _stack_of(node["op_name"].replace("backward", "forward"), stacks)
    lines = [found for frame in called if (found := re.search(rf"/{file}, line (\d+),", frame))]
    line = int(lines[0][1]) if lines else 0
    if kind != "Module":
        return Answer(True, phase, line=line)
    end = next(i for i, p in enumerate(parts) if p in ("forward", "backward", "parameters_grad"))
    path = ".".join(parts[: end - 1])
    return Answer(True, phase, path, path, line)


def _stack_of(name: str, stacks: Mapping[str, Any]) -> list[str]:
    return next((frames for names, frames in stacks.values() if name in names), [])
