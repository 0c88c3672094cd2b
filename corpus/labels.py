"""The labels of every program, collected from where they are written: the programs and ``answers.json``."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from corpus.case import CAUSES, FRAMEWORKS, bad_line, build, modules
from corpus.task import ROOT, Task

__all__ = ["FILE", "collect", "read", "write"]

FILE = ROOT / "labels.json"
SCRIPT_SETS = ("unseen", "silent")


def collect() -> dict[str, Any]:
    """All labels, as ``labels.json`` holds them."""
    programs = {}
    for framework in FRAMEWORKS:
        for module in modules("failing"):
            if build(module, framework):
                programs[f"{framework}/failing/{_stem(module)}"] = _failing(module, framework)
        for module in modules("healthy"):
            if build(module, framework):
                programs[f"{framework}/healthy/{_stem(module)}"] = _healthy(module, framework)
    for kind in SCRIPT_SETS:
        answers = json.loads((ROOT / kind / "answers.json").read_text(encoding="utf-8"))
        for name, answer in answers.items():
            framework, stem = name.split("/")
            task = Task(f"{framework}/{kind}/{stem}")
            programs[task.name] = _script(task.path, answer)
    return {"version": 1, "causes": CAUSES, "programs": programs}


def write() -> None:
    """Write ``labels.json``."""
    FILE.write_text(json.dumps(collect(), indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, dict[str, Any]]:
    """The label of each program, by its name."""
    programs: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["programs"]
    return programs


def _stem(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _step(module: ModuleType, framework: str) -> dict[str, Any]:
    function = f"in_{framework}"
    source = inspect.getsource(getattr(module, function))
    return {
        "status": "tuned",
        "file": Path(str(module.__file__)).relative_to(ROOT).as_posix(),
        "function": function,
        "what": _summary(module),
        "needs": _imports(source),
    }


def _failing(module: ModuleType, framework: str) -> dict[str, Any]:
    case = module.CASE
    return {
        "kind": "failing",
        **_step(module, framework),
        "lines": [bad_line(module, framework)[1]] if case.operations(framework) else [],
        "operations": [*case.operations(framework), *case.primitives(framework)],
        "causes": list(case.causes(framework)),
        "fails": case.fails,
        "module": case.module,
        "where": case.where if framework == "jax" else "",
    }


def _healthy(module: ModuleType, framework: str) -> dict[str, Any]:
    return {"kind": "healthy", **_step(module, framework)}


def _script(path: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """``None`` where the author of a script was not asked: the operation, and in ``unseen`` the cause in our
    words."""
    label = {
        "kind": answer["kind"],
        "status": answer.get("set", "held_out"),
        "file": path.relative_to(ROOT).as_posix(),
        "what": answer.get("what", ""),
        "needs": _imports(path.read_text(encoding="utf-8")),
        **{key: answer[key] for key in ("source", "round", "remedy") if key in answer},
    }
    if answer["kind"] == "failing":
        symptom = answer.get("symptom")
        label |= {
            "lines": answer["lines"],
            "operations": None,
            "causes": [symptom] if symptom else None,
            "fails": "silent" if symptom else None,
        }
    return label


def _summary(module: ModuleType) -> str:
    return " ".join(str(module.__doc__).split("\n\n")[0].split())


def _imports(source: str) -> list[str]:
    """The packages that this code imports, without Python's own."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(names - set(sys.stdlib_module_names))
