"""Tables of the page on several devices: what the guard adds to a step, measured and from a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from measured import table

__all__ = ["Step", "all_reduce_us", "write_distributed", "write_ranks_model"]

_NAMES = {"fsdp2": "FSDP2", "ddp": "DDP"}
# NCCL's own model of a tree in its protocol for short messages (src/graph/tuning.cc, commit 01afd20), in
# microseconds: to begin with, for each hop over NVLink in one node and in several, and over the network.
START, NVLINK, NVLINK_IN_SEVERAL, NETWORK = 4.4, 0.52, 0.52 * 1.8, 5.0
# The same model's bandwidth, with more than two nodes: 80 GB/s, of which that protocol uses 1 / 3.8, and a
# tree half of it.
GB_S = 80 / 3.8 / 2
PER_NODE = 8
RANKS = (2, 4, 8, 16, 64, 256, 1024)
TENSORS = 400


class Step(NamedTuple):
    """The all-reduces of one step.

    Attributes:
        label: what makes them.
        sends: for a number of ranks, the all-reduces one after the other: (ranks in a node, nodes, bytes).
    """

    label: str
    sends: Any


def _line(p: int) -> tuple[int, int]:
    """A mesh of one dimension over all ranks."""
    return min(p, PER_NODE), -(-p // PER_NODE)


def _plane(p: int) -> list[tuple[int, int]]:
    """A mesh of two dimensions: one in a node, the other over the nodes."""
    inside, nodes = _line(p)
    return [(inside, 1), (1, nodes)] if nodes > 1 else [(inside, 1)]


STEPS = (
    Step("the guard", lambda p: [(*_line(p), 16 * p)]),
    Step("the guard, `exact_norms=True`", lambda p: [(*_line(p), 80 * p)]),
    Step("the guard, a rule per tensor", lambda p: [(*_line(p), 32 * p + 8 * TENSORS)]),
    Step("`clip_grad_norm_`, FSDP2, and the loss", lambda p: [(*_line(p), 4 * TENSORS), (*_line(p), 4)]),
    Step(
        "`clip_grad_norm_`, FSDP2 over tensor parallelism, and the loss",
        lambda p: [*((*part, 4 * TENSORS) for part in _plane(p)), (*_line(p), 4)],
    ),
    Step("torchtitan's, FSDP2; no check of the loss", lambda p: [(*_line(p), 4 * TENSORS)]),
    Step(
        "torchtitan's, FSDP2 and a pipeline; no check of the loss",
        lambda p: [*((*part, 4 * TENSORS) for part in _plane(p)[:1]), *((1, n, 4) for _, n in _plane(p)[1:])],
    ),
)


def all_reduce_us(inside: int, nodes: int, size: int) -> float:
    """The time of an all-reduce of ``size`` bytes among ``inside`` ranks in each of ``nodes`` nodes.

    Example:
        >>> all_reduce_us(1, 1, 4)
        0.0
    """
    if inside * nodes == 1:
        return 0.0
    hop = NVLINK_IN_SEVERAL if nodes > 1 else NVLINK
    hops = 2 * ((inside - 1) * hop + math.log2(nodes) * NETWORK)
    return START + hops + size / (GB_S * 1e3)


def write_ranks_model(directory: Path) -> None:
    """Write ``ranks-model.md``: the time of the all-reduces of a step, for 2 to 1,024 ranks."""
    head = ["µs a step", *(f"{p:,}" for p in RANKS)]
    body = [
        [step.label, *(f"{sum(all_reduce_us(*one) for one in step.sends(p)):.0f}" for p in RANKS)]
        for step in STEPS
    ]
    sizes = ["bytes from the guard", *(f"{16 * p:,}" for p in RANKS)]
    (directory / "ranks-model.md").write_text("\n".join(table(head, [*body, sizes])) + "\n", "utf-8")


def write_distributed(results: Path, directory: Path) -> None:
    """Write ``distributed.md``: what was measured; or, as long as nothing was, how to measure it.

    Raises:
        KeyError: the file does not have the form that ``benchmarks.distributed`` writes.
    """
    if not results.exists():
        text = "Not measured yet: `python -m benchmarks distributed` measures it."
        (directory / "distributed.md").write_text(text + "\n", "utf-8")
        return
    report = json.loads(results.read_text(encoding="utf-8"))
    lines: list[str] = []
    for layout in dict.fromkeys(row["layout"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["layout"] == layout]
        first = rows[0]
        title = (
            f"{_NAMES[layout]}, {first['parameters'] / 1e6:.1f} M parameters in {first['tensors']} tensors, "
            f"{first['launches']} launches of {first['rounds']} rounds:"
        )
        lines += [title, "", *table(*_measured(rows)), ""]
    machine = f"{report['machine']['cpu_count']} cores, {report['machine']['architecture']}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    lines.append(f"{machine}, Python {report['python']}, {versions}.")
    (directory / "distributed.md").write_text("\n".join(lines) + "\n", "utf-8")


def _measured(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    head = ["ranks", "", "ms added to the bare step", "of what the first adds", "collectives", "bytes"]
    body = []
    for row in rows:
        bare = row["variants"]["bare"]
        body.append([str(row["ranks"]), f"bare step, {bare['median_ms']:.2f} ms", "", "", "0", "0"])
        for name, v in row["variants"].items():
            if name == "bare":
                continue
            within = "" if v["extra_ms_within"] is None else f" ± {v['extra_ms_within']:.2f}"
            ratio = ""
            if "extra_over_peers" in v:
                ratio = f"{v['extra_over_peers']:.2f} ± {v['extra_over_peers_within']:.2f}"
            counts = [str(v["collectives"]), str(v["bytes"])]
            body.append(["", name, f"{v['extra_ms']:.2f}{within}", ratio, *counts])
    return head, body
