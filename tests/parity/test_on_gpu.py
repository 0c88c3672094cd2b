"""The scenarios on a GPU compared with the NumPy specification, and the GPU's code path run on a CPU."""

from __future__ import annotations

import dataclasses

import pytest

from stablenum.commands.compare.backends import BACKENDS, Backend
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.runner import run_guarded, run_scenario
from stablenum.commands.compare.scenarios import Stream
from stablenum_torch._devices import waits
from stablenum_torch._step.guard import on_device_path
from tests.selection import only

pytestmark = pytest.mark.usefixtures("compiling_warns_in_each_test")

STREAMS = [name for name, scenario in SCENARIOS.items() if isinstance(scenario, Stream)]
TRAININGS = [name for name in SCENARIOS if name not in STREAMS]
TORCH = ("torch", "torch-foreach", "torch-compiled")


def placed(device: str) -> list[Backend]:
    """NumPy and PyTorch's backends, with PyTorch's tensors on a device."""
    backends = [
        dataclasses.replace(BACKENDS[name], name=f"{name} on {device}", device=device) for name in TORCH
    ]
    return [BACKENDS["numpy"], *backends]


def assert_streams_agree(name: str, backends: list[Backend]) -> None:
    """The gradients are given, so every step can be compared."""
    result = run_scenario(SCENARIOS[name], backends)
    assert [str(c.disagreement) for c in result.comparisons.values() if c.disagreement] == []
    assert result.surprises == []


def assert_training_ends_as_expected(name: str, backends: list[Backend]) -> None:
    """Each device multiplies matrices in its own order, so steps may differ; the outcome may not.

    With ``escalate``, PyTorch's host may see a new format some steps late on CUDA, and skip more steps.
    """
    scenario = SCENARIOS[name]
    if scenario.guard.escalate is not None and any(b.device == "cuda" for b in backends):
        scenario = dataclasses.replace(scenario, expected=dataclasses.replace(scenario.expected, skips=None))
    assert run_scenario(scenario, backends).surprises == []


@pytest.mark.parametrize(
    "name", only(["hysteresis", "clip-rules"], ["single-nan", "hysteresis", "fp16-leaves", "clip-rules"])
)
def test_the_gpu_path_run_on_a_cpu_decides_as_numpy(name: str) -> None:
    with on_device_path():
        assert_streams_agree(name, placed("cpu")[:3])


def test_the_gpu_path_run_on_a_cpu_trains_as_expected() -> None:
    with on_device_path():
        assert_training_ends_as_expected("loss-1e-7-fp16-scaled", placed("cpu")[:2])


def test_a_run_stops_at_the_step_that_halts_it_although_the_gpu_tells_of_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrapped optimizer on a GPU raises in a later step; the command compares the steps up to this one."""
    monkeypatch.setattr(waits, "_on_cuda", lambda tensor: True)
    monkeypatch.setattr(waits.BackgroundRead, "begin", lambda *_: None)  # its copies never arrive
    stream = SCENARIOS["single-nan"]
    raising = dataclasses.replace(stream, guard=dataclasses.replace(stream.guard, on_nonfinite="raise"))
    with on_device_path():
        reference, trace = (run_guarded(raising, backend) for backend in placed("cpu")[:2])
    assert len(trace.rows) == len(reference.rows) == 21
    assert str(trace.stopped).startswith("Training stopped: 1 step(s) in a row")
    assert trace.rows[-1].reason == reference.rows[-1].reason


@pytest.mark.gpu
@pytest.mark.parametrize("name", STREAMS)
def test_torch_decides_as_the_reference_does(name: str) -> None:
    assert_streams_agree(name, placed("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAININGS)
def test_torch_trains_as_expected(name: str) -> None:
    assert_training_ends_as_expected(name, placed("cuda"))


def jax_backends() -> list[Backend]:
    """NumPy and JAX's backends, with JAX's arrays on its default device."""
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX runs on the {jax.default_backend()} here; it needs jax[cuda12] to see the GPU")
    return [BACKENDS[name] for name in ("numpy", "jax", "jax-jit")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", STREAMS)
def test_jax_decides_as_the_reference_does(name: str) -> None:
    assert_streams_agree(name, jax_backends())


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAININGS)
def test_jax_trains_as_expected(name: str) -> None:
    assert_training_ends_as_expected(name, jax_backends())
