"""``shard_map``, ``pmap`` and sharded arrays in a replay: runs ``shards.py`` with four devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARDS = Path(__file__).with_name("shards.py")


@pytest.mark.slow(reason="takes over a minute")
@pytest.mark.timeout(900)
def test_all_that_needs_four_devices() -> None:
    run()


# One case of each function that has cases.
SOME = (
    "test_the_shard_and_the_way and True-True or test_under_jit and Auto or bad_parts or several or test_pmap"
    " or bad_data_of_pmap or inside_a_shard_map or test_groups and psum"
)


def test_what_shows_each_kind_of_mesh_and_report() -> None:
    run(SOME)


def run(selection: str = "") -> None:
    # On a busy machine, JAX's own devices may have to wait for each other for long.
    flags = "--xla_force_host_platform_device_count=4 --xla_cpu_collective_call_terminate_timeout_seconds=600"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(SHARDS)]
    done = subprocess.run(
        [*command, *(("-k", selection) if selection else ())],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
