"""A step's scalars in the writers of loggers, with a loss that is NaN."""

from __future__ import annotations

import importlib
import math
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
import torch.distributed as dist

import stablenum_jax
import stablenum_torch

NAMES = {
    "guard/loss",
    "guard/grad_norm",
    "guard/loss_scale",
    "guard/clip_coefficient",
    "guard/applied",
    "guard/reason",
    "guard/skipped_total",
    "guard/skipped_in_a_row",
}
BAD = 1


def torch_steps(**settings: Any) -> list[dict[str, float]]:
    """The scalars of three steps, of which the second has a NaN loss."""
    w = torch.nn.Parameter(torch.ones(2))
    opt = stablenum_torch.wrap(torch.optim.SGD([w], lr=0.1), clip=1.0, **settings)
    rows = []
    for i in range(3):
        opt.zero_grad()
        opt.backward((w * (math.nan if i == BAD else 1.0)).square().sum())
        opt.step()
        rows.append(opt.scalars("guard/"))
    return rows


def jax_steps() -> list[dict[str, float]]:
    """The same, in JAX."""
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    state, rows = tx.init(params), []
    for i in range(3):
        factor = math.nan if i == BAD else 1.0
        loss_fn = lambda params, factor: jnp.sum(jnp.square(params["w"] * factor))  # noqa: E731
        loss, grads = stablenum_jax.value_and_grad(loss_fn, state)(params, factor)
        params, state = stablenum_jax.step(tx, params, state, grads, value=loss)
        rows.append(stablenum_jax.scalars(state, "guard/"))
    return rows


def assert_equal(found: list[Any], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert all(
        (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-6)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("steps", [torch_steps, jax_steps])
def test_the_scalars_are_plain_numbers_of_which_the_bad_loss_is_nan(steps):
    rows = steps()
    assert all(set(row) == NAMES for row in rows)
    assert all(type(value) in (int, float) for row in rows for value in row.values())
    assert [row["guard/skipped_total"] for row in rows] == [0, 1, 1]
    assert [math.isnan(row["guard/loss"]) for row in rows] == [False, True, False]


def test_tensorboard_keeps_nan(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    rows = torch_steps()
    with SummaryWriter(tmp_path) as writer:
        for step, row in enumerate(rows):
            for name, value in row.items():
                writer.add_scalar(name, value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    for name in NAMES:
        assert_equal([event.value for event in events.Scalars(name)], [row[name] for row in rows])


def test_tensorboard_shows_the_worst_rank(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = torch_steps(process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    with SummaryWriter(tmp_path) as writer:
        for step, row in enumerate(rows):
            for name, value in row.items():
                writer.add_scalar(name, value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("guard/worst_rank")] == [0.0] * len(rows)


def wandb_rows(file: Path) -> Iterator[dict[str, str]]:
    """The rows of an offline run. The file has no public reader; it has the format of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # the rest of a block is empty
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record, part = wandb_internal_pb2.Record.FromString(part), b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def test_wandb_offline_keeps_nan(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    rows = torch_steps()
    with wandb.init(dir=tmp_path, project="guard", settings=wandb.Settings(console="off")) as run:
        for row in rows:
            run.log(row)
    wandb.teardown()  # waits until the file is written
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = list(wandb_rows(file))
    for name in NAMES:
        assert_equal([float(row[name]) for row in found], [row[name] for row in rows])


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # mlflow's use of SQLAlchemy
def test_mlflow_keeps_nan(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store.db")
    rows = torch_steps()
    experiment = client.create_experiment("guard", artifact_location=str(tmp_path))
    run = client.create_run(experiment).info.run_id
    for step, row in enumerate(rows):
        for name, value in row.items():
            client.log_metric(run, name, value, step=step)
    for name in NAMES:
        found = sorted(client.get_metric_history(run, name), key=lambda metric: metric.step)
        assert_equal([metric.value for metric in found], [row[name] for row in rows])


@pytest.fixture
def clu_writers(monkeypatch):
    """clu's writers. Their package imports one that needs TensorFlow, which is left out here."""
    pytest.importorskip("clu")
    try:
        return importlib.import_module("clu.metric_writers")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
    with_tensorflow = types.ModuleType("clu.metric_writers.tf.summary_writer")
    with_tensorflow.SummaryWriter = None
    monkeypatch.setitem(sys.modules, with_tensorflow.__name__, with_tensorflow)
    return importlib.import_module("clu.metric_writers")


def test_clus_writer_of_tensorboard_files_keeps_nan(clu_writers, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = importlib.import_module("clu.metric_writers.torch_tensorboard_writer")
    rows, writer = jax_steps(), writers.TorchTensorboardWriter(str(tmp_path))
    for step, row in enumerate(rows):
        writer.write_scalars(step, row)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in NAMES:
        assert_equal([event.value for event in events.Scalars(name)], [row[name] for row in rows])


def test_clus_writer_of_log_lines_shows_nan(clu_writers, caplog):
    writer = clu_writers.LoggingWriter()
    with caplog.at_level("INFO", logger="absl"):
        for step, row in enumerate(jax_steps()):
            writer.write_scalars(step, row)
    assert ["guard/loss=nan" in message for message in caplog.messages] == [False, True, False]
