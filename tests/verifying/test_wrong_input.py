"""Every reader of files ends with a verdict or a sentence, whatever is in them."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

import stablenum
from stablenum import CheckpointError
from stablenum.checkpoints.manifest import MANIFEST, _with_digest
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from stablenum.commands.report import watch
from stablenum.commands.report.page import as_html
from stablenum.commands.report.tables import differences
from stablenum.commands.verify.command import _as_html, _as_plain
from stablenum.commands.verify.looking import look_at
from stablenum.runlog.reading import NotALogError, read_run
from tests.core.saving import state_of, store_in
from tests.report.logs import log_of, record
from tests.selection import REPEATS
from tests.verifying import jax_states, torch_states
from tests.wrong_input import damaged, mutated, repickled

pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[[Path], Path]
Change = Callable[[random.Random, Path], None]


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """End a try that would run for ever."""

    def stop(*_: object) -> None:
        pytest.exit("it does not end")  # which no reader catches

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- what is changed ---------------------------------------------------------------------------------------


def bytes_of(draw: random.Random, path: Path) -> None:
    """Damage one file."""
    file = draw.choice(sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path])
    file.write_bytes(damaged(draw, file.read_bytes()))


def header_of_safetensors(draw: random.Random, path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(draw, json.loads(data[8 : 8 + length]), draw.randint(1, 3))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def member_of_archive(draw: random.Random, path: Path) -> None:
    """Damage a part of an archive, whose checksum is right."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    chosen = draw.choice(sorted(parts))
    parts[chosen] = damaged(draw, parts[chosen][:2000]) + parts[chosen][2000:]
    with zipfile.ZipFile(path, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def pickle_of_torch(draw: random.Random, path: Path) -> None:
    state = {"model": {"w": 1.0, "b": [2.0, 3]}, "step": 3, "betas": (0.9, 0.99), "name": "x"}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", repickled(draw, state))
        archive.writestr("x/data/0", bytes(16))
        archive.writestr("x/version", "3")
    path.write_bytes(buffer.getvalue())


def pickled_metadata(draw: random.Random, path: Path) -> None:
    file = path / ".metadata"
    file.write_bytes(repickled(draw, pickle.loads(file.read_bytes())))


def json_of_folder(draw: random.Random, path: Path) -> None:
    """Change a file of JSON; in a checkpoint of ours, the manifest fits the change."""
    names = ("_METADATA", "_CHECKPOINT_METADATA")
    files = [p for p in path.rglob("*") if p.suffix == ".json" or p.name in names]
    file = draw.choice(sorted(files))
    plain = mutated(draw, json.loads(file.read_bytes()), draw.randint(1, 3))
    if file.name != MANIFEST:
        file.write_text(json.dumps(plain), encoding="utf-8", errors="surrogatepass")
        return
    if isinstance(plain, dict):
        plain.pop("manifest_sha256", None)
        try:
            file.write_bytes(_with_digest(plain))
        except UnicodeEncodeError:
            file.write_text(json.dumps(plain), encoding="utf-8")


def header_of_npy(draw: random.Random, path: Path) -> None:
    fields = {"descr": "<f4", "fortran_order": False, "shape": (3, 2)}
    described = {**fields, "shape": list(fields["shape"])}
    text = repr(mutated(draw, described, draw.randint(1, 2))).replace("[", "(").replace("]", ",)")
    header = text.encode("utf-8", "replace")[:60_000] + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(24))


# --- what reads it -----------------------------------------------------------------------------------------


def verified(path: Path) -> None:
    outcomes, notes = look_at(path)
    for outcome in outcomes:
        assert outcome.exit_code in (0, 1, 2)
        assert outcome.word in ("good", "poisoned", "unreadable", "corrupt", "unknown")
        assert outcome.verdict is not None or len(outcome.why) > 5, outcome
    json.dumps(_as_plain(outcomes, notes), allow_nan=False)
    _as_html(outcomes, notes)


def loaded(path: Path) -> None:
    with contextlib.suppress(CheckpointError):
        Store(path.parent, store_in(path).codec, StoreSettings()).load(None)


def reported(path: Path) -> None:
    try:
        run = read_run(path)
    except NotALogError:
        return
    as_html([run, run]).encode()
    list(differences([run, run]))
    watch.shown(run, 80)


