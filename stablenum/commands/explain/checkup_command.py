"""``stablenum checkup``: the options, the exit codes, and where the report goes."""

from __future__ import annotations

from typing import Annotated

import typer

from stablenum.commands.explain.options import (
    Arguments,
    AsModule,
    Html,
    Json,
    Script,
    Seed,
    check_script,
    nothing_found,
    say_to,
    show,
)
from stablenum.commands.explain.runner import check_up
from stablenum.commands.outputs import SCRIPT_FAILED, check_target
from stablenum.commands.reports import about, write_reports
from stablenum.commands.terminal import Terminal
from stablenum.diagnosis.watch.plan import Plan

__all__ = ["checkup"]


def checkup(
    script: Script,
    arguments: Arguments = None,
    module: AsModule = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End the script after this many optimizer steps.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Run the script only once, without trying the first cure.")
    ] = False,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
) -> None:
    """Run a PyTorch or JAX training script; report what keeps it from learning though all values are finite.

    Your script is not changed. Some of its steps are measured in full: activations, gradients, parameters and
    updates. If the cure of the first finding can be tried (another rate or initialisation, clipping, scaled
    inputs and the like), some steps of the script run once more with it, and write again what they write. If
    your script resumes by itself from its checkpoints, turn that off, or use `--once`.
    If the loss stops being finite, use `stablenum explain`.

    The exit code is 1 if something more serious than a note was found, 0 if not, 2 for a usage error, and 3
    if the script itself failed and nothing was found.
    """
    check_script(script, module)
    for option, path in (("--json", json), ("--html", html)):
        check_target(option, path)
    say = say_to(Terminal(stderr=True))
    plan = Plan(
        script=script,
        arguments=tuple(arguments or ()),
        module=module,
        seed=seed,
        finite=False,
        checkup=True,
        steps=steps,
    )
    report, outcome = check_up(plan, say, once=once)
    if outcome.troubles:
        say(outcome.unwatched())
    ended = f"the script ended with {outcome.error or f'exit code {outcome.exit_code}'}"
    if outcome.exit_code:
        say(ended)
    if report is None:
        summary = "nothing was measured: no training was seen"
        say(summary)
        plain, page = nothing_found(f"{summary}; {ended}" if outcome.exit_code else summary, outcome)
    else:
        show(report)
        plain, page = {**report.to_dict(), "exit_code": outcome.exit_code}, report.to_html
    for path in write_reports(about("checkup", seed=seed), lambda: plain, page, json=json, html=html):
        say(f"wrote {path}")
    found = report is not None and not report.ok
    raise typer.Exit(1 if found else SCRIPT_FAILED if outcome.exit_code else 0)
