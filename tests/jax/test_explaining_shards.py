"""``stablenum explain`` on scripts that use several devices, or several processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"


def started(script: str, *arguments: str, json: Path, devices: int | None = None) -> subprocess.Popen[str]:
    """The command, running."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"} if devices else {}
    command = [sys.executable, "-m", "stablenum", "explain", str(SCRIPTS / script), "--json", str(json)]
    return subprocess.Popen(
        [*command, "--", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def first_of(path: Path) -> tuple[str, dict[str, Any]]:
    """The cause and the first finding of a report."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return report["verdict"]["cause"], report["evidence"]["findings"][0]


def bad_line(script: str) -> int:
    lines = (SCRIPTS / script).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith("# BAD"))


@pytest.mark.parametrize("how", ["shard_map", "pmap", "jit"])
def test_a_script_on_eight_devices(how: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run = started("jax_shards.py", how, json=file, devices=8)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 1, said
    cause, first = first_of(file)
    assert (cause, first["operation"], first["phase"]) == ("boundary_derivative", "sqrt", "backward"), said
    assert first["place"]["line"] == bad_line("jax_shards.py")
    assert (first["shard"], first["rank"]) == ("the shard data=3 (device 3)", 3)
    assert [text.partition(" ")[0] for text in first["spread"]] == ([] if how == "jit" else ["psum"])
    assert "on the shard data=3 (device 3)" in said


GUARDED = """
import jax, jax.numpy as jnp, optax, stablenum_jax
from jax.sharding import AxisType, PartitionSpec as P

tx = optax.chain(stablenum_jax.guard(clip=1.0, axis_name="data"), optax.sgd(0.1))
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
params = {"w": jnp.ones(4)}
state = tx.init(params)

def step(params, state, x):
    def loss_fn(params):
        return jnp.mean((params["w"] * x) ** 2)

    loss, grads = stablenum_jax.value_and_grad(loss_fn, state)(params)
    return stablenum_jax.step(tx, params, state, grads, value=loss)

specs = {"w": P("data")}, P()
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs))
for i in range(5):
    params, state = step(params, state, jnp.ones(4) * (jnp.nan if i == 1 else 1.0))
"""


def test_a_guard_in_a_shard_map_gets_the_gradients_themselves(tmp_path: Path) -> None:
    """The watch marks what an optimizer uses, and marked gradients are others than the script's."""
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED, encoding="utf-8")
    run = started(str(script), json=tmp_path / "report.json", devices=4)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert "Warning" not in said
    assert "the script trained on through 5 watched calls" in said
    assert "is not finite in call 1" in said


@pytest.mark.slow(reason="starts two processes that wait for each other")
def test_of_two_processes_the_first_reports_what_failed_in_the_second(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    files = [tmp_path / f"report{i}.json" for i in range(2)]
    runs = [started("jax_processes.py", str(i), port, json=f) for i, f in enumerate(files)]
    said = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [1, 1], said
    cause, first = first_of(files[0])
    assert (cause, first["operation"]) == ("boundary_derivative", "sqrt"), said[0]
    assert first["place"]["line"] == bad_line("jax_processes.py")
    assert first["shard"].startswith("the shard data=3 (device ")
    assert first["shard"].endswith(", process 1)")
    assert "gathered by each process" in " ".join(said[0].split())
    assert not files[1].exists()
    assert "the report is that of process 0" in said[1]
    assert "watching failed" not in said[0] + said[1]
