"""``python -m benchmarks``: run everything, print tables, write ``benchmarks/results/*.json``.

``cpu.json`` has the cost of a guarded step compared with that of the peers' steps; ``gpu.json`` has the same
on a CUDA device, measured only on request (``python -m benchmarks gpu``). ``rules.json`` has the cost of each
rule's decision and how well the spike rules find spikes, ``diagnosis.json`` what a diagnosis costs.
``diff.json`` has the cost of comparing two programs, ``diff-peers.json`` how often a comparison and other
tools find a difference, ``partners.json`` what a bad batch leaves behind in other trainers,
``checkpoints.json`` what a gated checkpoint costs per GB, ``recovery.json`` from which planted faults a
training recovers, ``false-alarms.json`` how often a healthy one is taken back.
``python -m benchmarks rules`` measures one part alone.

The command exits with an error if a peer is missing or a result differs from the peer's, so that only
measured figures are printed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    checkpoints,
    decide_cost,
    diagnosis,
    diff_cost,
    diff_peers,
    exact_norms,
    losses,
    recovery_cost,
    replicas,
    report_page,
    rule_steps,
    spike_detection,
    ulp,
    watching,
)
from benchmarks.distributed import run as distributed
from benchmarks.partners import table as partners
from benchmarks.ranks import run as ranks
from benchmarks.recovery import run as recovery
from benchmarks.recovery.healthy import run as healthy
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.keeping import Kept, sources_digest
from benchmarks.steps.promises import broken_promises
from benchmarks.steps.run import PEERS, measure_all, threads

RESULTS = Path(__file__).parent / "results"
SEEDS = (0,)  # of the healthy trainings
PACKAGES = ("torch", "jax", "jaxlib", "optax", "numpy", "stablenum")


def _table(title: str, row: dict[str, Any]) -> Table:
    ratios = next((v for k, v in row.items() if k.startswith(("extra", "ratio"))), {})
    ratio_name = next((k for k in row if k.startswith(("extra", "ratio"))), "")
    table = Table(title=f"{title}: {row['size']}")
    for column in ("variant", "median ms", "spread", ratio_name, "temp bytes"):
        table.add_column(column)
    for name, time in row["times"].items():
        temp = row.get("temp_bytes", {}).get(name)
        cells = [
            f"{time['median_ms']:.3f}",
            f"{time['spread']:.0%}",
            str(ratios.get(name, "")),
            str(temp or ""),
        ]
        table.add_row(name, *cells)
    return table


def _decide_table(rows: dict[str, dict[str, float]]) -> Table:
    table = Table(title="decide, called eagerly, for 108 parameters")
    for column in ("rule", "NumPy us", "spread", "torch us", "spread"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name, row in rows.items():
        cells = [
            cell
            for label in ("numpy", "torch")
            for cell in (f"{row[label + '_us']:.0f}", f"{row[label + '_spread']:.0%}")
        ]
        table.add_row(name, *cells)
    return table


def _detection_table(report: dict[str, dict[str, dict[str, int]]]) -> Table:
    table = Table(title="spikes planted into recorded streams")
    for column in ("stream", "rule", "detected", "of them masked", "false skips"):
        table.add_column(column, justify="left" if column in ("stream", "rule") else "right")
    for stream, rules in report.items():
        for i, (rule, row) in enumerate(rules.items()):
            table.add_row(
                stream if i == 0 else "",
                rule,
                f"{row['detected']}/{row['planted']}",
                f"{row['masked_detected']}/{row['masked_planted']}",
                f"{row['false_skips']}/{row['steps']}",
                end_section=i == len(rules) - 1,
            )
    return table


def _facts(more: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "machine": {"cpu_count": os.cpu_count(), "architecture": platform.machine()},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in dict.fromkeys((*PACKAGES, *more))},
    }


def _save(console: Console, name: str, report: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(report, indent=2, allow_nan=False)
    whole = RESULTS / f"{name}.new"  # renamed when complete, so the file is never half written
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(RESULTS / name)
    console.print(f"written to {RESULTS / name}")


def _save_steps(
    console: Console, name: str, facts: dict[str, Any], device: str, parts: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Measure the steps and return the rows; if the run is interrupted, the next run continues it."""

    def circumstances() -> dict[str, Any]:
        return {"facts": facts, "threads": threads(), "sources": sources_digest()}

    kept = Kept(RESULTS / "unfinished" / name, circumstances, say=console.print)
    measured = measure_all(console, device=device, parts=parts, kept=kept)
    _save(console, name, facts | measured)
    kept.forget()
    return list(measured["rows"])


def _measure_steps(console: Console) -> None:
    rows = _save_steps(console, "cpu.json", _facts(PEERS), "cpu", ("bandwidth", "compiling"))
    broken = broken_promises(rows)
    if broken:
        raise BenchmarkError("\n".join(broken))


def _measure_ranks(console: Console) -> None:
    console.print("measuring: several ranks ...")
    report = _facts() | {"rows": ranks.run(say=console.print)}
    for row in report["rows"]:
        console.print(_ranks_table(row))
    _save(console, "ranks.json", report)


