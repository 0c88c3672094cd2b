"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import os
import resource
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache

from stablenum_jax._step import skip_watch
from stablenum_jax._trees.scale_reads import note_scale_read
from tests import forking
from tests.backends import BACKENDS, Backend
from tests.choosing import names_left_out
from tests.selection import REPEATS, covering

# JAX's compilations are cached across processes and runs; tests that run programs pass the settings on.
COMPILED = {
    "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".pytest_cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
for name, value in COMPILED.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)

# Four workers of this size fit into 16 GiB beside what they start.
_LARGE = 3 * 2**30
_limit = _LARGE

# Many tests give made-up gradients to a guard with a loss scale. The one that tests the warning resets this.
note_scale_read()
# Many tests skip steps on purpose. Those that test the log of skips watch in a process of their own.
skip_watch._watch.begin = lambda: None  # type: ignore[method-assign]

# Programs that tests run in separate processes, not test modules.
collect_ignore = [
    "forking", "pairs/blind", "pairs/eighth", "pairs/eleventh", "pairs/fifth", "pairs/fourth", "pairs/ninth",
    "pairs/second", "pairs/seventh", "pairs/sixth", "pairs/tenth", "pairs/third", "pairs/tuned",
    "pairs/twelfth", "pairs/within", "scripts", "lockfile/cases",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """In a run with workers, the programs that tests start are forked from a server."""
    if hasattr(config, "workerinput"):
        forking.use()
    elif config.getoption("numprocesses", None) and (server := forking.start()) is not None:
        config.add_cleanup(lambda: forking.stop(server))


hypothesis.settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=25, stateful_step_count=25
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, stateful_step_count=60)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(
    params=["numpy", *(pytest.param(name, marks=REPEATS) for name in BACKENDS if name != "numpy")]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """NumPy, and under ``make test-all`` each array namespace that the core runs on, eager and compiled.

    All namespaces run the same source, so its arithmetic is tested on NumPy. Where a namespace can differ
    (structure, dtypes, tracing, rounding), a test takes ``every_backend``.
    """
    return BACKENDS[request.param]


@pytest.fixture
def compiling_warns_in_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that cannot be compiled fails its own test; the warning comes once per process otherwise."""
    monkeypatch.setattr("stablenum_torch._devices.compiled_decide._Compiled.warned", False)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> Iterator[None]:
    """Leave what a module leaves behind out of garbage collection, which takes a tenth of the time otherwise.

    What JAX has compiled is released only when this process has become large, since others may use it again.
    """
    global _limit
    yield
    if full := _resident() > _limit:
        jax.clear_caches()
    gc.collect()
    gc.freeze()
    if full:  # much of it may be something else, and must not be cleared for after each module
        _limit = max(_LARGE, _resident() + 2**30)


def _resident() -> int:
    """Return the bytes of memory that this process holds now, or at most held where only that is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


@pytest.fixture
def without_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX compiles everything itself: a program read from the cache reports less about itself."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(params=list(BACKENDS))
def every_backend(request: pytest.FixtureRequest) -> Backend:
    """Each array namespace that the core runs on, eager and compiled, in every run."""
    return BACKENDS[request.param]


def _values_of(item: pytest.Function) -> set[Any]:
    """Return the values of a test's parameters; those of one ``parametrize`` mark count as one value.

    If the test has at most one such mark, each parameter counts separately.
    """
    params = item.callspec.params
    values = {name: v if isinstance(v, str | float | int) else id(v) for name, v in params.items()}
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = together if len(together) > 1 else list(params)
    return {
        tuple((name, values[name]) for name in ([group] if isinstance(group, str) else group))
        for group in groups
    }


# The files that take longest, longest first, so that no worker begins one when the others have ended: made
# from a run by `python -m pytest --record-order`.
ORDER = Path(__file__).with_name("order.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the order."""
    parser.addoption("--record-order", action="store_true", help="write tests/order.txt from this run")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the files that took 3 s or more, if asked to."""
    if not config.getoption("--record-order"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    long = sorted((file for file, s in seconds.items() if s >= 3), key=lambda file: -seconds[file])
    ORDER.write_text("".join(f"{file}\n" for file in long), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """The examples in docstrings are tests in the packages, and not in the tests themselves."""
    found = yield
    return [collector for collector in found if type(collector).__name__ != "DoctestModule"]


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most cases of a ``sampled`` test are slow, and all of ``left_out.txt``; ``gpu`` tests need a GPU."""
    place = {file: i for i, file in enumerate(ORDER.read_text(encoding="utf-8").splitlines())}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))
    others = names_left_out()
    for item in items:
        if item.nodeid in others:
            item.add_marker(pytest.mark.slow(reason="what it runs, cheaper tests run too"))
    cases: dict[str, dict[pytest.Item, set[Any]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "sampled" in item.keywords and "slow" not in item.keywords:
            cases.setdefault(item.nodeid.split("[")[0], {})[item] = _values_of(item)
    for of_one in cases.values():
        for item in of_one.keys() - covering(of_one):
            item.add_marker(REPEATS)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
