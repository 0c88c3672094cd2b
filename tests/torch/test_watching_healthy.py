"""``stablenum explain`` leaves healthy PyTorch scripts alone, whatever they do with bad numbers."""

from __future__ import annotations

import contextlib
import inspect
import math
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from stablenum.diagnosis.watch.courses import MOST_IN_A_ROW
from stablenum_torch._diagnosis.watch import watcher
from tests.selection import one_in_three, slow_unless
from tests.torch.watched import Watching, assert_healthy, ended

NAN = float("nan")


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batches(bad: tuple[int, ...] = (1, 3, 5)) -> list[torch.Tensor]:
    """Six batches; the last one is bad, too."""
    return [torch.tensor([[1.0, NAN if i in bad else 2.0]]) for i in range(6)]


# ---------------------------------------------------------------------------------- bad batches


def skipped(is_good: Callable[[torch.Tensor], bool]) -> Callable[[], None]:
    def run() -> None:
        model, optimizer = model_and_optimizer()
        for x in batches():
            loss = model(x).square().mean()
            if is_good(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return run


def skipped_after_the_backward_pass() -> None:
    model, optimizer = model_and_optimizer()
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()


def gradients_repaired() -> None:
    model, optimizer = model_and_optimizer()
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = torch.nan_to_num(p.grad, nan=0.0)
        optimizer.step()


def gradients_dropped() -> None:
    model, optimizer = model_and_optimizer()
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if any(not p.grad.isfinite().all() for p in model.parameters()):
            optimizer.zero_grad(set_to_none=True)
        optimizer.step()


def loss_replaced() -> None:
    model, optimizer = model_and_optimizer()
    for x in batches():
        loss = model(x).square().mean()
        if not torch.isfinite(loss):
            loss = 0.0 * sum(p.sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def scaled_by_hand() -> None:
    model = torch.nn.Linear(4, 1).half()
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.01), 2.0**20
    for _ in range(12):
        optimizer.zero_grad()
        (model(torch.ones(2, 4).half()).float().square().mean() * scale).backward()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            scale /= 4
            continue
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()


def barrier(x: torch.Tensor) -> torch.Tensor:
    return (x - 0.1 * torch.log(x)).sum()


def line_search() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    for _ in range(4):
        loss = barrier(x)
        (g,) = torch.autograd.grad(loss, x)
        t = 10.0
        while not (math.isfinite(barrier(x - t * g).item()) and barrier(x - t * g).item() < loss.item()):
            t /= 2
        with torch.no_grad():
            x -= t * g


def line_search_with_derivatives() -> None:
    x = torch.tensor([3.0])
    for _ in range(4):
        start = x.clone().requires_grad_()
        barrier(start).backward()
        t = 10.0
        while True:
            trial = (x - t * start.grad).requires_grad_()
            value = barrier(trial)
            value.backward()
            if torch.isfinite(value) and trial.grad.isfinite().all():
                break
            t /= 2
        x = trial.detach()


def validation_on_a_bad_set() -> None:
    model, optimizer = model_and_optimizer()
    for x in batches(bad=()):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        str([loss.item(), model(x * NAN).mean().item()])


def a_mask_that_is_a_parameter() -> None:
    mask = torch.nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([mask, w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.softmax(w + mask, -1).square().sum().backward()
        optimizer.step()


HEALTHY = {
    "skipped by isfinite": skipped(lambda loss: bool(torch.isfinite(loss))),
    "skipped by isnan": skipped(lambda loss: not loss.isnan().any()),
    "skipped by math": skipped(lambda loss: math.isfinite(loss.item())),
    "skipped after detach": skipped(lambda loss: not math.isnan(loss.detach())),
    **{
        run.__name__.replace("_", " "): run
        for run in (
            skipped_after_the_backward_pass,
            gradients_repaired,
            gradients_dropped,
            loss_replaced,
            scaled_by_hand,
            line_search,
            line_search_with_derivatives,
            validation_on_a_bad_set,
            a_mask_that_is_a_parameter,
        )
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_script_that_copes_with_bad_numbers_is_healthy(watching: Watching, name: str, record: bool) -> None:
    assert_healthy(watching(record=record), HEALTHY[name])


def test_a_script_that_skips_every_batch_from_some_step_on_is_stopped(watching: Watching) -> None:
    def run() -> None:
        model, optimizer = model_and_optimizer()
        for i in range(1000):
            assert i < 3 * MOST_IN_A_ROW
            loss = model(torch.tensor([[1.0, 2.0 if i < 2 else NAN]])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()

    failure = ended(watching(), run).outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == ("loss", 2)


def test_a_step_with_the_gradients_of_a_bad_loss_is_the_failure_of_the_loss(watching: Watching) -> None:
    def run() -> None:
        model, optimizer = model_and_optimizer()
        for x in batches():
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    session = ended(watching(record=True), run)
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == ("loss", 1)
    assert session.outcome.report is not None


def test_a_bad_loss_with_finite_gradients_is_a_failure_if_a_step_uses_them(watching: Watching) -> None:
    def run() -> None:
        model, optimizer = model_and_optimizer()
        for x in (1.0, -50.0, 1.0, 1.0):
            optimizer.zero_grad()
            # The backward pass of relu replaces what comes from log(0) by 0.
            torch.log(torch.relu(model(torch.full((1, 2), x)))).square().mean().backward()
            optimizer.step()

    failure = ended(watching(), run).outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == ("loss", 1)


# ---------------------------------------------------------------------------------- errors


def test_steps_are_counted_after_one_that_raised(watching: Watching) -> None:
    session = watching()
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def closure() -> Any:
        raise MemoryError

    with contextlib.suppress(MemoryError):
        optimizer.step(closure)
    w.square().sum().backward()
    optimizer.step()
    assert session.outcome.steps == 1


CHECKS = [
    name
    for name, function in vars(watcher._Watcher).items()
    if inspect.isfunction(function) and not name.startswith("_") and name not in ("before_step", "after_step")
]


INNER = ["_line", "largest", "names_by_id"]
WHEN_RECORDING = ["explained", "open_window", "close_window", "state_problems", "Window"]


@pytest.mark.parametrize(
    ("name", "record"),
    slow_unless(
        lambda name, _: one_in_three(name),
        [*((name, False) for name in (*CHECKS, *INNER)), *((name, True) for name in WHEN_RECORDING)],
    ),
)
def test_an_error_of_the_watcher_leaves_the_script_alone(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, name: str, record: bool
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("of the watcher")

    monkeypatch.setattr(watcher._Watcher if name in CHECKS else watcher, name, broken)

    def run() -> None:
        for go in (gradients_repaired, skipped(lambda loss: bool(torch.isfinite(loss))), scaled_by_hand):
            go()
        x = torch.zeros(2, requires_grad=True)
        torch.autograd.grad(x.sqrt().sum(), x)
        x.grad = None
        float(x.exp().sum())
        torch.amp.GradScaler("cpu").scale(x.sum()).backward()
        with contextlib.suppress(ValueError):
            torch.distributions.Normal(torch.tensor(NAN), 1.0)
        raise ValueError("is NaN")

    try:
        session = watching(record=record)
    except RuntimeError:  # as the command installs it
        return
    ended(session, run)
    assert session.outcome.exit_code == 1
    assert torch.is_grad_enabled()
    if session.outcome.troubles:
        assert "RuntimeError: of the watcher" in session.outcome.trouble


def test_what_a_signal_handler_raises_in_a_check_is_the_scripts(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: Any) -> None:
        raise TimeoutError("alarm")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(watcher, "_line", lambda: signal.raise_signal(signal.SIGUSR1))
        session = watching()
        with pytest.raises(TimeoutError):
            (torch.ones((), requires_grad=True) * 2).item()
        assert session.outcome.troubles == 0
        assert torch.is_grad_enabled()
    finally:
        signal.signal(signal.SIGUSR1, before)


# ---------------------------------------------------------------------------------- what scripts can see


@pytest.mark.parametrize(
    "warned",
    [
        lambda w: float((w * 2).sum()),
        lambda w: torch.autograd.backward((w * 2).sum(), create_graph=True),
    ],
)
def test_a_warning_names_the_line_of_the_script(watching: Watching, warned: Callable[[Any], Any]) -> None:
    # torch gives some of its warnings only once in a process.
    torch._C._set_warnAlways(True)
    watching()
    w = torch.ones(2, requires_grad=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warned(w)
    finally:
        torch._C._set_warnAlways(False)
    files = {w.filename for w in caught}
    assert files, "no warning was given"
    assert not any("_diagnosis" in file for file in files), files


def test_a_warning_of_a_library_is_counted_from_its_caller(watching: Watching) -> None:
    session = watching()
    installed = watcher._Watcher(session)

    class Library:
        @staticmethod
        def warn(level: int) -> None:
            warnings.warn("from a library", stacklevel=level)

    installed.wrap(Library, "warn", lambda level: None)

    def caller(level: int) -> None:
        Library.warn(level)

    for level, expected in ((2, caller), (3, test_a_warning_of_a_library_is_counted_from_its_caller)):
        with pytest.warns(UserWarning, match="from a library") as caught:
            caller(level)
        first, lines = expected.__code__.co_firstlineno, len(inspect.getsourcelines(expected)[0])
        assert caught[0].filename == __file__
        assert first <= caught[0].lineno < first + lines


def test_a_mode_and_a_subclass_of_the_script_see_no_check(watching: Watching) -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def run() -> None:
        model, optimizer = model_and_optimizer()
        with Mode():
            loss = model(torch.ones(1, 2)).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()

    run()
    plain = list(seen)
    seen.clear()
    watching()
    run()
    assert seen == plain


def test_threads_do_not_hide_each_others_steps(watching: Watching) -> None:
    session = watching()
    entered, go = threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        go.wait(5)

    installed = watcher._Watcher(session)
    thread = threading.Thread(target=lambda: installed.look(held))
    thread.start()
    entered.wait(5)
    model, optimizer = model_and_optimizer()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    go.set()
    thread.join()
    assert session.outcome.steps == 1
    assert not installed.unseen.looking


def test_scripted_functions_know_the_watched_ones(watching: Watching) -> None:
    watching()

    def looks(x: torch.Tensor) -> torch.Tensor:
        if bool(torch.isnan(x).any()):
            return x
        return torch.where(torch.isfinite(x), x, 2 * x)

    assert torch.jit.script(looks)(torch.ones(2)).sum() == 2


# ---------------------------------------------------------------------------------- a model that is given up


def range_test(then: int) -> None:
    """Raise the rate until a copy is ruined, then train the model itself for a number of steps."""
    for rate, steps in ((1e30, 2), (0.01, then)):
        model, optimizer = model_and_optimizer()
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(steps):
            loss = model(torch.tensor([[1.0, 2.0]])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not math.isfinite(loss.item()):
                break


def test_a_copy_that_is_ruined_on_purpose_is_passed_by(watching: Watching) -> None:
    assert_healthy(watching(), lambda: range_test(5))


def test_a_script_that_only_ruins_its_model_is_told(watching: Watching) -> None:
    outcome = ended(watching(record=True), lambda: range_test(0)).outcome
    assert outcome.failure is not None
    assert outcome.report is not None
