"""A run in PyTorch that goes back says why in its log, and the report says so too."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stablenum import RecoveryPolicy, RecoveryStopped
from stablenum.commands.report.page import as_html
from stablenum.commands.report.watch import shown
from stablenum.runlog.lines import Rewind, Step, parsed
from stablenum.runlog.reading import Run, read_run
from stablenum.typing import Response
from stablenum_torch._step import run_log
from tests.torch.recovering import AGAIN, Training, made_nan, numbered
from tests.torch.test_run_log import LateRead

EASED = RecoveryPolicy(
    every=10, check_every=5, good_after=0, responses=(Response(rate=0.5, clip=1.0, steps=8),)
)


def training(log: Path | None, lr: float = 1e-3) -> Training:
    return Training(numbered, lambda params: torch.optim.Adam(params, lr=lr), log=log)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def kept(hurt: Training, path: Path) -> Run:
    """What is read once the rest is written."""
    hurt.opt.history()
    return read_run(path)


def on_terminal(run: Run) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(shown(run, 300))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_no_step_of_before_is_written_again_however_far_the_run_goes_back(path):
    """The log remembers the last 256 steps; the record of the state that is put back is older."""
    hurt = training(path)
    policy = RecoveryPolicy(every=100, keep=2, good_after=300, responses=(Response(skip_data=False),))
    (event,) = hurt.run(steps=450, hurt=made_nan, at=428, policy=policy).events
    assert (event.symptom.step, event.to_step) == (430, 100)
    run = kept(hurt, path)
    steps = [line.step for line in map(parsed, path.read_text().splitlines()) if isinstance(line, Step)]
    assert steps == [*range(430), *range(100, 450)]
    assert (run.rewinds, run.restarts, len(run.undone)) == ([], [], 330)


@pytest.mark.parametrize("late", [False, True], ids=["on a CPU", "copies in the background"])
def test_a_rewind_is_in_the_log_with_its_reason(path, monkeypatch, late):
    if late:
        monkeypatch.setattr(run_log, "BackgroundRead", LateRead)
        monkeypatch.setattr(run_log, "in_background", lambda state: True)
        LateRead.arrives, LateRead.started = False, []
    hurt = training(path)
    (event,) = hurt.run(steps=80, hurt=made_nan, at=73, policy=AGAIN).events
    hurt.opt.history()
    lines = [parsed(line) for line in path.read_text().splitlines()]
    (rewind,) = [line for line in lines if isinstance(line, Rewind)]
    at = lines.index(rewind)
    steps = [[line.step for line in part if isinstance(line, Step)] for part in (lines[:at], lines[at:])]
    # Seen after 75 steps, whose numbers are 0 to 74. The same data give the same steps again.
    assert steps == [[*range(75)], [*range(70, 80)]]
    assert (rewind.symptom, rewind.first, rewind.last) == ("nonfinite_state", 70, 74)
    assert rewind.seen == "1 tensor of the state is not finite (1.running_var)"
    assert rewind.done == "Attempt 1: the same data again"
    since = event.symptom.origin
    done = "Attempt 1: back to step 70, the same data again"
    assert str(event) == f"step 75: {rewind.seen}, likely since step {since}. {done}"


def test_the_report_says_why_a_run_went_back(path):
    hurt = training(path)
    hurt.run(steps=80, hurt=made_nan, at=73, policy=AGAIN)
    run = kept(hurt, path)
    assert (run.steps, [step.step for step in run.undone]) == ([*range(80)], [*range(70, 75)])
    seen = "1 tensor of the state is not finite (1.running_var)"
    said = f"back from step 74 to step 70: {seen}. Attempt 1: the same data again"
    assert said in on_terminal(run)
    page = as_html([run])
    assert f"<code>nonfinite_state</code><br>{seen}.</td>" in page
    assert f'"rewinds":[{{"first":70,"last":74,"text":"{said}"}}]' in page


def test_a_run_that_is_eased_is_not_one_that_was_started_again(path):
    """A tighter clip is another setting, which the log has in a header."""
    hurt = training(path, lr=1e-2)
    (event,) = hurt.run(steps=60, hurt=made_nan, at=33, policy=EASED).events
    run = kept(hurt, path)
    assert (run.restarts, run.rewinds) == ([], [])
    assert [step for step, _ in run.headers] == [0, 30, 43]
    clips = [header["settings"].get("clip", []) for _, header in run.headers]
    assert (clips[0], clips[2]) == ([], [])
    assert clips[1] == [{"rule": "ClipByGlobalNorm", "max_norm": event.clip_at}]
    (rewind,) = run.events
    assert "learning rate x 0.5, gradients clipped at" in rewind.done
    assert run.steps == list(range(60))


def test_a_run_that_is_stopped_says_so_in_its_log(path):
    def always(training: Training) -> None:
        training.model[0].weight.data[0, 0] = math.inf  # type: ignore[index, union-attr, operator]

    hurt = training(path)
    recovery = hurt.recovery(RecoveryPolicy(every=10, check_every=5, good_after=0, budget=1))

    def trained() -> None:
        for batch in recovery.batches(60):
            hurt.step(batch)
            if recovery.step == 32:
                always(hurt)

    with pytest.raises(RecoveryStopped):
        trained()
    run = kept(hurt, path)
    assert [event.done for event in run.events][1:] == [
        "The training was stopped: the budget of 1 rewinds is used up"
    ]
    assert run.steps == list(range(30))  # the last good state
    assert "The training was stopped: the budget of 1 rewinds is used up" in on_terminal(run)


def test_a_run_that_is_started_again_after_a_rewind_goes_on_in_its_log(path, tmp_path):
    first = training(path)
    first.run(steps=37, hurt=made_nan, at=33, policy=AGAIN, folder=tmp_path / "snapshots")
    before = kept(first, path)
    assert ([event.first for event in before.events], before.steps) == ([30], [*range(37)])
    second = training(path)
    recovery = second.recovery(AGAIN, folder=tmp_path / "snapshots")
    assert recovery.resume() == 30
    second.run(steps=60, recovery=recovery)
    run = kept(second, path)
    assert (run.events, run.rewinds, run.restarts) == (before.events, [], [37])  # until then, as before
    assert run.steps == list(range(60))


def test_an_update_is_not_measured_over_a_rewind(path):
    """The sample is taken after step 62, and the run goes back and takes that step again."""
    hurt = training(path)
    policy = RecoveryPolicy(every=30, check_every=7, good_after=0, responses=(Response(skip_data=False),))
    (event,) = hurt.run(steps=140, hurt=made_nan, at=62, policy=policy).events
    assert (event.symptom.step, event.to_step) == (63, 60)
    healthy = training(path.with_name("healthy.jsonl"))
    healthy.run(steps=140, policy=policy)
    updates = kept(hurt, path).updates
    assert [update.step for update in updates] == [63, 127]
    assert updates == kept(healthy, path.with_name("healthy.jsonl")).updates


def test_only_the_first_of_several_ranks_writes_why(path, monkeypatch):
    monkeypatch.setattr(run_log, "is_first_rank", lambda: False)
    hurt = training(path)
    assert len(hurt.run(hurt=made_nan, policy=AGAIN).events) == 1
    assert not path.exists()
