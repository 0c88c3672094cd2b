"""How often ``stablenum.diff`` and other tools find what distinguishes two programs, on ``tests/pairs``.

Two programs of PyTorch (the set ``within``) are compared by ``stablenum.diff``, msprobe's search for the
first difference, PaDiff's algorithm, and ``allclose`` module by module. A PyTorch original and its JAX port
(the other sets, where the port consists of modules) are compared by the first and the last of these: the
others cannot do that. The peers are given the weights that correspond, and which modules have them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import stablenum
from benchmarks.peers.allclose import allclose
from benchmarks.peers.answers import Answer, figures, right_place
from benchmarks.peers.debug_mode import EXACT, NEAR, debug_mode, logged
from benchmarks.peers.jax_runs import jax_run
from benchmarks.peers.msprobe import MODES, msprobe
from benchmarks.peers.padiff import DEFAULT, README, padiff
from benchmarks.peers.runs import Arrays, Run, torch_run, torch_step
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.keeping import Kept
from stablenum.diagnosis.diff.sides.recording import undisturbed
from stablenum.diagnosis.diff.sides.sides import measured
from stablenum.diagnosis.diff.weights.carrying import carried
from tests.pairs.judged import HERE, Judged, Sides, cases, judged_report, lines_of, sides_of, source_of

__all__ = ["ACROSS", "PEERS", "TOLERANCES", "check_peers", "run"]

PEERS = ("mindstudio-probe", "flax", "equinox")  # what must be installed beside the frameworks
WITHIN = "within"
ACROSS = ("tuned", "blind", "second", "third")
TOLERANCES = (1e-8, 1e-5, 1e-3, 1e-1)  # beside a relative one of 1e-5
_OURS = ("stablenum.diff, by both lines", "stablenum.diff, by module")
_OWN_MAP = "stablenum.diff, weights not given, by both lines"
_JAX_MODULES = re.compile(r"^(import|from) (equinox|flax)", re.MULTILINE)

Case = dict[str, Any]


def check_peers() -> None:
    """Check that every peer is there.

    Raises:
        BenchmarkError: one is missing.
    """
    for peer in PEERS:
        try:
            importlib.metadata.version(peer)
        except importlib.metadata.PackageNotFoundError:
            raise BenchmarkError(f"{peer} is not installed: `pip install {peer}`") from None


def run(kept: Kept) -> dict[str, Any]:
    """All figures, by kind of pair, method and phase.

    Returns:
        ``copied``: a program of PyTorch and its copy with a change; ``rewritten``: with another structure;
        ``ported``: a program of PyTorch and its port to JAX.
    """
    ported = _across(kept)
    return _within(kept) | {"ported": ported}


# --- two programs of PyTorch ----------------------------------------------------------------------------


def _within(kept: Kept) -> dict[str, Any]:
    found = cases(WITHIN)
    hooks = {n: kept.part(f"{WITHIN} {n}", functools.partial(_hooked, WITHIN, c)) for n, c in found.items()}
    probed = kept.part("msprobe", functools.partial(_probed, found))
    own = {n: kept.part(f"own {n}", functools.partial(_own, c)) for n, c in found.items()}
    copied = {n: c for n, c in found.items() if "both" in c}
    rewritten = {n: c for n, c in found.items() if "both" not in c}
    return {
        "copied": _rows(copied, hooks, probed),
        "rewritten": {_OWN_MAP: _counted(rewritten, own)} | _rows(rewritten, hooks, probed),
    }


def _rows(of: Mapping[str, Case], hooks: Mapping[str, Any], probed: Mapping[str, Any]) -> dict[str, Any]:
    ours = {n: _said(_checked(WITHIN, n)) for n in of}
    rows = {method: _counted(of, {n: said[method] for n, said in ours.items()}) for method in _OURS}
    for mode in MODES:
        rows[f"msprobe, {mode}"] = _figures(of, {n: Answer(*probed[mode][n]) for n in of})
    for method in next(iter(hooks.values())):
        rows[method] = _figures(of, {n: Answer(*hooks[n][method]) for n in of})
    return rows


def _probed(found: Mapping[str, Case]) -> dict[str, dict[str, Answer]]:
    return msprobe(WITHIN, {name: _weights(WITHIN, case)[1] for name, case in found.items()})


def _figures(of: Mapping[str, Case], answers: Mapping[str, Answer]) -> dict[str, Any]:
    return _counted(of, {n: _judged(of[n], answer, _lines(of[n])) for n, answer in answers.items()})


def _lines(case: Case) -> set[int]:
    """The author's lines of the right program."""
    if case["kind"] == "equivalent":
        return set()
    text = source_of(WITHIN, case)
    return set().union(*(lines_of(text, part) for part in (case["right"], *case["right_also"])))