def configured(path: Path) -> None:
    try:
        config = stablenum.GuardConfig.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except (TypeError, ValueError):
        return
    assert config.to_dict() is not None


def lines_of_a_log(draw: random.Random, path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = draw.randrange(len(lines))
    lines[at] = mutated(draw, lines[at], draw.randint(1, 3))
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")


def json_of_a_file(draw: random.Random, path: Path) -> None:
    path.write_text(json.dumps(mutated(draw, json.loads(path.read_text()), draw.randint(1, 3))), "utf-8")


def of_torch(name: str) -> Make:
    return lambda folder: torch_states.WRITERS[name](torch_states.trained("adamw"), folder)


def of_jax(name: str) -> Make:
    return lambda folder: jax_states.WRITERS[name](jax_states.started("adamw"), folder)


def npy(folder: Path) -> Path:
    np.save(folder / "x.npy", np.ones((3, 2), np.float32))
    return folder / "x.npy"


def distributed(folder: Path) -> Path:
    checkpoint.save({"model": {"w": torch.ones(3)}, "lr": 0.1, "step": 2}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def own(folder: Path) -> Path:
    path = store_in(folder).save(1, state_of(1))
    assert path is not None
    return path


def log(folder: Path) -> Path:
    rows = [record(i, loss=2.0 - i / 10) for i in range(4)]
    optimizer = {"class": "Adam", "lr": {"by_group": [0.1, 0.2]}, "betas": [0.9, 0.99]}
    return log_of(folder / "run.jsonl", rows, optimizer=optimizer)


def config(folder: Path) -> Path:
    made = stablenum.GuardConfig(clip=(stablenum.ClipByGlobalNorm(1.0), stablenum.ZClip()))
    (folder / "guard.json").write_text(made.to_json(), encoding="utf-8")
    return folder / "guard.json"


# Each with the tries of the fast run; the slow one makes a thousand times as many.
CASES: dict[str, tuple[Make, Change, Callable[[Path], None], int]] = {
    "torch, bytes": (of_torch("torch"), bytes_of, verified, 5),
    "torch, members": (of_torch("torch"), member_of_archive, verified, 5),
    "torch, pickles": (of_torch("torch"), pickle_of_torch, verified, 10),
    "torch before 1.6, bytes": (of_torch("legacy"), bytes_of, verified, 4),
    "safetensors, bytes": (of_torch("safetensors"), bytes_of, verified, 4),
    "safetensors, header": (of_torch("safetensors"), header_of_safetensors, verified, 10),
    "npz, bytes": (of_torch("npz"), bytes_of, verified, 4),
    "npz, members": (of_torch("npz"), member_of_archive, verified, 6),
    "npy, header": (npy, header_of_npy, verified, 6),
    "distributed, bytes": (distributed, bytes_of, verified, 5),
    "distributed, pickles": (distributed, pickled_metadata, verified, 10),
    "orbax, bytes": (of_jax("orbax, files"), bytes_of, verified, 1),
    "orbax, json": (of_jax("orbax, files"), json_of_folder, verified, 1),
    "ours, json": (of_torch("ours, safetensors"), json_of_folder, verified, 6),
    "load, json": (own, json_of_folder, loaded, 5),
    "load, bytes": (own, bytes_of, loaded, 3),
    "log, lines": (log, lines_of_a_log, reported, 10),
    "log, bytes": (log, bytes_of, reported, 3),
    "config, json": (config, json_of_a_file, configured, 2),
}


@pytest.mark.parametrize("times", [1, pytest.param(1000, marks=REPEATS)])
@pytest.mark.parametrize("case", CASES)
def test_whatever_is_in_a_file_its_reader_says_so(case, times, tmp_path):
    make, change, read, tries = CASES[case]
    (tmp_path / "good").mkdir()
    good = make(tmp_path / "good")
    for seed in range(tries * times):
        there = tmp_path / "tried"
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(tmp_path / "good", there)
        path = there / good.relative_to(tmp_path / "good")
        change(random.Random(f"{case}, {seed}"), path)
        signal.alarm(60)
        try:
            read(path)
        except Exception as error:
            error.add_note(f"{case}, seed {seed}")
            raise
        finally:
            signal.alarm(0)


def test_there_are_a_hundred_tries():
    assert sum(tries for *_, tries in CASES.values()) == 100
