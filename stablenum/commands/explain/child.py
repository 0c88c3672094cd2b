"""The process that runs the script: ``python -m stablenum.commands.explain.child PLAN OUTCOME``.

Every run has its own process, so that a second run starts in the same state as the first.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import linecache
import os
import random
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import stablenum
from stablenum._support.files import write_text
from stablenum.diagnosis.edits.edit import Edit
from stablenum.diagnosis.watch.edited_sources import compiled, install
from stablenum.diagnosis.watch.frames import without_our_frames
from stablenum.diagnosis.watch.imports import AfterImport
from stablenum.diagnosis.watch.launch import GRACE
from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.script_errors import last_line
from stablenum.diagnosis.watch.session import Session, Stop

__all__ = ["run"]


def run(session: Session) -> None:
    """Run the script of a plan as ``__main__``; the outcome records its exceptions and exits."""
    plan, outcome = session.plan, session.outcome
    _as_python_would(plan)
    random.seed(plan.seed + plan.rank)
    _watching(session).install()
    edits = [Edit.from_dict(edit) for edit in plan.edits]
    if edits:
        install(edits)
    try:
        _run_main(plan, edits)
        outcome.exit_code = 0
    except Stop:
        pass
    except SystemExit as stop:
        outcome.exit_code = _exit_code(stop.code)
        if outcome.exit_code:
            session.mark_failed()
    except BaseException as error:  # noqa: BLE001  the script's own error, shown as Python shows it
        outcome.exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        outcome.error = last_line(error)
        outcome.relative_import = isinstance(error, ImportError) and not plan.module and _is_relative(error)
        sys.stdout.flush()
        error.__traceback__ = _own(error.__traceback__)
        for report in session.on_error if isinstance(error, Exception) and not session.over else ():
            session.sheltered(report, error)
        if session.is_left_alone():  # the error comes of that
            outcome.cut_short = True
        else:
            session.mark_failed()
            without_our_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
    session.ending.acquire()  # for good: the process ends
    session.conclude()


def _watching(session: Session) -> AfterImport:
    plan, watched = session.plan, session.outcome.watched

    def watch(framework: str) -> None:
        watched.append(framework)
        for part, wanted in (("watch", plan.finite), ("checkup.watch", plan.checkup)):
            if wanted:
                _part_of(framework, part).watch(session)

    def numpy() -> None:
        importlib.import_module("numpy").random.seed((plan.seed + plan.rank) % 2**32)
        session.numpy.listen()

    return AfterImport(
        {
            "numpy": lambda: session.sheltered(numpy),
            "torch": lambda: session.sheltered(watch, "torch"),
            "jax": lambda: session.sheltered(watch, "jax"),
        },
    )


def _part_of(framework: str, part: str) -> Any:
    """Return a module of an adapter's diagnosis.

    Raises:
        ImportError: a package that the adapter needs is not installed. The message says what to install.
    """
    try:
        return importlib.import_module(f"stablenum_{framework}._diagnosis.{part}")
    except ModuleNotFoundError as error:
        raise ImportError(f"watching {framework} needs {error.name}: pip install {error.name}") from error


def _as_python_would(plan: Plan) -> None:
    """Set ``sys.argv`` and ``sys.path`` as ``python script.py`` or ``python -m module`` does."""
    sys.argv = [plan.script, *plan.arguments]
    if not plan.module:
        # The script's folder replaces the current folder, which "-m" put there for this process.
        home = str(Path(plan.script).resolve().parent)
        sys.path[:1] = [home] if not sys.flags.safe_path else sys.path[:1]
        ours = str(Path(stablenum.__file__).parents[1])
        if importlib.util.find_spec("stablenum_torch") is None and ours not in sys.path:
            sys.path.append(ours)


def _run_main(plan: Plan, edits: Sequence[Edit]) -> None:
    if plan.module:
        runpy.run_module(plan.script, run_name="__main__", alter_sys=True)
        return
    # runpy.run_path is not used, because it removes the module before the functions that were registered with
    # atexit run.
    path = os.path.abspath(plan.script)
    code = compiled(path, edits)
    module = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    given = {"__file__": path, "__builtins__": builtins, "__cached__": None, "__loader__": loader}
    module.__dict__.update(given, **({} if sys.version_info >= (3, 14) else {"__annotations__": {}}))
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _is_relative(error: ImportError) -> bool:
    """Return whether a script has failed in a relative import, for which it would have to be a module."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or tb.tb_frame.f_globals.get("__name__") != "__main__":
        return False
    return linecache.getline(tb.tb_frame.f_code.co_filename, tb.tb_lineno).lstrip().startswith("from .")


def _own(tb: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that starts at the script's first frame."""
    here = str(Path(__file__).parent)
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith((here, "<frozen runpy")):
        tb = tb.tb_next
    return tb


def _leave_with_others(session: Session, leave: Callable[[], None]) -> None:
    """End the process some time after another one has failed that trains with it, or after this one has: it
    may wait in a collective indefinitely. What was recorded until then is reported."""
    while not (session.is_left_alone(within=0.0) or session.over):
        time.sleep(0.2)
    time.sleep(GRACE)
    if session.ending.acquire(blocking=False):
        session.outcome.cut_short = not session.over
        session.conclude()
        leave()


def main() -> None:
    """Run the plan and write the outcome, even if the script fails."""
    plan, outcome = map(Path, sys.argv[1:3])
    session = Session(Plan.read(plan))

    def write() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the script
                stream.flush()
        write_text(outcome, json.dumps(session.outcome.to_dict()))

    def leave() -> None:
        write()
        os._exit(0)

    session.on_leave = leave
    if session.plan.marks:
        threading.Thread(target=_leave_with_others, args=(session, leave), daemon=True).start()
    run(session)
    write()
    sys.exit(session.outcome.exit_code or 0)


if __name__ == "__main__":
    main()
