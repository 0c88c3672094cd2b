"""The tables of the page on recovering, from ``benchmarks/results/recovery.json``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from measured import read, table, versions, with_software

from benchmarks.recovery.faults import DELAYS, FAULTS
from benchmarks.recovery.once import CLEAN, OURS, PLAIN
from benchmarks.recovery.run import SPLITS, harmful, is_tuned, summary
from benchmarks.recovery.ways import WAYS

__all__ = ["write_false_alarms", "write_recoveries"]

_FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}


def write_recoveries(results: Path, directory: Path) -> None:
    """Write ``recovery-summary.md`` and ``recovery-faults.md``; or, as long as nothing was measured, how to.

    Raises:
        KeyError: the file does not have the form that ``benchmarks.recovery`` writes.
    """
    if not results.exists():
        for name in ("summary", "faults"):
            text = "Not measured yet: `python -m benchmarks recovery` measures it."
            (directory / f"recovery-{name}.md").write_text(text + "\n", encoding="utf-8")
        return
    report = json.loads(results.read_text(encoding="utf-8"))
    rows = report["rows"]
    lines = [
        *_summary(rows),
        "",
        *_trainings(rows),
        "",
        _ours(rows),
        "",
        *_clean(rows),
        "",
        *_spread(report["spread"]),
    ]
    (directory / "recovery-summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [*_faults(rows), "", f"{versions(report)}."]
    (directory / "recovery-faults.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_false_alarms(results: Path, directory: Path) -> None:
    """Write ``false-alarms.md``: the healthy trainings that were taken back, and how many were not.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: the file does not have the form that ``benchmarks`` writes.
    """
    report = read(results, "false-alarms")
    body, said = [], []
    for seed, rows in report["seeds"].items():
        alarmed = [row for row in rows if row["rewinds"]]
        said.append(f"{len(alarmed)} of {len(rows)} with seed {seed}")
        for row in alarmed:
            ended = "stopped" if "The training was stopped" in row["why"][-1] else "finished"
            scores = [f"{row[key]:.3g}" for key in ("plain", "recovery")]
            body.append([row["training"], seed, str(row["rewinds"]), ended, *scores])
    head = ["training", "seed", "rewinds", "", "evaluation, plain", "with `Recovery`"]
    lines = [f"Taken back at least once: {', '.join(said)}.", "", *table(head, body)]
    (directory / "false-alarms.md").write_text(with_software(lines, report), "utf-8")


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    """How many runs recovered: a row for each way, a column for each delay, for each split."""
    found = {(line["split"], line["delay"], line["way"]): line for line in summary(rows)}
    head = ["", "way", *(f"{delay} late" for delay in DELAYS), "all", "steps lost", "worst final loss"]
    body = []
    for split in SPLITS.values():
        for way in WAYS:
            cells = [_share(found.get((split, delay, way))) for delay in (*DELAYS, None)]
            line = found.get((split, None, way), {})
            lost = "" if line.get("lost") is None else str(line["lost"])
            worst = "" if line.get("worst") is None else f"{line['worst']:+.1%}"
            body.append([split, way, *cells, lost, worst])
    return table(head, body)


def _trainings(rows: list[dict[str, Any]]) -> list[str]:
    """From how many harmful faults each training recovered."""
    counted, body = harmful(rows), []
    for of in dict.fromkeys((r["program"], r["seed"], r["framework"]) for r in rows):
        here = [r for r in rows if (r["program"], r["seed"], r["framework"]) == of]
        faults = {(r["fault"], r["delay"]) for r in here if r["fault"] != CLEAN}
        kept = [r for r in counted if r in here]
        ways = ([r["recovered"] for r in kept if r["way"] == way] for way in WAYS)
        shares = [f"{sum(found)} of {len(found)}" for found in ways]
        harmless = str(len(faults) - len({(r["fault"], r["delay"]) for r in kept}))
        name = f"{of[0]}, seed {of[1]}, {_FRAMEWORKS[of[2]]}"
        body.append([name, SPLITS[is_tuned(here[0])], harmless, *shares])
    return table(["training", "", "harmless", *WAYS], body)


def _share(line: dict[str, Any] | None) -> str:
    return "" if line is None else f"{line['recovered']} of {line['faults']}"


def _ours(rows: list[dict[str, Any]]) -> str:
    """How exact the recoveries were, and in how many of the other runs nothing was seen."""
    ours = [r for r in harmful(rows) if r["way"] == OURS]
    good, bad = ([r for r in ours if r["recovered"] == recovered] for recovered in (True, False))
    exact, unseen = sum(r["same_bits"] for r in good), sum(not r["attempts"] for r in bad)
    equal = "with the loss of a clean run on the same data, bit for bit"
    if not bad:
        return f"All {len(good)} harmed runs recovered with `Recovery`, and {exact} of them end {equal}."
    return (
        f"Of the {len(good)} runs that recovered with `Recovery`, {exact} end {equal}. "
        f"Of the {len(bad)} others, {unseen} never went back: nothing was seen."
    )


def _clean(rows: list[dict[str, Any]]) -> list[str]:
    """What each way does to a run without a fault."""
    of = {way: [r for r in rows if r["fault"] == CLEAN and r["way"] == way] for way in WAYS}
    said = [
        f"{way.lower() if way != OURS else f'`{way}`'}: {sum(r['lost'] for r in found)} steps lost in "
        f"{len(found)} runs"
        for way, found in of.items()
        if way != PLAIN
    ]
    return ["Without a fault, " + "; ".join(said) + "."]


def _spread(spread: list[dict[str, Any]]) -> list[str]:
    """How much the final losses of clean runs differ if nothing but the order of the data does."""
    head = ["", "framework", "seed", "final loss, clean run", "clean runs with other orders of the data"]
    body = []
    for one in spread:
        others = [loss / one["clean"] - 1.0 for loss in one["other_orders"]]
        cells = [one["program"], one["framework"], str(one["seed"]), f"{one['clean']:.4f}"]
        body.append([*cells, f"{min(others):+.1%} to {max(others):+.1%}"])
    return table(head, body)


def _faults(rows: list[dict[str, Any]]) -> list[str]:
    """For each fault, when it stands out, how it ends, and how many runs recovered of those that it harms."""
    head = ["fault", "", "stands out after", "final loss, no protection", *list(WAYS)[1:]]
    counted, body = harmful(rows), []
    for fault in FAULTS:
        for delay in DELAYS:
            of = (fault, delay)
            here = [r for r in rows if (r["fault"], r["delay"]) == of]
            harmed = [r for r in counted if (r["fault"], r["delay"]) == of]
            plain = [r for r in here if r["way"] == PLAIN]
            cells = [fault if delay == DELAYS[0] else "", f"{delay} late", _stands_out(plain), _ends(plain)]
            ways = ([r["recovered"] for r in harmed if r["way"] == way] for way in list(WAYS)[1:])
            body.append([*cells, *(f"{sum(found)} of {len(found)}" for found in ways)])
    return table(head, body)


def _stands_out(plain: list[dict[str, Any]]) -> str:
    found = [r["stands_out"] for r in plain if r["stands_out"] is not None]
    missing = "" if len(found) == len(plain) else f" ({len(plain) - len(found)} never)"
    return f"{statistics.median_low(found)}{missing}" if found else "never"


def _ends(plain: list[dict[str, Any]]) -> str:
    """The least and the largest final loss of the runs without protection, over the clean run's."""
    over = [r["over_clean"] for r in plain if r["over_clean"] is not None]
    bad = len(plain) - len(over)
    if not over:
        return "not finite"
    finite = f"{min(over):+.0%} to {max(over):+.0%}"
    return f"{finite}, {bad} not finite" if bad else finite