def _ranks_table(row: dict[str, Any]) -> Table:
    table = Table(title=f"{row['framework']}, {row['ranks']} ranks")
    for column in ("variant", "median ms", "x bare", "+-", "collectives", "bytes"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, v in row["variants"].items():
        known = f"{v['uncertainty']:.1%}" if "uncertainty" in v else ""
        cells = [f"{v['median_ms']:.3f}", f"{v['ratio_to_bare']:.2f}", known]
        table.add_row(name, *cells, str(v["collectives"]), str(v["bytes"]))
    return table


def _measure_replicas(console: Console) -> None:
    console.print("measuring: a comparison of replicas ...")
    report = _facts() | {"rows": replicas.run(say=console.print)}
    for row in report["rows"]:
        times = {name: f"{v['median_ms']:.1f} ms" for name, v in row["variants"].items()}
        console.print(row["framework"], times, f"x {row['variants']['checked']['ratio_to_bare']}")
    _save(console, "replicas.json", report)


def _measure_checkpoints(console: Console) -> None:
    console.print("measuring: checkpoints (some minutes) ...")
    report = _facts(("safetensors",)) | {"rows": checkpoints.run(say=console.print)}
    for row in report["rows"]:
        console.print(_checkpoints_table(row))
    _save(console, "checkpoints.json", report)


def _checkpoints_table(row: dict[str, Any]) -> Table:
    times = f"{row['ratio_to_bare']:.2f} +- {row['uncertainty']:.0%} x bare"
    table = Table(title=f"checkpoints in {row['format']}, {row['bytes'] / 1e6:.0f} MB: gated is {times}")
    for column in ("variant", "ms per GB", "spread"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, v in row["variants"].items():
        table.add_row(name, f"{v['ms_per_gb']:.0f}", f"{v['spread']:.0%}")
    return table


def _measure_distributed(console: Console) -> None:
    console.print("measuring: the guard beside clipping by hand, on several ranks (five minutes) ...")
    report = _facts()
    report["versions"] |= distributed.peer_versions()
    report |= {"rows": distributed.run(say=console.print)}
    for row in report["rows"]:
        console.print(_distributed_table(row))
    _save(console, "distributed.json", report)


def _distributed_table(row: dict[str, Any]) -> Table:
    table = Table(title=f"{row['layout']}, {row['ranks']} ranks")
    for column in ("variant", "median ms", "extra ms", "+-", "x peer's", "+-", "collectives", "bytes"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    keys = ("extra_ms", "extra_ms_within", "extra_over_peers", "extra_over_peers_within")
    for name, v in row["variants"].items():
        cells = ["" if v.get(key) is None else f"{v[key]:.3f}" for key in keys]
        table.add_row(name, f"{v['median_ms']:.3f}", *cells, str(v["collectives"]), str(v["bytes"]))
    return table


def _measure_gpu(console: Console) -> None:
    facts = _facts(PEERS) | {"cuda_device": _cuda_device("gpu", "steps")}
    _save_steps(console, "gpu.json", facts, "cuda", ("bandwidth", "compiling", "transformer"))


def _cuda_device(part: str, on_cpu: str) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError(
            f"no CUDA device: torch {torch.__version__} finds none. `python -m benchmarks {part}` needs one "
            f"and builds of torch and jax for CUDA; `python -m benchmarks {on_cpu}` measures on the CPU."
        )
    return {"name": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.mem_get_info()[1]}


def _measure_rules(console: Console) -> None:
    console.print("measuring: the rules ...")
    report = _facts() | {
        "decide": decide_cost.run(),
        "detection": spike_detection.run(),
        "steps": rule_steps.run(),
    }
    console.print(_decide_table(report["decide"]))
    for title, row in report["steps"].items():
        console.print(_table(title, row))
    console.print(_detection_table(report["detection"]))
    _save(console, "rules.json", report)


def _measure_exact_norms(console: Console) -> None:
    console.print("measuring: exact norms ...")
    report = _facts() | {"steps": exact_norms.run()}
    console.print_json(data=report["steps"])
    _save(console, "exact-norms.json", report)


def _measure_false_alarms(console: Console) -> None:
    console.print("running: healthy trainings (some minutes) ...")
    found = {seed: list(healthy.rows(seed=seed)) for seed in SEEDS}
    for seed, rows in found.items():
        console.print(f"seed {seed}")
        console.print(healthy.table(rows))
    _save(console, "false-alarms.json", _facts() | {"seeds": found})


def _measure_recovery_cost(console: Console) -> None:
    _save_recovery_cost(console, "recovery-cost.json", _facts(), "cpu")


def _measure_recovery_cost_gpu(console: Console) -> None:
    facts = _facts() | {"cuda_device": _cuda_device("recovery-cost-gpu", "recovery-cost")}
    _save_recovery_cost(console, "recovery-cost-gpu.json", facts, "cuda")


def _save_recovery_cost(console: Console, name: str, facts: dict[str, Any], device: str) -> None:
    console.print("measuring: what a recovery adds to a training ...")
    report = facts | {"rows": recovery_cost.run(device=device)}
    for row in report["rows"]:
        console.print(_recovery_table(row))
    _save(console, name, report)


def _recovery_table(row: dict[str, Any]) -> Table:
    state, snapshot = (row[key] / 1e6 for key in ("state_bytes", "snapshot_bytes"))
    table = Table(
        title=f"{row['framework']}, {row['size']}: state {state:.1f} MB, snapshot {snapshot:.1f} MB"
    )
    for column in ("variant", "ms per step", "spread", "x plain"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, v in row["variants"].items():
        cells = [f"{v['ms_per_step']:.3f}", f"{v['spread']:.0%}", f"{v['ratio_to_plain']:.3f}"]
        table.add_row(name, *cells)
    return table


def _measure_losses(console: Console) -> None:
    console.print("measuring: the losses ...")
    report = _facts() | losses.run()
    console.print_json(data=report)
    _save(console, "losses.json", report)


def _measure_accuracy(console: Console) -> None:
    console.print("measuring: the accuracy of the safe functions ...")
    ulp.main()


def _measure_diagnosis(console: Console) -> None:
    console.print("measuring: the cost of a diagnosis ...")
    report = _facts() | diagnosis.run()
    console.print_json(data=report)
    _save(console, "diagnosis.json", report)


def _measure_watching(console: Console) -> None:
    console.print("measuring: scripts under the commands (some minutes) ...")
    report = _facts() | watching.run(console.print)
    _save(console, "watching.json", report)


def _measure_small_steps(console: Console) -> None:
    console.print("measuring: small steps under stablenum explain (some minutes) ...")
    report = _facts() | watching.small_steps(console.print)
    _save(console, "small-steps.json", report)


def _measure_diff(console: Console) -> None:
    console.print("measuring: comparisons of two programs (half an hour) ...")
    facts = _facts()
    kept = _kept(console, "diff.json", facts)
    report = facts | {"sizes": diff_cost.run(kept)}
    console.print_json(data=report["sizes"])
    _save(console, "diff.json", report)
    kept.forget()


def _kept(console: Console, name: str, facts: dict[str, Any]) -> Kept:
    """What an interrupted run has measured, and the next one need not measure again."""

    def circumstances() -> dict[str, Any]:
        return {"facts": facts, "sources": sources_digest()}

    return Kept(RESULTS / "unfinished" / name, circumstances, say=console.print)


def _measure_diff_peers(console: Console) -> None:
    console.print("measuring: tools that compare two programs (an hour) ...")
    diff_peers.check_peers()
    facts = _facts(diff_peers.PEERS)
    kept = _kept(console, "diff-peers.json", facts)
    report = facts | diff_peers.run(kept)
    console.print_json(data={part: report[part] for part in ("copied", "rewritten", "ported")})
    _save(console, "diff-peers.json", report)
    kept.forget()


def _measure_partners(console: Console) -> None:
    console.print("running: trainers and loops with one bad batch (half an hour) ...")
    report = _facts(partners.packages()) | {"partners": partners.run(console.print)}
    _save(console, "partners.json", report)


def _measure_recovery(console: Console) -> None:
    console.print("running: trainings with planted faults (an hour) ...")
    facts = _facts(("scikit-learn",))
    kept = _kept(console, "recovery.json", facts)
    report = facts | recovery.run(kept)
    console.print(recovery.table(report["rows"]))
    _save(console, "recovery.json", report)
    kept.forget()


def _measure_report(console: Console) -> None:
    console.print("measuring: the page of a run in a browser ...")
    report = _facts(("playwright",)) | report_page.run(console.print)
    console.print_json(data=report["training"])
    _save(console, "report.json", report)


def main() -> None:
    """Measure the chosen parts, print the tables and save the results."""
    chosen = sys.argv[1:] or [name for name in PARTS if not name.endswith("gpu")]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        sys.exit(f"unknown part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    console = Console()
    for name in chosen:
        try:
            PARTS[name](console)
        except BenchmarkError as error:
            sys.exit(f"{name}: {error}")


PARTS = {
    "steps": _measure_steps,
    "ranks": _measure_ranks,
    "replicas": _measure_replicas,
    "checkpoints": _measure_checkpoints,
    "distributed": _measure_distributed,
    "gpu": _measure_gpu,
    "rules": _measure_rules,
    "exact-norms": _measure_exact_norms,
    "recovery-cost": _measure_recovery_cost,
    "recovery-cost-gpu": _measure_recovery_cost_gpu,
    "false-alarms": _measure_false_alarms,
    "losses": _measure_losses,
    "accuracy": _measure_accuracy,
    "diagnosis": _measure_diagnosis,
    "watching": _measure_watching,
    "small-steps": _measure_small_steps,
    "diff": _measure_diff,
    "partners": _measure_partners,
    "diff-peers": _measure_diff_peers,
    "recovery": _measure_recovery,
    "report": _measure_report,
}


if __name__ == "__main__":
    main()
