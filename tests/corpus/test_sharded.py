"""The planted JAX failures inside ``shard_map``: line and cause as right as without it, and the shard too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corpus.case import build, modules
from tests.corpus.test_corpus import MISSES

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "diagnosis-shards.json"
# A fault in the data, in a parameter, in a loop, in an optimizer's state, and one that all shards have.
FEW = ("where_trap_log", "nan_parameter", "scan_third_iteration", "adam_nan_moment", "empty_batch")


def measured(tmp_path: Path, *names: str) -> Any:
    """The figures of these cases, or of all of them."""
    file = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, "-m", "tests.corpus.sharding", str(file), *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=1700,
        check=True,
    )
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_few_failures_in_one_of_four_shards(tmp_path: Path) -> None:
    found = measured(tmp_path, *FEW)
    assert found["missed"] == {}
    assert found["failures"] == found["with a shard to name"] == len(FEW)
    assert found["split"] == {"all": 3, "data": 1, "everywhere": 1}


@pytest.mark.slow(reason="takes a minute")
def test_healthy_programs_in_shards_are_not_blamed(tmp_path: Path) -> None:
    assert measured(tmp_path, "healthy") == []


@pytest.mark.slow(reason="takes several minutes")
@pytest.mark.timeout(1800)
def test_all_failures_in_one_of_four_shards(tmp_path: Path) -> None:
    found = measured(tmp_path)
    count = sum(build(m, "jax") is not None for m in modules("failing"))
    without = count - sum(framework == "jax" for framework, _ in MISSES)
    assert found["failures"] == count
    assert found["line"] >= without - 0.05 * count, found["missed"]
    assert found["cause"] >= without - 0.05 * count, found["missed"]
    assert found["shard"] >= 0.95 * found["with a shard to name"], found["missed"]
    assert found["with a shard to name"] >= 0.95 * count


def test_the_recorded_figures_reach_the_goal() -> None:
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))
    count = sum(build(m, "jax") is not None for m in modules("failing"))
    assert kept["failures"] == count, "record them again: python -m tests.corpus.sharding FILE"
    assert min(kept["line"], kept["cause"]) >= 0.95 * count
    assert kept["shard"] >= 0.95 * kept["with a shard to name"]
