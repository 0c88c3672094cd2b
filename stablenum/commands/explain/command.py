"""``stablenum explain``: the options, the exit codes, and where the report goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from stablenum.commands.changes import Write, apply, check_write
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
from stablenum.commands.explain.runner import Explained
from stablenum.commands.explain.runner import explain as run_and_explain
from stablenum.commands.explain.together import explain_together
from stablenum.commands.outputs import MENDED, SCRIPT_FAILED, check_target
from stablenum.commands.reports import about, write_reports
from stablenum.commands.terminal import Terminal
from stablenum.commands.terminal import say as say_line
from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.launch import Launch, LaunchError
from stablenum.diagnosis.watch.plan import Outcome, Plan

__all__ = ["explain"]


def explain(
    script: Script,
    arguments: Arguments = None,
    module: AsModule = False,
    once: Annotated[
        bool, typer.Option("--once", help="Record every step of the first run: slower, but only one run.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Stop at the first non-finite value, even if the script copes with it."
        ),
    ] = False,
    seed: Seed = 0,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Do not judge what this function returns or computes, or (JAX) the entry of this name in a "
            "result. Can be given several times.",
            metavar="NAME",
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Show the change that was tried and helps as a patch.")
    ] = False,
    write: Write = False,
    json: Json = None,
    html: Html = None,
) -> None:
    """Run a PyTorch or JAX training script until a non-finite value affects training; report where and why.

    Your script is not changed. A loss, a gradient or a parameter that is NaN or inf counts unless the script
    copes with it: it skips the step, retries a line search, or only prints a metric. Such values are passed
    over, and named at the end; with `--strict` the first of them is reported. After a failure, a PyTorch
    script runs a second time to record the step that failed, so whatever it writes is written twice.

    Some of the steps are measured as by `stablenum checkup`. If nothing fails, what keeps the training from
    learning is reported.

    Under `torchrun --nproc-per-node 4 -m stablenum explain train.py`, every rank runs the script, and rank 0
    writes one report: on which rank the value originated, and how it came to the others.

    If the remedy is a change of one expression, the script runs once more with that change, in memory, until
    some steps after the failure; what came of it is printed beside the remedy. With `--fix` it is printed
    as a patch, too. It is proven if that run was finite to its end, and its losses before the failure were
    those of the first run, within some ulps; only then `--write` writes it.

    The exit code is 1 if a non-finite value affected training, 0 if not, 2 for a usage error, 3 if the script
    itself failed and nothing was found, and 4 if `--fix` has a change that is proven.
    """
    check_write(fix=fix, write=write)
    if fix and once:
        raise typer.BadParameter("needs more than the one run that --once allows", param_hint="--fix")
    check_script(script, module)
    for option, path in (("--json", json), ("--html", html)):
        check_target(option, path)
    say = say_to(Terminal(stderr=True))
    plan = Plan(
        script=script,
        arguments=tuple(arguments or ()),
        module=module,
        seed=seed,
        record_from=0 if once else None,
        ignore=tuple(ignore or ()),
        strict=strict,
    )
    launch = Launch.of(os.environ)
    if launch is None:
        _tell(run_and_explain(plan, say), seed, json, html, say, Changing(fix, write))
    try:
        launch.begin()
    except LaunchError as error:
        raise typer.BadParameter(str(error), param_hint="RANK") from None
    try:
        explained = explain_together(plan, say if launch.leads else _nothing, launch)
        if explained is not None:
            _tell(explained, seed, json, html, say, Changing(fix, write))
    finally:
        launch.end()


def _nothing(text: str) -> None:
    """Say nothing, because rank 0 says it."""


class Changing(NamedTuple):
    """Whether changes are shown, and written."""

    fix: bool
    write: bool


def _tell(
    explained: Explained,
    seed: int,
    json: Path | None,
    html: Path | None,
    say: Callable[[str], None],
    changing: Changing,
) -> NoReturn:
    """Say and show what was found, write it, and end with the exit code."""
    if explained.outcome.troubles:
        say(explained.outcome.unwatched())
    report, failure = explained.report, explained.outcome.failure
    if report is not None and failure is not None and failure.reporter:
        say(f"{failure}; the report is that of {failure.reporter}")
        raise typer.Exit(0 if report.ok else 1)
    if report is None:
        plain, page = _tell_of_nothing(explained, say)
        code = SCRIPT_FAILED if explained.outcome.exit_code else 0
    else:
        where = "" if explained.on_rank is None else f" on rank {explained.on_rank}"
        recorded = f", recorded in run {explained.runs}" if explained.runs > 1 else ""
        say(f"{failure}{where}{recorded}")
        show(report)
        plain, page, code = report.to_dict(), report.to_html, 0 if report.ok else 1
    made_by = about("explain", seed=seed, step=None if failure is None else failure.step)
    for path in write_reports(made_by, lambda: plain, page, json=json, html=html):
        say(f"wrote {path}")
    if changing.fix and code == 1 and report is not None:
        code = _change(explained, report, say, write=changing.write)
    raise typer.Exit(code)


def _change(explained: Explained, report: Report, say: Callable[[str], None], *, write: bool) -> int:
    """Show the changes that help, write them if that is asked for, and return the exit code."""
    if not report.fixes:
        say("no change of an expression is known that helps")
        return 1
    for fixed in report.fixes:
        say(f"{'proven' if fixed.proven else 'not proven'}: {fixed.explanation}")
        say(fixed.evidence)
        for line in fixed.patch.splitlines():
            say_line(line)
    if explained.texts is None or not all(f.proven for f in report.fixes):
        return 1
    apply(explained.texts.before, explained.texts.after, write=write, say=say)
    return MENDED


def _tell_of_nothing(
    explained: Explained, say: Callable[[str], None]
) -> tuple[dict[str, Any], Callable[[], str]]:
    """Say that nothing was found, and return that as plain values, and what makes its page."""
    outcome, checkup = explained.outcome, explained.checkup
    summary = _ended(outcome)
    say(summary)
    if outcome.harmless:
        say(f"passed over, because training went on without it: {outcome.harmless}")
        say("--strict reports where that came from, and why")
    plain, page = nothing_found(summary, outcome)
    if checkup is None or checkup.ok:
        return plain, page
    say("but the training may not learn:")
    show(checkup)
    return {**plain, **checkup.to_dict()}, checkup.to_html


def _ended(outcome: Outcome) -> str:
    seen = [
        f"{count} {unit}{'' if count == 1 else 's'}"
        for count, unit in ((outcome.steps, "optimizer step"), (outcome.calls, "watched call"))
        if count
    ]
    steps = " and ".join(seen)
    if outcome.exit_code:
        why = outcome.error or f"exit code {outcome.exit_code}"
        if outcome.relative_import:
            why += " (a part of a package: run it by its module's name, with -m package.module)"
        until = "it trained on" if outcome.harmless else "nothing went wrong"
        through = f" {'through' if outcome.harmless else 'in'} {steps}" if seen else ""
        return f"the script ended with {why}; until then {until}{through}"
    if not outcome.watched:
        return "nothing was watched: the script loaded neither torch nor jax"
    if not seen:
        return f"nothing went wrong, but {' and '.join(outcome.watched)} took no step"
    if outcome.harmless:
        return f"the script trained on through {steps}, although not every number in them was finite"
    return f"nothing went wrong in {steps}"
