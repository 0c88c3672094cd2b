"""The pytest plugin for the subprocesses: records which lines each test runs, or runs chosen tests.

The plan is a JSON file that the environment variable ``MUTANTS_PLAN`` names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PLAN", "TEST"]

PLAN, TEST = "MUTANTS_PLAN", "MUTANTS_TEST"


def pytest_configure(config: pytest.Config) -> None:
    """Load the part that the plan requests."""
    plan = json.loads(Path(os.environ[PLAN]).read_text(encoding="utf-8"))
    for package in plan["packages"]:
        found = importlib.util.find_spec(package)
        if found is None or not Path(str(found.origin)).is_relative_to(plan["root"]):
            raise pytest.UsageError(
                f"{package} is imported from {found and found.origin}, not {plan['root']}"
            )
    if plan["mode"] == "run":
        config.pluginmanager.register(_Chosen(plan))
    elif not getattr(config.option, "numprocesses", None):  # a worker, or the only process
        config.pluginmanager.register(_Recorder(plan))


class _Recorder:
    """Records for each test which lines run, here and in processes that the test starts."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import coverage

        self.out = Path(plan["out"]) / f"tests-{os.getpid()}.jsonl"
        self.coverage = coverage.Coverage(config_file=plan["config"])
        self.coverage.start()
        self.config_of_children = plan["config_of_children"]
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record one test, including its fixtures."""
        os.environ.update({TEST: item.nodeid, "COVERAGE_PROCESS_START": self.config_of_children})
        self.coverage.switch_context(item.nodeid)
        begin = time.perf_counter()
        done = yield
        seconds = time.perf_counter() - begin
        self.coverage.switch_context("")
        del os.environ[TEST], os.environ["COVERAGE_PROCESS_START"]
        row = {"test": item.nodeid, "seconds": seconds, "passed": item.nodeid not in self.failed}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A skipped test does not count as passed."""
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        self.coverage.stop()
        self.coverage.save()


class _Chosen:
    """Runs the plan's tests in its order until the processor time is spent or, on request, one fails."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.ran, self.failed, self.broken, self.spent = 0, {}, "", False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """A failing property test is not shrunk to its simplest example."""
        if "hypothesis" not in sys.modules:  # the tests' conftest imports it
            return
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep only the plan's tests, in its order, each with its own time limit."""
        by_name = {item.nodeid: item for item in items}
        chosen = [(by_name[t], seconds) for t, seconds in self.plan["tests"] if t in by_name]
        items[:] = [item for item, _ in chosen]
        for item, seconds in chosen:
            item.add_marker(pytest.mark.timeout(30 + 20 * seconds), append=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A mutant may keep tests from being imported."""
        if report.failed:
            self.broken = report.nodeid or "the tests' import"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record each failed test, with a one-line reason."""
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            self.failed.setdefault(report.nodeid, lines[-1][:300])

    def pytest_runtest_logfinish(self) -> None:
        """Check the time limit."""
        self.ran += 1
        if _processor_seconds() > self.plan["seconds"]:
            self.spent = True
            raise pytest.exit.Exception("the time is spent")

    def pytest_sessionfinish(self) -> None:
        """Report to the parent process."""
        outcome = {
            "ran": self.ran,
            "failed": self.failed,
            "broken": self.broken,
            "spent": self.spent,
            "seconds": _processor_seconds(),
        }
        Path(self.plan["out"]).write_text(json.dumps(outcome), encoding="utf-8")


def _processor_seconds() -> float:
    """Processor time of this process and of its child processes that have ended."""
    return sum(os.times()[:4])
