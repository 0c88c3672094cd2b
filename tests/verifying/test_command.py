"""``stablenum verify``: what is printed, the exit codes, JSON, folders of many, and what it runs without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint
from typer.testing import CliRunner

import stablenum_torch
from stablenum import cli
from stablenum.checkpoints.manifest import Manifest, files_in, record_of
from tests.test_imports import BLOCK, JAX, ROOT, TORCH

# What torch.distributed.checkpoint says in one process.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def verify(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app("verify", "diff"), ["verify", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def saved(path: Path, **arrays: list[float]) -> Path:
    torch.save({"model": {name: torch.tensor(values) for name, values in arrays.items()}}, path)
    return path


def test_a_good_file(tmp_path):
    code, text = verify(saved(tmp_path / "good.pt", w=[1.0, 2.0]))
    assert code == 0
    assert text.endswith("good.pt: good (torch, 1 array, 2 floating-point numbers)\n")


def test_several_files_and_folders_are_one_report(tmp_path, monkeypatch):
    """As a shell makes of *.pt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    saved(tmp_path / "runs" / "a.pt", w=[1.0])
    good, bad = saved(tmp_path / "good.pt", w=[1.0]), saved(tmp_path / "bad.pt", w=[np.nan])
    code, text = verify(good, bad.name, "runs")
    assert code == 1
    for name, word in (("good.pt", "good"), ("bad.pt", "poisoned"), ("runs/a.pt", "good")):
        assert re.search(rf"^ {name} +{word} ", text, re.MULTILINE), text
    assert "3 checkpoints: 2 good, 1 poisoned." in text


def test_a_poisoned_file_is_shown_in_a_table(tmp_path):
    code, text = verify(saved(tmp_path / "bad.pt", w=[1.0, np.nan, np.inf], v=[1.0]))
    assert code == 1
    assert "bad.pt: poisoned (torch, 2 arrays, 4 floating-point numbers)" in text
    assert re.search(r"model\.w +parameter or buffer +float32 +3 +1 +1 +\[1\]", text)


@pytest.mark.parametrize("values", [[1.0], [float("nan")]])
def test_an_output_without_the_letters_of_a_name(values, tmp_path):
    one, two = saved(tmp_path / "gu\u00e9.pt", wł=values), saved(tmp_path / "\u6a21.pt", w=[1.0])
    for paths in ([one], [one, two]):
        result = CliRunner(charset="ascii").invoke(cli.app("verify", "diff"), ["verify", *map(str, paths)])
        assert result.exit_code == (values != [1.0]), result.exception
        assert "gu\\xe9.pt" in result.output


