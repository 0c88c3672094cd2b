"""However a number that is not finite is written into a tensor, the replay names the line that writes it."""

import inspect
import math

import pytest
import torch

import stablenum_torch
from stablenum.diagnosis import Cause

WRITES = [
    lambda x, bad: x.__setitem__(0, bad),
    lambda x, bad: x.__setitem__(slice(None), bad),
    lambda x, bad: x.__setitem__(slice(None), torch.tensor(bad)),
    lambda x, bad: x.__setitem__(..., bad),
    lambda x, bad: x.__setitem__(slice(1, 3), bad),
    lambda x, bad: x.__setitem__(x > 2, bad),
    lambda x, bad: x.__setitem__(torch.tensor([1, 2]), bad),
    lambda x, bad: x.fill_(bad),
    lambda x, bad: x.copy_(torch.full((4,), bad)),
    lambda x, bad: x.data.__setitem__(1, bad),
    lambda x, bad: x.data.fill_(bad),
    lambda x, bad: x.detach().__setitem__(slice(None), bad),
    lambda x, bad: setattr(x, "data", torch.full((4,), bad)),
    lambda x, bad: torch.where(x > 2, torch.tensor(bad), x, out=x),
    lambda x, bad: torch.full((4,), bad, out=x),
    lambda x, bad: x.masked_fill_(x > 2, bad),
    lambda x, bad: x.index_put_((torch.tensor([1]),), torch.tensor(bad)),
    lambda x, bad: x.index_fill_(0, torch.tensor([1]), bad),
    lambda x, bad: x.scatter_(0, torch.tensor([1]), bad),
    lambda x, bad: x.view(2, 2).__setitem__((0, 0), bad),
    lambda x, bad: x.flatten().__setitem__(slice(None), bad),
]


@pytest.mark.parametrize("write", WRITES, ids=lambda w: inspect.getsource(w).strip()[16:-1])
def test_a_nan_that_is_written_is_found_where_it_is_written(write):
    w = torch.ones(4, requires_grad=True)

    def step():
        x = torch.arange(4.0) + 1
        write(x, math.nan)
        return (x * w).sum()

    report = stablenum_torch.replay(step)
    assert report.verdict.cause is Cause.BATCH
    assert report.findings[0].place.line == write.__code__.co_firstlineno
    assert report.findings[0].gives == "NaN"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [1, slice(None)])
def test_memory_that_numpy_writes_is_not_blamed_on_an_operation(bad, where):
    w = torch.ones(4, requires_grad=True)

    def step():
        x = torch.arange(4.0) + 1
        x.numpy()[where] = bad
        return (x * w).sum()

    report = stablenum_torch.replay(step)
    assert report.verdict.cause is Cause.BATCH
    assert "a write without torch, as through NumPy" in str(report)
    assert "torch.from_numpy" in report.verdict.remedy


def test_a_mask_that_is_filled_whole_is_no_fault():
    scores = torch.zeros(3, 3, requires_grad=True)

    def step():
        mask = torch.zeros(3, 3)
        mask[:] = -math.inf
        return (scores + mask.triu(1)).softmax(-1).square().sum()

    assert stablenum_torch.replay(step).ok


def test_a_running_minimum_that_begins_at_inf_is_no_fault():
    x = torch.tensor([3.0, 2.0], requires_grad=True)

    def step():
        best = torch.zeros(2)
        best[:] = math.inf
        return torch.minimum(best, x).sum()

    assert stablenum_torch.replay(step).ok


@pytest.mark.parametrize("after", [True, False])
def test_the_call_with_a_derivative_is_named_where_another_has_none(after):
    """A teacher runs the same line without gradients, right after the student or before it."""
    w, v = torch.zeros(4, requires_grad=True), torch.ones(4)

    def distance(a):
        return torch.sqrt(a)

    def student():
        return distance(w)

    def teacher():
        with torch.no_grad():
            return distance(v)

    def step():
        first, second = (student, teacher) if after else (teacher, student)
        return (first() - second()).square().sum()

    found = stablenum_torch.replay(step).findings[0]
    assert found.derivative
    assert "student" in [frame.function for frame in found.frames]
    assert found.inputs[0].zero == 4


def test_the_sign_of_an_infinity_is_the_same_in_the_head_and_in_the_table():
    report = stablenum_torch.replay(lambda: torch.zeros(2, requires_grad=True).log().sum())
    assert "log gives -inf (forward)" in str(report)
    assert "2 -inf" in str(report)


@pytest.mark.parametrize("known", [{}, {"known_bad": True}])
def test_a_closure_that_returns_nothing_is_not_said_to_be_right(known):
    report = stablenum_torch.replay(lambda: None, **known)
    assert not report.ok
    assert "Nothing wrong" not in str(report)
    assert "nothing to judge" in str(report)
    assert "return loss" in report.verdict.remedy
