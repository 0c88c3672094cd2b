"""Tables on the pages, generated from the code or from measurements so that they are never stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import array_api_compat.numpy as xp
from measured import dense, read, software, table, with_software

from stablenum import AdaGC, AutoClip, GuardConfig, LogMaxLossScale, SpikeGuard, ZClip, init_guard, losses
from stablenum.guard.reasons import EXPLANATIONS, Reason

__all__ = [
    "PAGES",
    "STATES",
    "write_diagnosis",
    "write_losses",
    "write_reasons",
    "write_rule_tables",
    "write_small_steps",
    "write_ulp",
]

# The rules on each page whose cost `python -m benchmarks rules` measures.
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
LIBRARIES = {
    "stablenum_torch": "stablenum, PyTorch",
    "torch": "PyTorch",
    "stablenum_jax": "stablenum, JAX",
    "jax": "JAX",
    "optax": "optax",
}
_ODD_NUMBER = 7919  # of parameters: an array of this length has one row per parameter


def write_reasons(directory: Path) -> None:
    """Write the table of reason codes with cause and remedy."""
    rows = [
        [str(int(reason)), f"`{reason.name}`", row.what, row.cause, row.remedy]
        for reason, row in EXPLANATIONS.items()
    ]
    _write(directory / "reasons-table.md", ["code", "name", "what happened", "likely cause", "remedy"], rows)
    if set(EXPLANATIONS) != set(Reason):
        raise ValueError("a reason has no explanation")


def write_rule_tables(results: Path, directory: Path) -> None:
    """Write the cost and the state of each rule, one file per page, and ``detection`` for the spike rules.

    Raises:
        FileNotFoundError: the benchmark has not been run.
        KeyError: a rule is missing from its results.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks rules` writes it")
    report = json.loads(results.read_text(encoding="utf-8"))
    for page, rules in PAGES.items():
        _write_cost(report, rules, directory / f"cost-{page}.md")
    if report.get("steps"):
        _write_cost(report, ("ClipUpdateRMS",), directory / "cost-update-rms.md")
    else:  # it is not part of `decide`
        (directory / "cost-update-rms.md").write_text("", encoding="utf-8")
    for page, config in STATES.items():
        _write(directory / f"state-{page}.md", ["state", "shape", "dtype"], _state_rows(config))
    lines: list[str] = []
    for title, row in report.get("steps", {}).items():
        lines += [] if lines else ["## A whole step with each rule", ""]
        lines += [*_timing(f"{title}: {row['size']}", row), ""]
    (directory / "rule-steps.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_detection(report["detection"], directory / "detection.md")


def write_ulp(results: Path, directory: Path) -> None:
    """Write the worst error of each function and of its gradient, one table per format.

    Raises:
        FileNotFoundError: the errors have not been measured.
        ValueError: the file does not have the form that ``benchmarks.ulp`` writes.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks.ulp` writes it")
    report = json.loads(results.read_text(encoding="utf-8"))
    formats = list(dict.fromkeys(name for row in report.values() for name in row))
    libraries = list(dict.fromkeys(key for row in report.values() for form in row.values() for key in form))
    if not formats or not {"stablenum_torch", "stablenum_jax"} <= set(libraries) <= set(LIBRARIES):
        raise ValueError(
            f"{results}: expected function -> format -> library -> [value, gradient] with libraries "
            f"{', '.join(LIBRARIES)}; got {', '.join(libraries) or 'none'}. Run `python -m benchmarks.ulp`."
        )
    lines: list[str] = []
    for name in sorted(formats, key=lambda form: form != "float32"):
        lines += [f"## {name}", ""]
        for of_losses in (False, True):
            rows = {
                label: row[name]
                for label, row in report.items()
                if name in row and (label.partition(" ")[0] in losses.__all__) == of_losses
            }
            lines += [*_ulp_table("loss" if of_losses else "function", rows), ""] if rows else []
    (directory / "ulp.md").write_text("\n".join(lines), encoding="utf-8")


def _ulp_table(what: str, rows: dict[str, dict[str, list[float | None]]]) -> list[str]:
    """A table with a column for each library that has any of these functions, in a fixed order."""
    libraries = [library for library in LIBRARIES if any(library in row for row in rows.values())]
    cells = [[f"`{label}`", *(_ulp(row.get(lib)) for lib in libraries)] for label, row in rows.items()]
    return table([what, *(LIBRARIES[library] for library in libraries)], cells)


def _ulp(errors: list[float | None] | None) -> str:
    """``value / gradient``; None in the pair is an infinite error."""
    if errors is None:
        return ""
    shown = ["not finite" if error is None else _few_digits(error) for error in errors]
    return shown[0] if shown[0] == shown[1] == "not finite" else " / ".join(shown)


def _few_digits(number: float) -> str:
    if number < 1000:
        return f"{number:.1f}" if number < 100 else f"{number:.0f}"
    digits, _, exponent = f"{number:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"


def write_losses(results: Path, directory: Path) -> None:
    """Write time and memory of the losses, compared with the frameworks' own.

    Raises:
        FileNotFoundError: they have not been measured.
        ValueError: the file does not have the form that ``benchmarks.losses`` writes.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks losses` writes it")
    report = json.loads(results.read_text(encoding="utf-8"))
    found = {title: row for title, row in report.items() if isinstance(row, dict) and "times" in row}
    if not found:
        raise ValueError(f"{results}: no loss in it has `times`, which `benchmarks.losses` writes")
    rows = [cells for title, row in found.items() for cells in _loss_rows(results, title, row)]
    head = ["", "", "median ms", "spread", "ratio", "peak memory, MiB"]
    lines = [_ABOUT_LOSSES, f"{software(report)}.", "", *dense(table(head, rows))]
    (directory / "losses.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


_ABOUT_LOSSES = """\
## The losses

