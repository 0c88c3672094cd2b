"""Show programs to a tool and write down what it answers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from corpus.labels import read
from corpus.task import Task
from corpus.worker import Worker

__all__ = ["SETS", "chosen", "run"]

SETS = ("failing", "healthy", "unseen", "silent")
_PACKAGES = {"torch": ("torch", "numpy"), "jax": ("jax", "jaxlib", "optax", "numpy")}


def chosen(framework: str, sets: Iterable[str], only: Iterable[str] = ()) -> list[str]:
    """The names of the programs of these sets, or those of them whose last part is in ``only``."""
    wanted, names = set(only), []
    for name in read():
        task = Task(name)
        if task.framework == framework and task.set in set(sets):
            names += [name] if not wanted or wanted & {name, task.path.stem} else []
    return names


def run(
    tool: str,
    names: list[str],
    *,
    title: str = "",
    timeout: float = 300.0,
    quiet: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The result of a tool on the programs of these names: what a result file holds.

    Programs whose packages are not installed are not run; ``not_run`` names the packages. An error of the
    tool, no answer in ``timeout`` seconds and a process that ends are recorded, and the run goes on.

    Raises:
        RuntimeError: the tool cannot be loaded.
    """
    labels, records, missing = read(), {}, {}
    worker = None
    try:
        for count, name in enumerate(names, 1):
            if lacking := [need for need in labels[name]["needs"] if importlib.util.find_spec(need) is None]:
                missing[name] = lacking
                continue
            worker = worker or Worker(tool, quiet)
            records[name], usable = _ask(worker, name, timeout)
            if not (usable and Task(name).is_step):  # a script leaves its settings behind
                worker.close()
                worker = None
            report(f"{count} of {len(names)} {name}: {_in_words(records[name])}")
    finally:
        if worker is not None:
            worker.close()
    facts = _facts({Task(name).framework for name in names}, tool)
    return {"tool": title or tool, "entry": tool, **facts, "not_run": missing, "programs": records}


def _ask(worker: Worker, name: str, timeout: float) -> tuple[dict[str, Any], bool]:
    """The record of one program, and whether the worker can be used again."""
    start = time.perf_counter()
    answer = worker.ask(name, timeout)
    seconds = round(time.perf_counter() - start, 2)
    if answer is None and seconds >= timeout:
        return {"error": f"no answer in {timeout:g} s", "seconds": seconds}, False
    if answer is None:
        return {"error": f"the process ended with {worker.exit_code}", "seconds": seconds}, False
    answer.pop("said", None)
    if answer.get("file"):
        answer["file"] = os.path.basename(answer["file"])
    return {key: value for key, value in answer.items() if value != ""} | {"seconds": seconds}, True


def _in_words(record: dict[str, Any]) -> str:
    if record.get("error"):
        return str(record["error"])
    if not record["detected"]:
        return "nothing found"
    parts = (str(record[key]) for key in ("line", "operation", "cause") if record.get(key))
    return ", ".join(parts) or "something found"


def _facts(frameworks: set[str], tool: str) -> dict[str, Any]:
    """The machine and the versions, with that of the ``PACKAGE`` that the tool's module names."""
    names = [name for framework in sorted(frameworks) for name in _PACKAGES[framework]]
    if not tool.startswith("command:"):
        names += [getattr(importlib.import_module(tool.partition(":")[0]), "PACKAGE", "")]
    versions = {}
    for name in filter(None, names):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    machine = {"cpu_count": os.cpu_count(), "architecture": platform.machine()}
    return {"machine": machine, "python": platform.python_version(), "versions": versions}
