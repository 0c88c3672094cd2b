"""The figures on the pages: recorded streams passed through ``stablenum.decide``, and whole runs.

``make_all`` draws each figure and writes its caption, with numbers counted in the same run, so that neither
the picture nor the numbers can become stale.
"""

from __future__ import annotations

from pathlib import Path

from figures import clipping, recovery, scales, spikes
from figures.style import save
from figures.two_runs import two_runs

__all__ = ["FIGURES", "make_all"]

FIGURES = {
    "global-norm": clipping.global_norm,
    "agc": clipping.agc,
    "autoclip": clipping.autoclip,
    "zclip": clipping.zclip,
    "adagc": clipping.adagc,
    "update-rms": clipping.update_rms,
    "static-dynamic": scales.static_dynamic,
    "log-max": scales.log_max,
    "underflow-aware": scales.underflow_aware,
    "recovery": recovery.rewound,
    "spike-guard": spikes.spike_guard,
    "spike-guard-constant": spikes.constant_loss,
    "two-runs": two_runs,
}


def make_all(directory: Path) -> None:
    """Write ``<name>.svg`` and its caption ``<name>.md`` for every figure."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure, caption = draw()
        save(figure, directory / f"{name}.svg")
        (directory / f"{name}.md").write_text(caption + "\n", encoding="utf-8")