def _own(case: Case) -> list[bool]:
    """Whether a difference is seen and both lines are right if the weights are not given."""
    checked = _checked(WITHIN, case["name"])
    with tempfile.TemporaryDirectory() as folder, sides_of(WITHIN, case, Path(folder)) as sides:
        if sides.weights != "match":
            checked = judged_report(WITHIN, case, stablenum.diff(sides.left(), sides.right()))
    return _said(checked)[_OURS[0]]


def _checked(name: str, case: str) -> Judged:
    """What ``stablenum.diff`` finds, as the tests of the pairs check it."""
    found = json.loads((HERE / "found.json").read_text(encoding="utf-8"))
    return Judged(**found[name][case])


def _said(found: Judged) -> dict[str, list[bool]]:
    lines, module = _OURS
    return {
        lines: [not found.ok, found.phase and found.left and found.right],
        module: [not found.ok, found.phase and found.module],
    }


# --- a PyTorch original and its port --------------------------------------------------------------------


def _across(kept: Kept) -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for name, case in _ported():
        key = f"{name} {case['name']}"
        hooks[key] = kept.part(key, lambda n=name, c=case: _hooked(n, c))
        ours[key] = _said(_checked(name, case["name"]))
    of = {f"{name} {case['name']}": case for name, case in _ported()}
    rows = {m: _counted(of, {k: said[m] for k, said in ours.items()}) for m in _OURS}
    for method in next(iter(hooks.values())):
        rows[method] = _counted(
            of, {k: _judged(of[k], Answer(*said[method]), ()) for k, said in hooks.items()}
        )
    return rows


def _ported() -> Iterator[tuple[str, Case]]:
    """The cases whose port may consist of modules."""
    for name in ACROSS:
        for case in cases(name).values():
            if _JAX_MODULES.search((HERE / name / case["base"]).read_text(encoding="utf-8")):
                yield name, case


# --- both -----------------------------------------------------------------------------------------------


def _hooked(name: str, case: Case) -> dict[str, Answer]:
    """What the tools say that hook into modules."""
    weights, arrays = _weights(name, case)
    with tempfile.TemporaryDirectory() as folder, sides_of(name, case, Path(folder)) as sides:
        left = torch_run(torch_step(sides.left))
        right = torch_run(torch_step(sides.right, arrays)) if name == WITHIN else jax_run(sides.right, arrays)
        found = _of_debug_mode(case, sides, arrays) if name == WITHIN else {}
    if not right.outputs:
        raise BenchmarkError(f"{name}/{case['name']}: no output of a module was captured")
    if name == WITHIN:
        found |= _of_padiff(left, right)
    return found | {f"allclose, atol {a:.0e}": allclose(left, right, weights, atol=a) for a in TOLERANCES}


def _of_debug_mode(case: Case, sides: Sides, arrays: Arrays) -> dict[str, Answer]:
    left, right = logged(torch_step(sides.left)), logged(torch_step(sides.right, arrays))
    settings = {"DebugMode, equal hashes": EXACT, "DebugMode, hashes within 1e-5": NEAR}
    return {m: debug_mode(left, right, f"{case['name']}.py", tolerance=t) for m, t in settings.items()}


def _of_padiff(left: Run, right: Run) -> dict[str, Answer]:
    settings = {"PaDiff's algorithm, defaults": DEFAULT, "PaDiff's algorithm, elements within 1e-4": README}
    return {method: padiff(left, right, **of) for method, of in settings.items()}


def _weights(name: str, case: Case) -> tuple[Any, Arrays]:
    """The map of the weights and the right side's arrays: those of the pair without a mistake, or by name."""
    if "both" in case:
        return _carried(name, case["name"], by_name=True)
    wanted = ("equivalent", case["base"])
    alike = [c for c in cases(name).values() if (c["kind"], c["base"]) == wanted and "both" not in c]
    return _carried(name, alike[0]["name"])


@functools.cache
def _carried(name: str, case: str, *, by_name: bool = False) -> tuple[Any, Arrays]:
    with tempfile.TemporaryDirectory() as folder, sides_of(name, cases(name)[case], Path(folder)) as sides:
        return undisturbed(lambda: _map_of(sides, by_name=by_name))


def _map_of(sides: Sides, *, by_name: bool) -> tuple[Any, Arrays]:
    left = measured(sides.left())
    weights = dict if by_name else sides.weights  # the left arrays under their names
    mapped, arrays = carried(left, sides.right(), weights)
    assert arrays is not None
    return mapped, arrays


def _judged(case: Case, answer: Answer, lines: Any) -> list[Any]:
    right = case["kind"] == "error" and right_place(answer, case, lines)
    return [answer.differs, right, answer.phase]


def _counted(of: Mapping[str, Case], said: Mapping[str, Any]) -> dict[str, Any]:
    answers = []
    for key, case in of.items():
        differs, right, *phase = said[key]
        answers.append((case, Answer(differs, *phase), right))
    return figures(answers)