# Each with what it would read.
COMMANDS = {"verify": "a.pt", "report": "a.jsonl", "explain": "a.py", "checkup": "a.py", "diff": "a.py"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_looked_at_is_a_usage_error(command, tmp_path, monkeypatch):
    locked, loop, long = tmp_path / "locked", tmp_path / "loop", tmp_path / ("x" * 300)
    locked.mkdir()
    (locked / COMMANDS[command]).write_text("")
    loop.symlink_to(loop)
    look = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent == locked:
            raise PermissionError(13, "Permission denied")
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    for path, why in (
        (locked / COMMANDS[command], "Permission denied"),
        (long, "File name too long"),
        (loop, "Too many levels of symbolic links"),
    ):
        result = CliRunner().invoke(cli.app(*COMMANDS), [command, str(path)])
        assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.exception
        assert why in " ".join(result.output.split())


@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_cannot_be_listed_is_unreadable(inner, tmp_path, monkeypatch):
    saved(tmp_path / "good.pt", w=[1.0])
    locked = tmp_path / "locked"
    locked.mkdir()
    saved(locked / "bad.pt", w=[float("nan")])
    made, listed = Path.iterdir, os.listdir

    def refusing(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def lists(path: Any) -> Any:
            if Path(path) == locked:
                raise PermissionError(13, "Permission denied")
            return call(path)

        return lists

    monkeypatch.setattr(Path, "iterdir", refusing(made))
    monkeypatch.setattr(os, "listdir", refusing(listed))
    code, text = verify(tmp_path if inner else locked)
    assert (code, "Permission denied" in text, "good.pt" in text) == (2, True, inner)


def test_a_long_report_is_cut_and_the_json_has_all(tmp_path):
    path = saved(tmp_path / "bad.pt", **{f"w{i}": [np.nan] for i in range(30)})
    code, text = verify(path, "--json", tmp_path / "report.json")
    assert (code, text.count("parameter or buffer")) == (1, 20)
    assert "... and 10 more entries (--json has all)" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 1
    (one,) = report["checkpoints"]
    assert (one["outcome"], one["format"], one["entries"], one["elements"]) == ("poisoned", "torch", 30, 30)
    assert len(one["poison"]) == 30
    assert one["poison"][7] == {
        "name": "model.w7",
        "kind": "parameter or buffer",
        "dtype": "float32",
        "shape": [1],
        "size": 1,
        "nan": 1,
        "inf": 0,
        "negative": 0,
        "first": [0],
    }


def test_json_of_what_could_not_be_checked(tmp_path):
    (tmp_path / "empty.pt").touch()
    code, text = verify(tmp_path / "empty.pt", "--json", tmp_path / "report.json")
    assert code == 2
    assert text.strip().endswith("empty.pt: unknown: it is empty")
    (one,) = json.loads((tmp_path / "report.json").read_text())["checkpoints"]
    assert (one["outcome"], one["why"], one["format"], one["poison"]) == ("unknown", "it is empty", None, [])


def test_an_entry_may_be_allowed(tmp_path):
    path = saved(tmp_path / "x.pt", w=[1.0], alibi=[-np.inf, 1.0])
    assert verify(path)[0] == 1
    assert verify(path, "--allow", "*.alibi")[0] == 0
    assert verify(path, "--allow", "*.other", "--allow", "model.a*")[0] == 0


def test_a_folder_of_many_has_a_line_each_and_the_worst_exit_code(tmp_path):
    model = torch.nn.Linear(2, 1)
    checkpoints = stablenum_torch.Checkpoints(tmp_path / "run", keep=None, on_poisoned="set aside")
    for step in (2, 10):
        checkpoints.save(step, {"model": model})
    (tmp_path / "run" / "notes.txt").write_text("no checkpoint")
    code, text = verify(tmp_path / "run")
    assert code == 0
    assert text.index("step-000000002") < text.index("step-000000010")
    assert "2 checkpoints: 2 good." in text

    saved(tmp_path / "run" / "9.pt", w=[np.nan], v=[np.inf])
    saved(tmp_path / "run" / "10.pt", w=[1.0])
    code, text = verify(tmp_path / "run")
    assert code == 1
    assert text.index("9.pt") < text.index("10.pt")
    assert "model.w (1 NaN of 1) and 1 more" in text
    assert "4 checkpoints: 1 poisoned, 3 good." in text

    (tmp_path / "run" / "step-000000010" / "state.pt").write_bytes(b"")
    model.weight.data.fill_(np.nan)
    checkpoints.save(11, {"model": model})
    code, text = verify(tmp_path / "run")
    assert code == 2
    assert "state.pt has 0 bytes instead of" in text
    assert "post-mortem/ was passed over" in text
    assert verify(tmp_path / "run" / "post-mortem")[0] == 1


def test_in_a_folder_files_without_tensors_are_passed_over(tmp_path):
    """Such as the arguments of a trainer, which are pickled."""
    saved(tmp_path / "model.pt", w=[1.0])
    torch.save(Arguments(), tmp_path / "training_args.bin")
    code, text = verify(tmp_path)
    assert code == 0
    assert "training_args.bin was passed over: it holds no tensor" in text
    assert verify(tmp_path / "training_args.bin")[0] == 2


class Arguments:
    """What a trainer was given."""


def test_a_named_file_that_is_nothing_known_counts_in_a_folder(tmp_path):
    saved(tmp_path / "model.pt", w=[1.0])
    (tmp_path / "other.pt").write_bytes(b"nothing known")
    code, text = verify(tmp_path)
    assert code == 2
    assert "2 checkpoints: 1 good, 1 unknown." in text


def test_where_the_report_cannot_be_written_nothing_is_read(tmp_path):
    code, text = verify(saved(tmp_path / "x.pt", w=[1.0]), "--json", tmp_path / "no" / "report.json")
    assert code == 2
    assert "does not exist" in text


def alone(statement: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A statement in a process in which some packages are not installed."""
    program = f"{BLOCK.format(blocked=blocked)}\nsys.path.insert(0, {str(ROOT)!r})\n{statement}\n"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={**os.environ}
    )


RUN = "import sys; sys.argv = ['stablenum', 'verify', {path!r}]; from stablenum.cli import main; main()"


def test_a_checkpoint_of_pytorch_is_checked_without_pytorch(tmp_path):
    model = torch.nn.Linear(2, 1)
    opt = stablenum_torch.wrap(torch.optim.AdamW(model.parameters()), names=model)
    opt.backward(model(torch.ones(3, 2)).sum())
    opt.step()
    folder = tmp_path / "run"
    ours = stablenum_torch.Checkpoints(folder, format="safetensors", on_poisoned="set aside")
    state = {"model": model, "optimizer": opt}
    ours.save(1, state)
    opt.state[model.weight]["exp_avg_sq"][0, 1] = -1.0
    save_file({"exp_avg_sq": opt.state[model.weight]["exp_avg_sq"]}, tmp_path / "alone.safetensors")
    without = (*TORCH, *JAX, "safetensors")
    result = alone(RUN.format(path=str(folder)), without)
    assert (result.returncode, "good" in result.stdout) == (0, True), result.stderr
    result = alone(RUN.format(path=str(tmp_path / "alone.safetensors")), without)
    assert (result.returncode, "second moment" in result.stdout) == (1, True), result.stderr


@pytest.mark.parametrize(
    ("name", "blocked", "message"),
    [
        ("x.pt", TORCH, "a file that torch wrote needs torch 2.11 or newer: pip install 'torch>=2.11'"),
        ("orbax", ("orbax",), "a checkpoint of Orbax needs orbax-checkpoint 0.12.8 or newer: pip install"),
    ],
)
def test_a_missing_framework_is_named(name, blocked, message, tmp_path):
    saved(tmp_path / "x.pt", w=[1.0])
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "_METADATA").write_text("{}")
    result = alone(RUN.format(path=str(tmp_path / name)), blocked)
    assert result.returncode == 2, result.stderr
    assert f"unreadable: {message}" in " ".join(result.stdout.split())


def test_the_command_is_listed_and_its_help_says_what_it_reads():
    code, text = verify("--help")
    assert code == 0
    assert "FILE|FOLDER" in text
    assert "No code of a checkpoint is run" in " ".join(text.split())
    result = subprocess.run(
        [sys.executable, "-m", "stablenum", "--help"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert re.search(r"^\s*verify ", result.stdout, re.M)


def test_what_each_rank_has_for_itself_is_looked_at(tmp_path):
    """In distributed checkpoints of several ranks, tensors of one rank have its number in front."""
    folder = tmp_path / "step-000000003"
    tensors = {"model.w": torch.ones(2)}
    for rank in range(2):
        tensors[f"rank {rank}/window"] = torch.tensor([1.0, np.nan if rank else 2.0])
    checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    plain = {"model": {"w": {"$": "array", "name": "model.w"}}, "window": {"$": "array", "name": "window"}}
    for rank in range(2):
        (folder / f"state-{rank:05d}.json").write_text(json.dumps(plain))
    files = {name: record_of(folder / name) for name in files_in(folder)}
    made = {"format": "dcp", "confirmed": True, "time": "", "versions": {}, "files": files}
    Manifest(step=3, serial=1, **made).write(folder)
    code, text = verify(folder, "--json", tmp_path / "report.json")
    (one,) = json.loads((tmp_path / "report.json").read_text())["checkpoints"]
    assert (code, one["entries"], one["elements"]) == (1, 3, 6), text
    assert [p["name"] for p in one["poison"]] == ["window"]
