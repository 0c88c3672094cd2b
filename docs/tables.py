"""Tables on the pages that come from the code or from measurements, so that they are never stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import array_api_compat.numpy as xp

from stablenum import AdaGC, AutoClip, GuardConfig, LogMaxLossScale, SpikeGuard, ZClip, init_guard
from stablenum.status import EXPLANATIONS, Reason

__all__ = ["PAGES", "STATES", "write_benchmarks", "write_reasons", "write_rule_tables"]

# The rules of each page whose cost `python -m benchmarks rules` measures.
PAGES = {
    "global-norm": ("ClipByGlobalNorm", "ClipByNorm"),
    "agc": ("AdaptiveGradClip",),
    "autoclip": ("AutoClip",),
    "zclip": ("ZClip",),
    "adagc": ("AdaGC",),
    "static-dynamic": ("DynamicLossScale",),
    "log-max": ("LogMaxLossScale",),
    "underflow-aware": ("UnderflowAwareLossScale",),
    "spike-guard": ("SpikeGuard", "MeanStdSpikeGuard"),
}
STATES = {
    "autoclip": GuardConfig(clip=AutoClip()),
    "zclip": GuardConfig(clip=ZClip()),
    "adagc": GuardConfig(clip=AdaGC()),
    "static-dynamic": GuardConfig(loss_scale="dynamic"),
    "log-max": GuardConfig(loss_scale=LogMaxLossScale()),
    "spike-guard": GuardConfig(spike=SpikeGuard()),
}
_ODD_NUMBER = 7919  # of parameters: whatever has this length has one row a parameter


def write_reasons(directory: Path) -> None:
    """Reason codes with cause and remedy."""
    rows = [
        [str(int(reason)), f"`{reason.name}`", row.what, row.cause, row.remedy]
        for reason, row in EXPLANATIONS.items()
    ]
    _write(directory / "reasons-table.md", ["code", "name", "what happened", "likely cause", "remedy"], rows)
    if set(EXPLANATIONS) != set(Reason):
        raise ValueError("a reason has no explanation")


def write_benchmarks(results: Path, directory: Path) -> None:
    """The tables of the last benchmark run, from the file that it wrote."""
    report = json.loads(results.read_text(encoding="utf-8"))
    lines = [f"{_software(report)}.", ""]
    for title, rows in report.items():
        for row in rows if isinstance(rows, list) else []:
            lines += [*_timing(f"{title}: {row['size']}", row), ""]
    (directory / "benchmarks.md").write_text("\n".join(lines), encoding="utf-8")


def write_rule_tables(results: Path, directory: Path) -> None:
    """What each rule costs, what it keeps, and how the spike rules do: one file a page and ``detection``.

    Raises:
        FileNotFoundError: the benchmark has not been run.
        KeyError: it measured no such rule.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks rules` writes it")
    report = json.loads(results.read_text(encoding="utf-8"))
    for page, rules in PAGES.items():
        _write_cost(report, rules, directory / f"cost-{page}.md")
    if report.get("steps"):
        _write_cost(report, ("ClipUpdateRMS",), directory / "cost-update-rms.md")
    else:  # it has no part in `decide`
        (directory / "cost-update-rms.md").write_text("", encoding="utf-8")
    for page, config in STATES.items():
        _write(directory / f"state-{page}.md", ["state", "shape", "dtype"], _state_rows(config))
    lines: list[str] = []
    for title, row in report.get("steps", {}).items():
        lines += [] if lines else ["## A whole step with each rule", ""]
        lines += [*_timing(f"{title}: {row['size']}", row), ""]
    (directory / "rule-steps.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_detection(report["detection"], directory / "detection.md")


def _write_cost(report: dict[str, Any], rules: tuple[str, ...], path: Path) -> None:
    decide, steps = report["decide"], report.get("steps", {})
    head = ["", "`decide` in NumPy, µs", "`decide` in eager torch, µs"]
    head += [f"a step, times the bare one: {title}" for title in steps]
    rows = []
    for label in ("no rule", *rules):
        shown = label if label == "no rule" else f"`{label}`"
        row = decide[label] if label != "ClipUpdateRMS" else None
        cells = [shown, *("" if row is None else f"{row[key]:.0f}" for key in ("numpy_us", "torch_us"))]
        ratios = [step["ratio to bare"].get(label) for step in steps.values()]
        rows.append(cells + ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios])
    _write(path, head, rows, note=f"{_software(report)}; 108 parameters, medians.")


def _write_detection(detection: dict[str, Any], path: Path) -> None:
    head = ["stream", "rule", "found", "masked ones found", "others refused"]
    rows = []
    for stream, rules in detection.items():
        for i, (rule, row) in enumerate(rules.items()):
            masked = row.get("masked_planted", 0)
            rows.append(
                [
                    f"`{stream}`" if i == 0 else "",
                    f"`{rule}`" if re.fullmatch(r"\w+", rule) else rule,
                    f"{row['detected'] / row['planted']:.0%} of {row['planted']}",
                    f"{row['masked_detected']} of {masked}" if masked else "",
                    f"{row['false_skips'] / row['steps']:.2%} of {row['steps']:,}",
                ]
            )
    _write(path, head, rows)


def _state_rows(config: GuardConfig) -> list[list[str]]:
    state = init_guard(config, _ODD_NUMBER, xp=xp)
    part = state.clip[0] if config.clip_rules else state.loss_scale if config.loss_scale else state.spike
    rows = []
    for name, value in zip(part._fields, part, strict=True):
        for inner, leaf in (
            zip(value._fields, value, strict=True) if hasattr(value, "_fields") else [("", value)]
        ):
            if hasattr(leaf, "dtype"):
                shape = ", ".join("n" if size == _ODD_NUMBER else str(size) for size in leaf.shape)
                label = f"{name}.{inner}" if inner else name
                rows.append([f"`{label}`", f"({shape}{',' if leaf.ndim == 1 else ''})", str(leaf.dtype)])
    return rows


def _timing(title: str, row: dict[str, Any]) -> list[str]:
    ratio = next(key for key in row if key.startswith(("extra", "ratio")))
    rows = []
    for name, time in row["times"].items():
        figures = [name, f"{time['median_ms']:.2f}", f"{time['spread']:.0%}", str(row[ratio].get(name, ""))]
        rows.append([*figures, str(row.get("temp_bytes", {}).get(name, ""))])
    return [f"### {title}", "", *_table(["", "median ms", "spread", ratio, "temporary memory, bytes"], rows)]


def _software(report: dict[str, Any]) -> str:
    software = [f"{name} {version}" for name, version in report["versions"].items()]
    if "machine" in report:
        machine = report["machine"]
        where = f"{machine['cpu_count']} cores, {machine['architecture']}, Python {report['python']}"
        software.insert(0, where)
    return ", ".join(software)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _write(path: Path, head: list[str], rows: list[list[str]], note: str = "") -> None:
    lines = _table(head, rows) + (["", note] if note else [])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