Forward and backward pass in float32 on a CPU, compared with the framework's own loss in one interleaved run.
Times are medians. Memory is the peak allocation; with JAX, the program's temporaries and results.
"""


def _loss_rows(results: Path, title: str, row: dict[str, Any]) -> list[list[str]]:
    if not {"size", "times", "ratio", "peak_bytes"} <= set(row) or set(row["times"]) != set(
        row["peak_bytes"]
    ):
        raise ValueError(
            f"{results}: {title}: expected size, ratio, and times and peak_bytes of the same variants; "
            f"got {', '.join(sorted(row))}"
        )
    what = f"{title.partition(' ')[2].replace('_', ' ')}, {row['size']}"
    return [
        [
            what if i == 0 else "",
            f"`{name}`",
            f"{time['median_ms']:.0f}",
            f"{time['spread']:.0%}",
            f"{row['ratio']:.2f}" if name.startswith("stablenum") else "",
            f"{row['peak_bytes'][name] / 2**20:.0f}",
        ]
        for i, (name, time) in enumerate(row["times"].items())
    ]


def write_diagnosis(results: Path, directory: Path) -> None:
    """Write what a diagnosis costs.

    Raises:
        FileNotFoundError: it has not been measured.
        KeyError: the file does not have the form that ``benchmarks.diagnosis`` writes.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks diagnosis` writes it")
    report = json.loads(results.read_text(encoding="utf-8"))
    steady = [
        [name, *(str(row[k]) for k in _STEADY), f"{row['median_ms']:.2f}", f"{row['spread']:.0%}"]
        for name, row in report["steady"].items()
    ]
    explained = [
        [LIBRARIES[name], f"{row['parameters']:,}", f"{row['seconds']:.1f}", row["operation"], row["cause"]]
        for name, row in report["explanation"].items()
    ]
    lines = table(["a guarded step", *_STEADY, "median ms", "spread"], steady)
    lines += ["", *table(["one explanation", "parameters", "seconds", "operation", "cause"], explained)]
    lines += ["", f"{software(report)}."]
    (directory / "diagnosis-cost.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_small_steps(results: Path, directory: Path) -> None:
    """Write what ``stablenum explain`` adds to small steps.

    Raises:
        FileNotFoundError: it has not been measured.
        KeyError: the file does not have the form that ``benchmarks.watching`` writes.
    """
    report = read(results, "small-steps")
    rows = []
    for name, row in report["small_steps"].items():
        framework, optimizer = name.split()
        rows.append(
            [
                f"{LIBRARIES[framework]}, {optimizer}",
                f"{row['ms']:.2f}",
                f"{row['explain_ms']:.2f}",
                f"{row['ratio']:.1f}",
            ]
        )
    lines = table(["a small step", "alone, ms", "under `stablenum explain`, ms", "times as long"], rows)
    (directory / "small-steps.md").write_text(with_software(lines, report), encoding="utf-8")


_STEADY = ("operations", "passes over the parameters", "waits")


def _write_cost(report: dict[str, Any], rules: tuple[str, ...], path: Path) -> None:
    decide, steps = report["decide"], report.get("steps", {})
    head = ["", "`decide` in NumPy, µs", "`decide` in eager torch, µs"]
    head += [f"a step, relative to the bare one: {title}" for title in steps]
    rows = []
    for label in ("no rule", *rules):
        shown = label if label == "no rule" else f"`{label}`"
        row = decide[label] if label != "ClipUpdateRMS" else None
        cells = [shown, *("–" if row is None else f"{row[key]:.0f}" for key in ("numpy_us", "torch_us"))]
        ratios = [step["ratio to bare"].get(label) for step in steps.values()]
        rows.append(cells + ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios])
    note = f"{software(report)}; 108 parameters, medians."
    _write(
        path, head, rows, note=note + (" A dash: not measured." if any("–" in row for row in rows) else "")
    )


def _write_detection(detection: dict[str, Any], path: Path) -> None:
    head = ["stream", "rule", "found", "masked ones found", "others skipped"]
    rows = []
    for stream, rules in detection.items():
        for i, (rule, row) in enumerate(rules.items()):
            masked = row.get("masked_planted", 0)
            rows.append(
                [
                    f"`{stream}`" if i == 0 else "",
                    f"`{rule}`" if re.fullmatch(r"\w+", rule) else rule.replace("'s law", "'s formula"),
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
    memory = row.get("temp_bytes", {})  # only JAX says how much a compiled step takes
    rows = []
    for name, time in row["times"].items():
        figures = [name, f"{time['median_ms']:.2f}", f"{time['spread']:.0%}", str(row[ratio].get(name, ""))]
        rows.append([*figures, *([f"{memory[name]:,}"] if memory else [])])
    head = ["", "median ms", "spread", ratio, *(["temporary memory, bytes"] if memory else [])]
    return [f"### {title}", "", *table(head, rows)]


def _write(path: Path, head: list[str], rows: list[list[str]], note: str = "") -> None:
    lines = table(head, rows) + (["", note] if note else [])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
