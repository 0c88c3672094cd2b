"""The log of a run in PyTorch: every step in order, no wait on an accelerator, and what a crash leaves."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import stablenum
import stablenum_torch as st
from stablenum.runlog.lines import Step, parsed
from stablenum.runlog.reading import read_run
from stablenum_torch._step import run_log
from stablenum_torch._step.guard import on_device_path
from stablenum_torch._step.sampled import counts_of, sample, update_between
from tests.torch.fake_cuda import CUDA, fake_cuda

ROOT = Path(__file__).parents[2]


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def guarded(model: torch.nn.Module, log: Path | None, **settings: Any) -> st.GuardedOptimizer:
    settings = {"clip": 1.0, "loss_scale": 8.0} | settings
    return st.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), names=model, log=log, **settings
    )


def trained(
    model: torch.nn.Module, opt: st.GuardedOptimizer, steps: range, bad: int = 50
) -> list[dict[str, Any]]:
    """Take steps, some of them with a NaN in the batch; return what each was."""
    seen = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 4, generator=generator) * (math.nan if step % 50 == 7 else 1.0)
        opt.zero_grad()
        opt.backward(model(x).square().mean())
        opt.step()
        seen.append(dict(opt.last))
    return seen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize("where", [nullcontext, on_device_path])
def test_every_step_is_in_the_log_as_it_was(path, where):
    model = model_of()
    with where():
        opt = guarded(model, path)
        seen = trained(model, opt, range(300))
    assert len(read_run(path)) == 256  # the rest is still to be written
    opt.history()
    run = read_run(path)
    assert run.steps == list(range(300))
    assert run.reason == [row["reason"] for row in seen]
    names = list(run.names)
    assert [names[i] for i in run.worst] == [row["worst"].name for row in seen]
    for column, name in ((run.loss, "loss"), (run.grad_norm, "grad_norm"), (run.loss_scale, "loss_scale")):
        assert column == pytest.approx([row[name] for row in seen], rel=1e-8, nan_ok=True)
    assert run.clip_coefficient == pytest.approx([row["clip_coefficient"] for row in seen], rel=1e-8)
    assert len(run.skipped) == 6


def test_the_header_has_settings_optimizer_and_versions(path):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(1))
    header = read_run(path).header
    assert stablenum.GuardConfig.from_dict(header["settings"]) == opt.config
    assert header["framework"] == "torch"
    assert header["optimizer"]["class"] == "AdamW"
    assert (header["optimizer"]["lr"], header["optimizer"]["betas"]) == (1e-2, [0.9, 0.999])
    assert header["versions"]["torch"] == torch.__version__


def header_of(path: Path, groups: list[dict[str, Any]], kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """Return what the header says about an optimizer of these parameter groups."""
    model = model_of()
    parts = [{"params": list(model[2 * i].parameters())} | group for i, group in enumerate(groups)]
    opt = st.wrap(kind(parts, lr=1e-2), names=model, log=path)
    trained(model, opt, range(1))
    header = parsed(path.read_text().splitlines()[0])
    assert isinstance(header, dict)
    return header["optimizer"]


def test_settings_that_differ_between_groups_are_written_by_group(path):
    written = header_of(path, [{"lr": 3e-3, "name": "body"}, {"lr": 3e-7, "betas": (0.8, 0.9)}])
    assert written["lr"] == {"by_group": [3e-3, 3e-7]}
    assert written["betas"] == {"by_group": [[0.9, 0.999], [0.8, 0.9]]}
    assert written["name"] == {"by_group": ["body", None]}
    assert (written["class"], written["eps"], written["weight_decay"]) == ("AdamW", 1e-8, 1e-2)


def test_a_setting_that_all_groups_share_is_written_once(path):
    assert header_of(path, [{}, {}])["lr"] == 1e-2


def test_a_setting_that_is_not_finite_is_written_by_its_name(path):
    written = header_of(path, [{"lr": 0.0}, {"lr": math.inf}], torch.optim.SGD)
    assert written["lr"] == {"by_group": [0.0, "inf"]}


def test_a_setting_in_a_tensor_of_the_host_is_written_as_its_number(path):
    written = header_of(path, [{"lr": torch.tensor(0.25)}, {"lr": torch.tensor(math.nan)}])
    assert written["lr"] == {"by_group": [0.25, "nan"]}


def test_a_log_changes_nothing_in_the_training(path):
    ends = []
    for log in (None, path):
        model = model_of()
        trained(model, guarded(model, log), range(140))
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


def test_the_size_of_every_64th_update_is_logged(path):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(127))
    before = [p.detach().clone() for p in model.parameters()]
    trained(model, opt, range(127, 129))
    update = read_run(path).updates
    assert [u.step for u in update] == [63, 127]
    model = model_of()
    opt = guarded(model, None)
    trained(model, opt, range(128))
    after = [p.detach() for p in model.parameters()]
    moved = torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)]).norm()
    size = torch.cat([a.flatten() for a in before]).norm()
    each = {
        name: float((b - a).norm() / a.norm())
        for (name, _), a, b in zip(model.named_parameters(), before, after, strict=True)
    }
    assert update[1].size == pytest.approx(float(moved / size), rel=1e-5)
    assert update[1].largest == pytest.approx(max(each.values()), rel=1e-5)
    assert update[1].parameter == max(each, key=each.__getitem__)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_goes_on_measures_the_updates_that_it_would_have_measured(path, request, late):
    if late:
        request.getfixturevalue("in_background")
        LateRead.arrives = True
    whole, model = path.with_name("whole.jsonl"), model_of()
    opt = guarded(model, whole)
    trained(model, opt, range(100))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    trained(model, opt, range(100, 200))
    model = model_of()
    opt = guarded(model, path)
    for _ in range(2):  # and once more in the same process, after a step whose update would be measured
        model.load_state_dict(saved[0])
        opt.load_state_dict(copy.deepcopy(saved[1]))
        trained(model, opt, range(100, 127))
    trained(model, opt, range(127, 200))
    opt.history()
    assert read_run(path).updates == read_run(whole).updates[1:]
    assert [update.step for update in read_run(path).updates] == [127, 191]


def test_a_sample_has_elements_of_all_of_a_large_parameter():
    large, small = torch.arange(100_000.0), torch.arange(3.0)
    params = [large, small, torch.empty(0)]
    elements = sample(params)
    assert elements.tolist()[256:] == [0.0, 1.0, 2.0]
    assert elements[:256].min() == 0
    assert elements[:256].max() > 99_000
    moved = update_between(5, [elements, elements * 1.5], counts_of(params), ["a", "b", "c"])
    assert moved == (5, pytest.approx(0.5), pytest.approx(0.5), "a")
    assert update_between(5, [elements, elements], counts_of([large]), ["a"]) is None


def test_complex_parameters_are_sampled_and_other_layouts_left_out():
    spins = torch.nn.Parameter(torch.tensor([3 + 4j, 0j]))
    assert sample([spins]).tolist() == [5.0, 0.0]
    with pytest.raises(RuntimeError):
        sample([torch.eye(3).to_sparse()])
    assert run_log._sampled([torch.eye(3).to_sparse()]) is None


# --- when it is written ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [lambda opt: opt.history(), lambda opt: opt.state_dict(), lambda opt: opt.guard_state_dict()],
    ids=["history", "state_dict", "guard_state_dict"],
)
def test_what_is_still_to_be_written_can_be_written_at_once(path, write):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(10))
    assert len(read_run(path)) == 0
    write(opt)
    assert read_run(path).steps == list(range(10))


def test_an_optimizer_that_is_dropped_writes_the_rest(path):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(10))
    del opt
    gc.collect()
    assert read_run(path).steps == list(range(10))


PROGRAM = """
import os, signal, sys
import torch
import stablenum_torch
w = torch.nn.Parameter(torch.ones(3))
opt = stablenum_torch.wrap(torch.optim.SGD([w], lr=0.1), log=sys.argv[1])
for step in range(int(sys.argv[2])):
    opt.zero_grad()
    opt.backward(w.square().sum())
    opt.step()
{end}
"""


def run_program(path: Path, steps: int, end: str) -> int:
    command = [sys.executable, "-c", PROGRAM.format(end=end), str(path), str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, timeout=100).returncode


def test_a_program_that_ends_with_an_error_has_written_every_step(path):
    assert run_program(path, 70, "raise RuntimeError('it ends')") == 1
    assert read_run(path).steps == list(range(70))


def test_a_process_that_is_killed_loses_fewer_than_64_steps_and_the_next_goes_on(path):
    assert run_program(path, 127, "os.kill(os.getpid(), signal.SIGKILL)") == -signal.SIGKILL
    assert read_run(path).steps == list(range(64))
    assert run_program(path, 100, "") == 0
    run = read_run(path)
    assert run.steps == list(range(100))
    assert len(run.headers) == 2
    assert run.restarts == [64]  # up to here, the steps have come out the same


@pytest.mark.slow  # tests/core shows the same with another process number
def test_a_forked_process_writes_nothing(path):
    run_program(path, 10, "if os.fork() == 0:\n    sys.exit(0)\nos.wait()")
    lines = path.read_text().splitlines()
    assert len(lines) == 11


# --- what happens to the guard -----------------------------------------------------------------------------


def test_a_run_that_goes_back_is_logged_as_it_went(path):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(80))
    kept = copy.deepcopy(opt.state_dict())
    first = trained(model, opt, range(80, 100))
    opt.load_state_dict(kept)
    trained(model, opt, range(180, 230))
    opt.history()
    run = read_run(path)
    assert run.steps == list(range(130))
    assert run.rewinds == [80]
    assert run.loss[80] != pytest.approx(first[0]["loss"])
    steps = [line.step for line in map(parsed, path.read_text().splitlines()) if isinstance(line, Step)]
    assert steps == [*range(100), *range(80, 130)]


def test_other_settings_are_a_header_of_their_own(path):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(10))
    opt.config = stablenum.GuardConfig(clip=0.5, loss_scale=8.0)
    trained(model, opt, range(10, 20))
    opt.history()
    run = read_run(path)
    assert [step for step, _ in run.headers] == [0, 10]
    assert run.header["settings"]["clip"] == [{"rule": "ClipByGlobalNorm", "max_norm": 0.5}]


def test_a_copy_of_an_optimizer_has_no_log(path):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(10))
    opt.history()
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        other.scale(torch.ones(()))
        other.step()
        other.history()
    assert read_run(path).steps == list(range(10))


def test_a_parameter_that_is_added_is_named(path):
    model, head = model_of(), torch.nn.Linear(8, 1)
    opt = guarded(model, path)
    trained(model, opt, range(10))
    opt.add_param_group({"params": list(head.parameters())})
    opt.zero_grad()
    opt.backward(head(torch.full((1, 8), math.nan)).sum())
    opt.step()
    opt.history()
    run = read_run(path)
    assert run.reason[10] == stablenum.Reason.NONFINITE_LOSS
    assert list(run.names)[run.worst[10]] == opt.last["worst"].name


def test_only_the_first_of_several_ranks_writes(path, monkeypatch):
    monkeypatch.setattr(run_log, "is_first_rank", lambda: False)
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(70))
    opt.history()
    del opt
    gc.collect()
    assert not path.exists()


def test_wrong_arguments_are_named_before_anything_is_wrapped(path):
    optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="log must be the path of a file"):
        st.wrap(optimizer, log=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log must be a file in a folder that is there"):
        st.wrap(optimizer, log=path / "run.jsonl")


def test_a_log_that_fails_does_not_end_the_training(tmp_path, caplog):
    folder = tmp_path / "runs"
    folder.mkdir()
    model = model_of()
    opt = guarded(model, folder / "run.jsonl")
    folder.rmdir()
    assert len(trained(model, opt, range(140))) == 140
    opt.history()
    assert ["The log of the run ends here" in message for message in caplog.messages] == [True]


def test_a_compiled_step_is_logged(path):
    model = model_of()
    opt = guarded(model, path)
    step = torch.compile(opt.step, backend="eager")
    for _ in range(70):
        opt.zero_grad()
        opt.backward(model(torch.ones(2, 4)).square().mean())
        step()
    assert read_run(path).steps == list(range(64))
    opt.history()
    assert read_run(path).steps == list(range(70))


# --- on an accelerator -------------------------------------------------------------------------------------


class LateRead:
    """A copy in the background that arrives when it is let."""

    arrives = False
    started: ClassVar[list[LateRead]] = []

    def begin(self, *tensors: torch.Tensor) -> None:
        self.copies = [tensor.clone() for tensor in tensors]
        LateRead.started.append(self)

    def result(self, *, wait: bool = False) -> list[torch.Tensor] | None:
        return self.copies if wait or LateRead.arrives else None


@pytest.fixture
def in_background(monkeypatch) -> None:
    monkeypatch.setattr(run_log, "BackgroundRead", LateRead)
    monkeypatch.setattr(run_log, "in_background", lambda state: True)
    LateRead.arrives, LateRead.started = False, []


def test_copies_that_arrive_late_are_written_in_order_and_lose_nothing(path, in_background):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(400))
    assert len(LateRead.started) == 6
    assert len(read_run(path)) == 0
    LateRead.arrives = True
    trained(model, opt, range(400, 401))
    run = read_run(path)
    assert run.steps == list(range(384))
    assert [update.step for update in run.updates] == [63, 127, 191, 255, 319, 383]


def test_what_is_under_way_is_waited_for_at_the_end(path, in_background):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(200))
    del opt
    gc.collect()
    assert read_run(path).steps == list(range(200))


def test_no_step_reads_a_value_on_cuda(path, monkeypatch):
    """On tensors without data, which raise if the host asks for a value."""
    monkeypatch.setattr(run_log, "EVERY", 3)
    monkeypatch.setattr(run_log, "BackgroundRead", LateRead)
    LateRead.arrives, LateRead.started = False, []
    with fake_cuda(), torch.no_grad():
        params = [torch.nn.Parameter(torch.empty(shape, device=CUDA)) for shape in ((3, 4), (600,))]
        opt = st.wrap(torch.optim.AdamW(params, fused=True), clip=1.0, loss_scale="dynamic", log=path)
        for p in params:
            p.grad = torch.empty_like(p)
        for _ in range(7):
            opt.scale(torch.empty((), device=CUDA))
            opt.step()
        assert [[copy.device.type for copy in read.copies] for read in LateRead.started] == [["cuda"] * 4] * 2
        assert [read.copies[2].shape for read in LateRead.started] == [(12 + 256,)] * 2
        opt._guard._log._file._over = True  # nothing can be read at the end


def test_a_step_that_is_captured_in_a_graph_begins_no_reading(path, monkeypatch):
    model = model_of()
    opt = guarded(model, path)
    trained(model, opt, range(3))
    monkeypatch.setattr(run_log, "capturing", lambda: True)
    trained(model, opt, range(3, 90))
    opt.history()
    assert len(read_run(path)) == 0
    monkeypatch.undo()
    trained(model, opt, range(90, 91))
    opt.history()
    assert read_run(path).steps == list(range(91))


@pytest.mark.gpu
def test_a_log_on_a_gpu_under_sync_debug_mode(path):
    params = [torch.nn.Parameter(torch.ones(s, device="cuda")) for s in ((3, 4), (600,))]
    opt = st.wrap(torch.optim.AdamW(params, fused=True), clip=1.0, loss_scale="dynamic", log=path)
    good = [torch.ones_like(p) for p in params]

    def step() -> None:
        for p, g in zip(params, good, strict=True):
            p.grad = g.clone()
        opt.scale(good[0].sum())
        opt.step()

    step()  # the first compiles, and compilers wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(300):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    opt.history()
    assert read_run(path).steps == list(range(301))
