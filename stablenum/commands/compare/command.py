"""``stablenum compare``: the options and the exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["compare"]


def compare(
    show_list: Annotated[bool, typer.Option("--list", help="List scenarios and backends, and exit.")] = False,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Run only this scenario; may be repeated.", show_default="all")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this backend (and NumPy); may be repeated.", show_default="all installed"
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML: [guard] replaces settings of all scenarios, [[scenario]] adds streams."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Run this many scenarios at a time, each in a separate process.")
    ] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results as strict JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw loss, gradient norm, loss scale and skips (PNG).")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a self-contained page with verdicts and plots of all scenarios."),
    ] = None,
) -> None:
    """Run unstable trainings without and with the guard on every backend, and compare step by step.

    NumPy is the reference. Decisions, reasons and loss scales must equal NumPy's. Gradient norms must agree
    within 1e-6, parameters at the end within 1e-5 (SGD) or 1e-4 (Adam), relative; the limits are wider where
    a scenario computes in half precision (see "tolerance" in the JSON). The backend torch-compiled traces the
    step with torch.compile and runs the graphs without generating code (aot_eager), which would take minutes.

    Exit code: 0 if all backends agree and every outcome is as expected, 1 if not, 2 for a usage error.
    """
    from stablenum.commands.compare import session  # imports NumPy; the help is shown without it

    if show_list:
        session.show_list(scenario or [], backend, config)
    elif not session.run(scenario or [], backend, config, jobs, json=json, plot=plot, html=html):
        raise typer.Exit(1)
