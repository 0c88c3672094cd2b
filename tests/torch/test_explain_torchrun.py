"""``stablenum explain`` under torchrun, and under a launch by hand: one report, whatever the ranks do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow(reason="starts torch up to ten times")

SCRIPT = """
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

what = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(4, 8)
    weight = torch.ones(4, 1)
    if rank == 1 and step == 3:
        if what == "error":
            raise KeyError("no such batch")
        if what != "good":
            weight.zero_()
    optimizer.zero_grad()
    loss = (model(x).square() * weight).sum() / weight.sum()  # BAD
    loss.backward()
    if rank == 1 and step == 3 and what == "dies":
        os._exit(9)
    if rank == 1 and step == 3 and what == "hangs":
        import time
        time.sleep(1000)
    optimizer.step()
print("the end of", rank)
dist.destroy_process_group()
"""
LINE = next(i for i, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# BAD"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment(tmp_path: Path) -> dict[str, str]:
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return os.environ | own | {"STABLENUM_RANKS_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}


def torchrun(script: Path, what: str, *options: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    explain = ["-m", "stablenum", "explain", script.name, *options, "--", what]
    env = environment(script.parent)
    return subprocess.run(
        [*run, *explain], cwd=script.parent, env=env, capture_output=True, text=True, timeout=400
    )


def by_hand(script: Path, what: str) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "stablenum", "explain", script.name, "--", what]
    started = [
        subprocess.Popen(
            command,
            cwd=script.parent,
            env=environment(script.parent) | common | {"RANK": str(rank)},
            text=True,
            stdout=PIPE,
            stderr=PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(started, said, strict=True)]


def test_torchrun_gets_one_report_of_the_rank_that_made_it(script: Path) -> None:
    ended = torchrun(script, "bad", "--json", "why.json", "--html", "why.html")
    assert ended.returncode == 1
    title = f"train.py:{LINE}: div gives NaN (forward) on rank 1"
    assert ended.stdout.count(title) == 1
    assert "Rank 0 received it through all_reduce" in ended.stdout
    assert ended.stderr.count("stablenum: wrote why.json") == 1
    first = json.loads((script.parent / "why.json").read_text())["evidence"]["findings"][0]
    assert (first["rank"], first["shard"], first["place"]["line"]) == (1, "rank 1", LINE)
    assert f"all_reduce (line {LINE + 1})" in first["spread"]
    assert "on rank 1" in (script.parent / "why.html").read_text()
    assert not list(script.parent.glob("stablenum-ranks-*"))


def test_torchrun_of_a_good_script_ends_well(script: Path) -> None:
    ended = torchrun(script, "good")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert sorted(ended.stdout.split("\n")) == ["", "the end of 0", "the end of 1"]
    assert ended.stderr.count("stablenum: nothing went wrong in 6 optimizer steps") == 1


def test_an_error_of_one_rank_is_shown_once_and_ends_all(script: Path) -> None:
    first, second = by_hand(script, "error")
    assert first[0] == 1
    assert "KeyError: 'no such batch' on rank 1; until then nothing went wrong in 3" in first[2]
    assert "Traceback" not in first[2]  # what rank 1's end does to rank 0 is no news
    assert second[2].count("KeyError: 'no such batch'") == 1


def test_the_page_shows_the_commands_own_output() -> None:
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    shown = page.split("## On several ranks")[1].split("```text\n")[1].split("```")[0].splitlines()
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*run, "-m", "stablenum", "explain", "padding.py"],
        cwd=ROOT / "examples" / "ranks",
        env=environment(Path(tempfile.gettempdir())),
        capture_output=True,
        text=True,
        timeout=500,
    )
    said = [line for line in ended.stderr.splitlines() if line.startswith("stablenum: ")]
    assert [*said, *ended.stdout.splitlines()] == shown


@pytest.mark.parametrize("what", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_leaves_a_report(script: Path, what: str) -> None:
    first, second = by_hand(script, what)
    assert first[0] == 1, first
    assert second[0] == 0, second
    if what == "dies":
        assert "all_reduce brought in NaN" in first[1]
        assert "Rank 1 did not report" in " ".join(first[1].split())
    else:
        assert f"train.py:{LINE}: div gives NaN (forward) on rank 1" in first[1]
