"""Guarded training on eight devices, in each layout and with each fault, decides as one process does."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stablenum.norms import exact_sums
from stablenum.reference import guarded
from tests.jax.mesh_layouts import (
    BAD_ROW,
    DEVICES,
    FAULTS,
    GOOD_STEPS,
    LAYOUTS,
    SHAPES,
    batch,
    names_of,
    settings,
    spoiled,
    start,
)
from tests.selection import only

JOINED = [name for name, (kind, _, _) in LAYOUTS.items() if kind in {"shard_map", "pmap", "scan"}]


def run(*arguments: str) -> Any:
    """Run Python in a process with eight devices."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# One that XLA divides, and one that is divided by hand along two axes, run each time; the others are slow.
SOME = ["jit, FSDP", "shard_map, 2-D"]


def printed(*arguments: str) -> Any:
    done = run("-m", "tests.jax.mesh_records", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def some() -> Any:
    """What eight devices recorded: one process for all cases of some layouts."""
    return printed(*SOME)


@pytest.fixture(scope="module")
def others() -> Any:
    """The same for the other layouts."""
    return printed(*(layout for layout in LAYOUTS if layout not in SOME))


@pytest.fixture
def records(request: pytest.FixtureRequest, layout: str) -> Any:
    """What the layout of the test recorded, by fault."""
    return request.getfixturevalue("some" if layout in SOME else "others")[layout]


# The collectives of a joint decision: how many numbers each device gives.
TENSORS = len(SHAPES)
# Parts of units on one device. Along "d", units of "v" and "w" have a part on each; "b" is one unit.
UNITS_FSDP, UNITS_2D = 1 + 8 + 8, 1 + 8 // 4 + 8 // 2
NUMBERS = {
    "shard_map, FSDP: clip": 5,
    "shard_map, 2-D: clip": 5,
    "pmap: clip": 5,
    "shard_map, FSDP: elements": 5 + 3,
    "shard_map, FSDP: per tensor": 5 + 2 * TENSORS,
    "shard_map, FSDP: two rules": 5,
    "shard_map, FSDP: units": 5 + 3 * UNITS_FSDP,
    "shard_map, FSDP: units, then a norm": 5 + 2 * TENSORS + 3 * UNITS_FSDP,
    "shard_map, 2-D: units": 5 + 3 * UNITS_2D,
    "shard_map, FSDP: exact": 5 + exact_sums.COLUMNS,
}
UPDATE = "shard_map, FSDP: update"
BY_XLA = {"jit, data: clip": 0, "jit, FSDP: clip": 1, "jit, 2-D: clip": 3}
PROGRAMS = [*NUMBERS, UPDATE, *BY_XLA]
# Norms alone, with units and tensors besides, as exact sums, and by XLA: all that is reduced.
FEW = [
    "shard_map, 2-D: clip",
    "shard_map, FSDP: units, then a norm",
    "shard_map, FSDP: exact",
    UPDATE,
    "jit, FSDP: clip",
]


@pytest.fixture(scope="module")
def few() -> Any:
    """The collectives of a few compiled steps."""
    return printed(*FEW)


@pytest.fixture(scope="module")
def rest() -> Any:
    """The same for the other programs."""
    return printed(*(program for program in PROGRAMS if program not in FEW))


@pytest.fixture
def compiled(request: pytest.FixtureRequest, program: str) -> Any:
    """The collectives of the program of the test, and whether it asks the host."""
    return request.getfixturevalue("few" if program in FEW else "rest")[program]


def mean(made: Any, names: Any) -> tuple[dict[str, Any], float]:
    """The gradients of a batch and its loss, in one process."""
    grads = {name: np.mean(made[name].astype(np.float64), axis=0).astype(np.float32) for name in names}
    return grads, float(np.mean(made["loss"].astype(np.float64)))


def expected(layout: str, fault: str) -> tuple[Any, Any]:
    """What one process records of the fault, and where its parameters are one step later."""
    names = names_of(layout)
    train = guarded.Guarded(
        {name: start()[name] for name in names}, guarded.SGD(lr=0.1, momentum=0.9), **settings()
    )
    for i in range(GOOD_STEPS):
        train.step(*mean(batch(i), names))
    last = train.step(*mean(spoiled(fault), names))
    train.step(*mean(batch(GOOD_STEPS + 1), names))
    return last, dict(zip(names, train.params.values(), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", only(SOME, LAYOUTS))
def test_all_devices_decide_as_one_process_does(records: Any, layout: str, fault: str) -> None:
    found = records[fault]
    last, params = expected(layout, fault)
    assert (found["applied"], found["reason"]) == (last["applied"], last["reason"].name)
    np.testing.assert_allclose(found["grad_norm"], last["grad_norm"], rtol=2e-6)
    np.testing.assert_allclose(found["loss"], last["loss"], rtol=2e-6)
    assert found["unchanged"] == (not last["applied"])
    assert found["replicas agree"]
    assert set(found["params"]) == set(params)
    for name, whole in params.items():
        part = np.asarray(found["params"][name]).reshape(SHAPES[name])
        np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_faults_have_the_outcomes_that_they_are_there_for() -> None:
    reasons = {fault: expected("jit, data", fault)[0]["reason"].name for fault in FAULTS}
    assert reasons == {
        "healthy": "CLIPPED",
        "inf on one device": "INF_GRADIENT",
        "NaN loss on one device": "NONFINITE_LOSS",
        "loss spike on one device": "SPIKE_LOSS",
        "two devices at once": "NONFINITE_LOSS",
        "huge finite": "CLIPPED",
        "zeros on one device": "CLIPPED",
    }


def norms_by_device(layout: str, fault: str) -> list[float]:
    """The part that each device contributes to the norm, by its position."""
    _, sizes, places = LAYOUTS[layout]
    grads, _ = mean(spoiled(fault), names_of(layout))
    squares = np.zeros(tuple(sizes.values()))
    for at in np.ndindex(*squares.shape):
        index = dict(zip(sizes, at, strict=True))
        for name, whole in grads.items():
            part, copies = whole.astype(np.float64), math.prod(sizes.values())
            for dim, axis in enumerate(places[name]):
                part = np.split(part, sizes[axis], axis=dim)[index[axis]]
                copies //= sizes[axis]
            squares[at] += np.sum(part**2) / copies
    return list(np.sqrt(squares).ravel())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", only(SOME, JOINED))
def test_the_worst_device_is_named(records: Any, layout: str, fault: str) -> None:
    found = records[fault]
    if "NaN loss" in fault or fault == "two devices at once":
        rank = 3 if "NaN loss" in fault else 5  # two examples on each device
    elif "inf" in fault:
        # The mean over devices has given it to all of them.
        kept_by_row = {"shard_map, data": None, "shard_map, 2-D": 2 * (2 // 2) + BAD_ROW // 4}
        rank = kept_by_row.get(layout, BAD_ROW)
        assert found["worst"] == "v"
    else:
        by_device = norms_by_device(layout, fault)
        # Devices with copies of everything differ in nothing.
        rank = 0 if layout == "shard_map, data" else int(np.argmax(by_device))
    assert found["worst_rank"] == rank


@pytest.mark.parametrize("layout", only(SOME, [name for name in LAYOUTS if name not in JOINED]))
def test_without_axis_name_no_device_is_named(records: Any, layout: str) -> None:
    assert {one["worst_rank"] for one in records.values()} == {None}


@pytest.mark.parametrize("program", only(FEW, NUMBERS))
def test_a_joint_decision_is_one_collective(compiled: Any, program: str) -> None:
    """Its bytes are 4 x devices x numbers; without rules for single parameters, for any number of these."""
    (shape, kind) = compiled["collectives"][0]
    assert len(compiled["collectives"]) == 1, compiled
    assert kind == "all-reduce"
    assert shape.startswith(f"f32[{DEVICES},{NUMBERS[program]}]")


@pytest.mark.parametrize("program", [UPDATE])
def test_clipping_the_update_is_one_more(compiled: Any) -> None:
    """It has two numbers for each update with elements."""
    sizes = [shape.partition("{")[0] for shape, _ in compiled["collectives"]]
    assert sorted(sizes) == [f"f32[{DEVICES},5]", f"f32[{DEVICES},{2 * (TENSORS - 1)}]"]


@pytest.mark.parametrize("program", only(FEW, BY_XLA))
def test_xla_combines_the_all_reduces_of_all_norms(compiled: Any, program: str) -> None:
    """It makes one for each group of devices; as many again stand in the branch for extreme gradients, and in
    that of a skip, which looks at the parameters."""
    assert [kind for _, kind in compiled["collectives"]] == ["all-reduce"] * 3 * BY_XLA[program]


def test_the_programs_of_the_page_run_on_eight_devices() -> None:
    """On one device they are run by ``tests/test_docs.py``."""
    page = Path(__file__).parents[2] / "docs" / "distributed-jax.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert len(examples) == 4
    code = "".join(f"exec({program!r}, {{}})\n" for program in examples)
    done = run("-c", f"import jax\nassert jax.device_count() == {DEVICES}\n" + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", only(FEW, PROGRAMS))
def test_no_step_asks_the_host(compiled: Any) -> None:
    assert compiled["asks the host"] is False
