"""Tables and figures of the cost of a guarded step, from the results of the last benchmark run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from figures.style import AFTER, ALSO, BAD, LIMIT, RAW, finish, panels, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measured import dense

__all__ = ["write_costs", "write_ranks"]

Row = dict[str, Any]

_OURS = ("idle", "wrapper", "fold", "all")
_COUNTED = {
    "gradient_reads": "reads of the gradients",
    "gradient_writes": "writes",
    "traffic": "traffic",
    "operations": "operations",
    "host_waits": "host waits",
    "peak_bytes": "peak memory, MB",
}
# The rows that the figures and the tables of counts show.
_USUAL = {"torch": ("adamw", "fused"), "jax": ("adamw", "xla")}
_COUNTED_STEPS = {"torch": (("adamw", "fused"), ("adamw", "foreach")), "jax": (("adamw", "xla"),)}
_LINES = {
    "scaler": (LIMIT, "s"),
    "apply_if_finite": (LIMIT, "s"),
    "clip": (RAW, "v"),
    "idle": (ALSO, "D"),
    "fold": (AFTER, "o"),
}
_NAMES = {"torch": "PyTorch", "jax": "JAX"}


def write_ranks(results: Path, directory: Path) -> None:
    """Write ``ranks.md``: the cost of a guarded step by number of ranks, one table per framework.

    Raises:
        FileNotFoundError, ValueError: see :func:`_read`.
    """
    report = _read(results, "ranks", ("rows",), ("framework", "variants"))
    lines: list[str] = []
    for framework in ("torch", "jax"):
        rows = [row for row in report["rows"] if row["framework"] == framework]
        peer = next(name for name in rows[0]["variants"] if name not in ("bare", "stablenum"))
        head = ["ranks", "bare, ms", f"{peer}, x bare", "stablenum, x bare", "known within"]
        head += [f"{name}: collectives, bytes" for name in (peer, "stablenum")]
        body = []
        for row in rows:
            both = [row["variants"][name] for name in (peer, "stablenum")]
            cells = [str(row["ranks"]), _ms(row["variants"]["bare"]["median_ms"])]
            cells += [f"{v['ratio_to_bare']:.2f}" for v in both]
            cells += [f"{max(v['uncertainty'] for v in both):.0%}"]
            body.append([*cells, *(f"{v['collectives']}, {v['bytes']}" for v in both)])
        lines += [f"{_NAMES[framework]}:", "", *_table(head, body), ""]
    (directory / "ranks.md").write_text("\n".join(lines), encoding="utf-8")


def _read(results: Path, part: str, keys: tuple[str, ...], of_rows: tuple[str, ...]) -> dict[str, Any]:
    """Read the results of one part of the benchmarks.

    Raises:
        FileNotFoundError: there are no results.
        ValueError: the file does not have the current form.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks {part}` writes it")
    report: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    missing = [key for key in keys if key not in report]
    missing += [key for row in report.get("rows", []) for key in of_rows if key not in row]
    if missing:
        raise ValueError(f"{results}: has no {missing[0]}. Run `python -m benchmarks {part}`.")
    return report


def write_costs(results: Path, directory: Path) -> None:
    """Write ``benchmarks.md``, ``figures/cost-torch.svg`` and ``figures/cost-jax.svg``.

    Raises:
        FileNotFoundError, ValueError: see :func:`_read`.
    """
    keys = ("bandwidth", "rows", "compiling", "threads")
    report = _read(results, "steps", keys, ("framework", "variants", "share_bound"))
    lines = [_machine(report), ""]
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for framework in ("torch", "jax"):
        rows = [row for row in report["rows"] if row["framework"] == framework]
        lines += [f"### {_NAMES[framework]}", "", *_tables(framework, rows, report), ""]
        save(_figure(framework, rows, report), directory / "figures" / f"cost-{framework}.svg")
    (directory / "benchmarks.md").write_text("\n".join(lines), encoding="utf-8")


def _machine(report: dict[str, Any]) -> str:
    machine, speed = report["machine"], report["bandwidth"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f"{machine['cpu_count']} cores, {machine['architecture']}, PyTorch on {report['threads']} of them, "
        f"Python {report['python']}, {versions}. Memory bandwidth: copying {speed['copy_gb_s']:.0f} GB/s "
        f"(read and write counted), reading {speed['read_gb_s']:.0f} GB/s."
    )


def _tables(framework: str, rows: list[Row], report: dict[str, Any]) -> list[str]:
    lines = [
        "Time of the bare step in milliseconds, and the time of a step with each variant relative to it:",
        "",
    ]
    lines += [*_table(*_ratios(rows)), ""]
    peer = rows[0]["variants"][rows[0]["peer"]]["label"]
    note = (
        f"The time added to the bare step, divided by the time that {peer} adds; empty where the quotient is "
        f"not known within {rows[0]['share_bound']}. `limit` is one read of the gradients at the measured "
        "bandwidth, in the same unit."
    )
    lines += [
        note,
        "",
        *_table(*_extras(rows, report)),
        "",
    ]
    for step in _COUNTED_STEPS[framework]:
        row = _named(rows, step, "38M", 108)
        lines += [f"Counted, {_what(row)}:", "", *_table(*_counts(row, report)), ""]
    return lines


def _what(row: Row) -> str:
    """``adamw fused, 38M in 108``; float32 is left out."""
    kernel = "" if row["kernel"] == "xla" else f" {row['kernel']}"
    dtype = "" if row["dtype"] == "float32" else f", {row['dtype']}"
    return f"{row['optimizer']}{kernel}, {row['size']} in {row['tensors']:,}{dtype}"


def _ratios(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    names = _all_variants(rows)[1:]
    labels = {name: v["label"] for row in rows for name, v in row["variants"].items()}
    body = []
    for row in rows:
        cells = [_what(row), _ms(row["variants"]["bare"]["median_ms"])]
        for name in names:
            v = row["variants"].get(name)
            cells.append("" if v is None else f"{v['ratio_to_bare']:.2f}")
        known = max(v["uncertainty"] for name, v in row["variants"].items() if name != "bare")
        body.append([*cells, f"{known:.0%}"])
    head = ["step, parameters in tensors", "bare, ms", *(labels[name] for name in names), "known within"]
    return head, body


def _extras(rows: list[Row], report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = [name for name in _all_variants(rows) if name in _OURS]
    labels = {name: v["label"] for row in rows for name, v in row["variants"].items()}
    body = []
    for row in rows:
        extra = row["variants"][row["peer"]]["extra_ms"]
        cells = [_what(row), _ms(extra), f"{_limit_ms(row, report) / extra:.2f}" if extra > 0 else ""]
        for name in names:
            v = row["variants"].get(name, {})
            known = "extra_over_peers" in v
            cells.append(f"{v['extra_over_peers']:.2f} ± {v['extra_over_peers_within']:.2f}" if known else "")
        body.append(cells)
    peer = rows[0]["variants"][rows[0]["peer"]]["label"]
    head = ["step, parameters in tensors", f"{peer}: extra, ms", "limit", *(labels[name] for name in names)]
    return head, body


def _counts(row: Row, report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The figures that do not depend on the machine, for one row."""
    columns = {key: title for key, title in _COUNTED.items() if key in row["variants"]["bare"]}
    compiled = next((c["variants"] for c in report["compiling"] if _same_step(c, row)), None)
    timed = any("compile_s" in v for v in (compiled or row["variants"]).values())
    head = [
        "",
        *columns.values(),
        *(["graph breaks"] if compiled else []),
        *(["compiling, s"] if timed else []),
    ]
    body = []
    for name, v in row["variants"].items():
        cells = [v["label"]]
        for key in columns:
            cells.append(f"{v[key] / 1e6:,.1f}" if key == "peak_bytes" else f"{v[key]:.4g}")
        if compiled:
            cells.append(str(compiled[name]["graph_breaks"]))
        if timed:
            seconds = (compiled or row["variants"])[name].get("compile_s")
            cells.append("" if seconds is None else f"{seconds:.1f}")
        body.append(cells)
    return head, body


def _same_step(one: Row, other: Row) -> bool:
    return all(one[key] == other[key] for key in ("framework", "optimizer", "kernel"))


def _all_variants(rows: list[Row]) -> list[str]:
    """The variants, in the order of the row that has the most."""
    return list(max((row["variants"] for row in rows), key=len))


def _named(rows: list[Row], step: tuple[str, str], size: str, tensors: int) -> Row:
    for row in rows:
        same = (row["optimizer"], row["kernel"]) == step and row["dtype"] == "float32"
        if same and row["size"] == size and row["tensors"] == tensors:
            return row
    raise ValueError(f"the results have no row for {' '.join(step)}, {size} in {tensors}")


def _limit_ms(row: Row, report: dict[str, Any]) -> float:
    """The time of one read of the gradients at the measured bandwidth."""
    return row["gradient_bytes"] / report["bandwidth"]["read_gb_s"] / 1e6


def _figure(framework: str, rows: list[Row], report: dict[str, Any]) -> Figure:
    """The extra time against the number of parameters, and of tensors at 1 M parameters."""
    usual = [
        row
        for row in rows
        if (row["optimizer"], row["kernel"]) == _USUAL[framework] and row["dtype"] == "float32"
    ]
    figure, (top, bottom) = panels(2, height=3.0, same_x=False)
    growing = sorted((row for row in usual if row["tensors"] == 108), key=lambda row: row["parameters"])
    cut = sorted((row for row in usual if row["size"] == "1M"), key=lambda row: row["tensors"])
    for ax, chosen, key, label in (
        (top, growing, "parameters", "parameters, in 108 tensors"),
        (bottom, cut, "tensors", "tensors, 1 M parameters in total"),
    ):
        if not chosen:
            raise ValueError(f"the results have no rows to plot against {key}")
        _lines(ax, chosen, key, report)
        ax.set_xscale("log")
        finish(ax, y="ms added to the bare step", log=10, x=False, columns=3)
        ax.set_xlabel(label)
    return figure


def _lines(ax: Axes, rows: list[Row], key: str, report: dict[str, Any]) -> None:
    """One line per variant, without points that noise puts at or below 0: the axis is logarithmic."""
    for name, (colour, marker) in _LINES.items():
        with_it = [row for row in rows if row["variants"].get(name, {}).get("extra_ms", 0.0) > 0]
        if with_it:
            ax.plot(
                [row[key] for row in with_it],
                [row["variants"][name]["extra_ms"] for row in with_it],
                color=colour,
                marker=marker,
                ms=5,
                lw=1.5,
                label=with_it[0]["variants"][name]["label"],
            )
    ax.plot(
        [row[key] for row in rows],
        [_limit_ms(row, report) for row in rows],
        color=BAD,
        ls=":",
        lw=1.3,
        label="one read of the gradients",
    )


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return dense(["| " + " | ".join(line) + " |" for line in (head, rule, *rows)])
