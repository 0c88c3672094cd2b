"""The tables and figures of the page on costs agree with the results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.benchmarks.small import JAX_ROW, TORCH_ROW, measured

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def report():
    """Two small rows, really measured, one labelled as the usual row and one as another."""
    of_jax = replace(JAX_ROW, variants=("bare", "apply_if_finite", "fold"))
    rows = [measured(replace(row, rounds=4)) for row in (TORCH_ROW, of_jax)]
    for row in rows:
        for i, (name, v) in enumerate(row["variants"].items()):
            if name != "bare":
                v |= {"uncertainty": 0.01 * i, "extra_over_peers": 0.1 * i, "extra_over_peers_within": 0.123}
        row |= {"size": "38M", "tensors": 108}
    foreach = rows[0] | {"kernel": "foreach"}
    rows = [row | changed for changed in ({}, {"size": "1M", "tensors": 10}) for row in rows]
    rows.append(foreach)
    breaks = {name: {"graph_breaks": 7, "compile_s": 1.25} for name in rows[0]["variants"]}
    return {
        "machine": {"cpu_count": 2, "architecture": "x86_64"},
        "python": "3.11",
        "versions": {"torch": "2"},
        "threads": 2,
        "bandwidth": {"copy_gb_s": 40.0, "read_gb_s": 20.0},
        "compiling": [
            {"framework": "torch", "optimizer": "adamw", "kernel": "fused", "variants": breaks},
        ],
        "rows": rows,
    }


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return __import__("costs")


def written(costs, report, folder) -> str:
    results = folder / "cpu.json"
    results.write_text(json.dumps(report), encoding="utf-8")
    costs.write_costs(results, folder)
    return (folder / "benchmarks.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_variant_has_its_ratio_and_its_counts(costs, report, tmp_path):
    page = written(costs, report, tmp_path)
    tables = [table.splitlines() for table in page.split("\n\n") if table.startswith("|")]
    assert len(tables) == 7, "three a framework, and the counts of torch's foreach kernels"
    del tables[3]
    for row, (ratios, extras, counts) in zip(report["rows"][:2], (tables[:3], tables[3:]), strict=True):
        by_label = dict(zip(cells(ratios[0]), cells(ratios[2]), strict=True))
        added = dict(zip(cells(extras[0]), cells(extras[2]), strict=True))
        counted = {cells(line)[0]: cells(line) for line in counts[2:]}
        for name, v in row["variants"].items():
            if name != "bare":
                assert by_label[v["label"]] == f"{v['ratio_to_bare']:.2f}"
            if name in ("idle", "fold", "all"):
                assert added[v["label"]] == f"{v['extra_over_peers']:.2f} ± 0.12"
        known = max(v["uncertainty"] for name, v in row["variants"].items() if name != "bare")
        assert by_label["known within"] == f"{known:.0%}"
        for v in row["variants"].values():
            assert counted[v["label"]][1] == f"{v['gradient_reads']:.4g}"
    assert cells(tables[2][0])[-2:] == ["graph breaks", "compiling, s"]
    assert cells(tables[2][2])[-2:] == ["7", "1.2"]


def test_the_limit_is_one_read_at_the_measured_bandwidth(costs, report):
    row = report["rows"][0] | {"gradient_bytes": 2 * 10**9}
    assert costs._limit_ms(row, report) == pytest.approx(100.0)


def test_a_point_at_or_below_zero_is_left_out(costs, report, tmp_path):
    noisy = json.loads(json.dumps(report))
    for row in noisy["rows"]:
        for v in row["variants"].values():
            v["extra_ms"] = -1.0
            v.pop("extra_over_peers", None)
    page = written(costs, noisy, tmp_path)
    assert "nan" not in page.lower()
    bare = [line for line in page.splitlines() if line.startswith("| adamw") and "-1.000" in line]
    assert [cells(line)[2:] for line in bare] == [[""] * (len(cells(line)) - 2) for line in bare] != []


def test_the_figures_are_valid_svg(costs, report, tmp_path):
    written(costs, report, tmp_path)
    for name in ("cost-torch", "cost-jax"):
        assert ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot().tag.endswith("svg")


def test_the_page_includes_them():
    page = (DOCS / "cost.md").read_text(encoding="utf-8")
    assert "{include} _build/generated/benchmarks.md" in page
    for name in ("cost-torch", "cost-jax"):
        assert f"(_build/generated/figures/{name}.svg)" in page


def test_missing_or_unrelated_results_name_the_command_that_writes_them(costs, tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m benchmarks steps"):
        costs.write_costs(tmp_path / "none.json", tmp_path)
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="python -m benchmarks steps"):
        costs.write_costs(tmp_path / "other.json", tmp_path)


def test_ranks_have_a_table_for_each_framework(costs, tmp_path):
    def variant(ratio, **more):
        return {
            "median_ms": 1.0,
            "spread": 0.1,
            "ratio_to_bare": ratio,
            "collectives": 1,
            "bytes": 864,
        } | more

    rows = [
        {
            "framework": framework,
            "ranks": ranks,
            "variants": {
                "bare": variant(1.0),
                "peer": variant(2.5, uncertainty=0.03),
                "stablenum": variant(1.5, uncertainty=0.07),
            },
        }
        for framework in ("torch", "jax")
        for ranks in (1, 2)
    ]
    (tmp_path / "ranks.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    costs.write_ranks(tmp_path / "ranks.json", tmp_path)
    page = (tmp_path / "ranks.md").read_text(encoding="utf-8")
    tables = [table.splitlines() for table in page.split("\n\n") if table.startswith("|")]
    wanted = {
        "ranks": "2",
        "bare, ms": "1.000",
        "peer, x bare": "2.50",
        "stablenum, x bare": "1.50",
        "known within": "7%",
        "peer: collectives, bytes": "1, 864",
        "stablenum: collectives, bytes": "1, 864",
    }
    for table in tables:
        assert dict(zip(cells(table[0]), cells(table[3]), strict=True)) == wanted
    assert len(tables) == 2
    (tmp_path / "ranks.json").write_text('{"rows": [{"ranks": 1}]}', encoding="utf-8")
    with pytest.raises(ValueError, match="python -m benchmarks ranks"):
        costs.write_ranks(tmp_path / "ranks.json", tmp_path)
