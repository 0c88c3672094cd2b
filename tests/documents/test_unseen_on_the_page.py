"""The page on the accuracy of diagnoses has the figures of the first run of each set."""

from __future__ import annotations

import json

from tests.unseen.test_unseen import PROGRAMS, ROOT

PAGE = ROOT / "docs" / "diagnosis-accuracy.md"
FIRST_RUN = ROOT / "corpus" / "results" / "stablenum-explain-first-run.json"


def test_the_page_gives_the_figures_as_they_were_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    records = json.loads(FIRST_RUN.read_text(encoding="utf-8"))["programs"]
    found = {name: record["judged"] for name, record in records.items()}
    for framework, title in (("torch", "PyTorch"), ("jax", "JAX")):
        for number in sorted({program["round"] for program in PROGRAMS.values()}):
            all_of_them = [
                (name.replace("/", "/unseen/"), p["kind"])
                for name, p in PROGRAMS.items()
                if name.startswith(framework) and p["round"] == number
            ]
            if not all_of_them:
                continue
            failing = [found[name] for name, kind in all_of_them if kind == "failing"]
            healthy = [found[name]["detected"] for name, kind in all_of_them if kind == "healthy"]
            right = [
                f"{sum(p[what] for p in failing)} of {len(failing)}" for what in ("line", "cause", "remedy")
            ]
            blamed = f"{sum(healthy)} of {len(healthy)}"
            assert f"| {title}, round {number} | {' | '.join([*right, blamed])} |" in page
