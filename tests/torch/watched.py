"""Watch a function as ``stablenum explain`` watches a PyTorch script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.session import Session, Stop
from stablenum_torch._diagnosis.watch import watcher
from stablenum_torch._diagnosis.watch.by_hand import REPAIRS
from stablenum_torch._diagnosis.watch.script_recorder import Window

Watching = Callable[..., Session]


def watching_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Watch as in a first run, or with ``record=True`` as in the run that records, from a step on."""
    looks = ("isnan", "isfinite", "isinf")
    for owner, names in (
        (torch.autograd, ("backward", "grad")),
        (torch.amp.GradScaler, ("scale",)),
        (watcher.GuardedOptimizer, ("scale",)),
        (torch.Tensor, ("item", "__float__", *looks, *REPAIRS)),
        (torch, (*looks, "nan_to_num", "nan_to_num_", "where", "masked_fill")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    handles: list[Any] = []
    windows: list[Window] = []
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        register = getattr(watcher, name)
        monkeypatch.setattr(watcher, name, lambda hook, register=register: handles.append(register(hook)))

    class Kept(Window):
        """A window that is closed once, by its watcher or by the test."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            windows.append(self)

        def close(self) -> None:
            if self in windows:
                windows.remove(self)
                super().close()

    monkeypatch.setattr(watcher, "Window", Kept)
    state = torch.get_rng_state()

    def begin(
        *, record: bool = False, step: int = 0, ignore: tuple[str, ...] = (), settings: bool = False
    ) -> Session:
        begin = step if record else None
        session = Session(Plan(script="script.py", record_from=begin, ignore=ignore, settings=settings))
        watcher.watch(session)
        return session

    yield begin
    for handle in handles:
        handle.remove()
    for window in list(windows):
        window.close()
    torch.set_rng_state(state)


def ended(session: Session, run: Callable[[], Any]) -> Session:
    """Run it as the command runs a script."""
    try:
        run()
        session.outcome.exit_code = 0
    except Stop:
        pass
    except Exception as error:  # noqa: BLE001
        session.outcome.exit_code = 1
        for report in session.on_error:
            session.sheltered(report, error)
    session.conclude()
    return session


def found(session: Session, run: Callable[[], Any]) -> Report:
    assert ended(session, run).outcome.report is not None
    assert session.outcome.troubles == 0, session.outcome.trouble
    return Report.from_dict(session.outcome.report)


def assert_healthy(session: Session, run: Callable[[], Any]) -> None:
    assert ended(session, run).outcome.failure is None
    assert session.outcome.troubles == 0, session.outcome.trouble
    assert session.outcome.exit_code == 0
