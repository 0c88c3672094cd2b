"""Scenarios run side by side, in processes of their own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from stablenum.commands.compare.backends import Backend
from stablenum.commands.compare.runner import Result, run_scenario
from stablenum.commands.compare.scenarios import Scenario
from stablenum.commands.quiet import without_log

__all__ = ["run_side_by_side"]


def run_side_by_side(
    scenarios: Sequence[Scenario],
    backends: Sequence[Backend],
    *,
    jobs: int,
    checked: set[str],
    brief: bool,
    done: Callable[[Scenario], None] = lambda scenario: None,
) -> list[Result]:
    """Run every scenario as :func:`run_scenario` does, ``jobs`` of them at a time.

    Args:
        scenarios: what to run.
        backends: the backends, of which NumPy is one.
        jobs: the number of processes. Each imports the frameworks.
        checked: the names of the scenarios whose outcome is checked.
        brief: whether backends leave out a scenario if another scenario covers the same rules.
        done: called after every scenario.

    Returns:
        The results, in the order of ``scenarios``.

    Raises:
        RuntimeError: a process ended before its scenario did, for example for lack of memory.
    """
    # A forked process must not use the threads of the frameworks, so the processes are started afresh.
    context = multiprocessing.get_context("spawn")
    levels = {name: logging.getLogger(name).level for name in ("jax", "torch")}
    pool = ProcessPoolExecutor(
        min(jobs, len(scenarios)), context, initializer=_begin_process, initargs=(levels,)
    )
    try:
        # The trainings, which take longest and come last, are begun first: no process waits for another
        # for long at the end.
        futures: dict[Future[Result], Scenario] = {
            pool.submit(_run, scenario, backends, scenario.name in checked, brief): scenario
            for scenario in reversed(scenarios)
        }
        results: dict[str, Result] = {}
        for future in as_completed(futures):
            scenario = futures[future]
            results[scenario.name] = future.result()
            done(scenario)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that ran scenarios was ended from the outside, perhaps for lack of memory. "
            "With --jobs 1 the scenarios run one after the other, in this process."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return [results[scenario.name] for scenario in scenarios]


def _begin_process(levels: Mapping[str, int]) -> None:
    """Log what the main process does; end with it, and at Ctrl-C without a traceback, which it reports."""
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _end_with_the_main_process() -> None:
    """Wait for the main process, and end this one; without this it would run on if the main one is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(scenario: Scenario, backends: Sequence[Backend], check_expected: bool, brief: bool) -> Result:
    with without_log():
        return run_scenario(scenario, backends, check_expected=check_expected, brief=brief)
