"""A run that was rewound, or killed and resumed, has the same bits as one that was never in trouble."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch.recovering import AGAIN, KINDS, made_nan, same, whole_state

pytestmark = [
    # What torchdata 0.11 calls when it is imported with a torch that has deprecated it.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    # Where tests of JAX ran before in this process. The workers of a loader do not use JAX.
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),
    # On a machine with a single core.
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes in total"),
]


# Workers take long to start.
_PARAMS = [pytest.param(k, marks=[pytest.mark.slow] * k.startswith("stateful loader,")) for k in KINDS]


@pytest.fixture(params=_PARAMS)
def kind(request: pytest.FixtureRequest) -> str:
    if "stateful" in request.param:
        pytest.importorskip("torchdata", reason="its stateful loader is tested where it is installed")
    return str(request.param)


@functools.cache
def expected(kind: str) -> dict[str, Any]:
    """The whole state after 45 steps without any trouble."""
    training = KINDS[kind]()
    assert training.run().events == []
    return whole_state(training)


def test_a_rewound_run_is_the_one_that_would_have_been(kind: str) -> None:
    training = KINDS[kind]()
    tensors = {name: t.data_ptr() for name, t in training.model.state_dict().items()}
    recovery = training.run(hurt=made_nan)
    assert [event.to_step for event in recovery.events] == [30]
    assert same(whole_state(training), expected(kind))
    assert tensors == {name: t.data_ptr() for name, t in training.model.state_dict().items()}


@pytest.mark.parametrize("killed_after", [10, 24])
def test_a_resumed_run_is_the_one_that_was_not_killed(kind: str, killed_after: int, tmp_path: Path) -> None:
    KINDS[kind]().run(killed_after, folder=tmp_path)
    training = KINDS[kind]()
    torch.manual_seed(12345)
    recovery = training.recovery(folder=tmp_path)
    assert recovery.resume() == killed_after // 10 * 10
    training.run(recovery=recovery)
    assert same(whole_state(training), expected(kind))


def test_a_recovery_changes_nothing_of_a_run_without_trouble() -> None:
    plain = KINDS["fused Adam, loss scale"]()
    batches = (batch for _ in range(7) for batch in plain.data)
    for _, batch in zip(range(45), batches, strict=False):
        plain.step(batch)
    found, wanted = whole_state(plain), expected("fused Adam, loss scale")
    generators = ("torch", "numpy", "python")  # the loop above has read a batch more
    assert all(same(found[name], wanted[name]) for name in found if name not in generators)


def test_the_comparison_sees_a_single_bit() -> None:
    training = KINDS["fused Adam, loss scale"]()
    training.run()
    state = whole_state(training)
    assert same(state, expected("fused Adam, loss scale"))
    moment = training.opt.state[training.model[0].weight]["exp_avg_sq"]  # type: ignore[index]
    moment.view(torch.int32)[0, 0] ^= 1
    assert not same(whole_state(training), expected("fused Adam, loss scale"))


def test_a_run_that_goes_on_with_other_data_is_another_one() -> None:
    training = KINDS["fused Adam, loss scale"]()
    policy = dataclasses.replace(AGAIN, responses=(dataclasses.replace(AGAIN.responses[0], skip_data=True),))
    training.run(hurt=made_nan, policy=policy)
    assert not same(whole_state(training), expected("fused Adam, loss scale"))
