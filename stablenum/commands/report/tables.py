"""What the page shows as text: rewinds, skips by reason, worst parameters, settings and versions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from stablenum._support.outside_text import in_html
from stablenum.commands.run_plots.undone import skipped_undone, undone_phrases
from stablenum.guard.reasons import EXPLANATIONS, NO_PARAMETER, Reason
from stablenum.runlog.lines import is_by_group
from stablenum.runlog.reading import Run

__all__ = ["differences", "rewinds_table", "settings_table", "skips_table", "summary", "worst_table"]

_MOST = 12  # parameters


def summary(run: Run) -> str:
    """Return one line on a run, as HTML."""
    parts = [
        _counted(len(run), "step"),
        f"{len(run.skipped):,} skipped",
        *undone_phrases(run),
        f"started {_moment(run.starts[0])}",
        *_started_again(run),
        str(run.header.get("framework", "")),
    ]
    returns = len(run.rewinds) + len(run.events)
    parts += [f"went back {_times(returns)}"] if returns else []
    parts += [f"{_counted(run.unreadable, 'line')} of the log cannot be read"] if run.unreadable else []
    return " &middot; ".join(in_html(part) for part in parts if part)


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _moment(header: Mapping[str, Any]) -> str:
    started = str(header.get("started", "at an unknown time"))
    return started.replace("T", " ", 1).replace("+00:00", " UTC")


def _started_again(run: Run) -> Iterator[str]:
    if run.restarts:
        last = "at" if len(run.restarts) == 1 else "last at"
        yield f"started again {_times(len(run.restarts))}, {last} {_moment(run.starts[-1])}"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n:,} times"


def rewinds_table(runs: Sequence[Run]) -> str:
    """Return a table of the rewinds of which the logs say why; at least one does."""
    rows = [row for run in runs for row in _rewinds(run, named=len(runs) > 1)]
    run = "<th>run</th>" if len(runs) > 1 else ""
    head = f"<tr>{run}<th>from step</th><th>to step</th><th>symptom</th><th>response</th></tr>"
    return _table(head, rows)


def _rewinds(run: Run, *, named: bool) -> Iterator[str]:
    for rewind in run.events:
        cells = [
            f"<td>{in_html(run.name)}</td>" if named else "",
            *(f'<td class="number">{number:,}</td>' for number in (rewind.last, rewind.first)),
            f'<td class="why"><code>{in_html(rewind.symptom)}</code><br>{in_html(rewind.seen)}.</td>',
            f'<td class="why">{in_html(rewind.done)}.</td>',
        ]
        yield f"<tr>{''.join(cells)}</tr>"


def skips_table(runs: Sequence[Run]) -> str:
    """Return a table of the skipped steps by reason, undone ones apart; a sentence if there are none."""
    rows = [row for run in runs for row in _skips(run, named=len(runs) > 1)]
    if not rows:
        return "<p>No step was skipped.</p>"
    run = "<th>run</th>" if len(runs) > 1 else ""
    head = f"<tr>{run}<th>reason</th><th>steps</th><th>first</th><th>last</th><th>what to do</th></tr>"
    return _table(head, rows)


def _skips(run: Run, *, named: bool) -> Iterator[str]:
    steps: dict[Reason, list[int]] = {}
    for i in run.skipped:
        steps.setdefault(run.reason[i], []).append(run.steps[i])
    undone: dict[Reason, list[int]] = {}
    for step in skipped_undone(run):
        undone.setdefault(step.reason, []).append(step.step)
    yield from _by_reason(run, steps, named=named)
    yield from _by_reason(run, undone, named=named, undone=True)


def _by_reason(
    run: Run, steps: Mapping[Reason, Sequence[int]], *, named: bool, undone: bool = False
) -> Iterator[str]:
    for reason, at in sorted(steps.items(), key=lambda item: -len(item[1])):
        what, remedy = (_with_code(text) for text in (EXPLANATIONS[reason].what, EXPLANATIONS[reason].remedy))
        cells = [
            f"<td>{in_html(run.name)}</td>" if named else "",
            f"<td><code>{reason.name}</code>{' (undone)' if undone else ''}</td>",
            *(f'<td class="number">{number:,}</td>' for number in (len(at), min(at), max(at))),
            f'<td class="remedy">{what}.<br><span class="soft">{remedy}.</span></td>',
        ]
        row = '<tr class="undone">' if undone else "<tr>"
        yield f"{row}{''.join(cells)}</tr>"


def _with_code(text: str) -> str:
    """Return a text as HTML in which what is between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", in_html(text))


def worst_table(runs: Sequence[Run]) -> str:
    """Return a table of the parameters that had the largest norm, or were at fault in a skipped step."""
    rows = [row for run in runs for row in _worst(run, named=len(runs) > 1)]
    if not rows:
        return "<p>No parameter is named in the log.</p>"
    run = "<th>run</th>" if len(runs) > 1 else ""
    undone = ", also undone ones" if any(map(skipped_undone, runs)) else ""
    share = '<th colspan="2">had the largest norm, share of the applied steps</th>'
    head = f"<tr>{run}<th>parameter</th>{share}<th>worst of skipped steps{undone}</th></tr>"
    return _table(head, rows)


def _worst(run: Run, *, named: bool) -> Iterator[str]:
    skipped = set(run.skipped)
    blamed = [(run.reason[i], run.worst[i]) for i in skipped]
    blamed += [(step.reason, step.worst) for step in skipped_undone(run)]
    faulty = Counter(worst for reason, worst in blamed if reason not in NO_PARAMETER)
    largest = Counter(worst for i, worst in enumerate(run.worst) if i not in skipped)
    applied = max(1, len(run) - len(skipped))
    said = ((name, k) for name, k in run.names.items() if largest[k] + faulty[k])
    for name, k in sorted(said, key=lambda item: (-largest[item[1]] - faulty[item[1]], item[0]))[:_MOST]:
        share = largest[k] / applied
        cells = [
            f"<td>{in_html(run.name)}</td>" if named else "",
            f"<td><code>{in_html(name)}</code></td>",
            f'<td class="share"><meter min="0" max="1" value="{share:.4f}"></meter></td>',
            f'<td class="number">{share:.1%}</td>',
            f'<td class="number">{faulty[k]:,}</td>',
        ]
        yield f"<tr>{''.join(cells)}</tr>"


def settings_table(runs: Sequence[Run]) -> str:
    """Return a table of settings and versions with a column for each run; rows that differ are marked."""
    rows = []
    for key, values, differs in _settings(runs):
        cells = "".join(f"<td><code>{in_html(value)}</code></td>" for value in values)
        mark = ' class="differs"' if differs else ""
        rows.append(f'<tr{mark}><th scope="row">{in_html(key)}</th>{cells}</tr>')
    names = "".join(f"<th>{in_html(run.name)}</th>" for run in runs)
    return _table(f"<tr><th></th>{names}</tr>", rows, kind="settings")


def differences(runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines for a terminal: each setting or version in which the runs differ, and its value in each."""
    for key, values, differs in _settings(runs):
        if differs:
            yield f"{key} differs:"
            yield from (f"  {run.name}: {value or '-'}" for run, value in zip(runs, values, strict=True))


def _settings(runs: Sequence[Run]) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each setting's name, its value in each run, and whether the runs differ in it."""
    columns = [_courses(run) for run in runs]
    for key in dict.fromkeys(key for column in columns for key in column):
        courses = [column.get(key, [("", "")]) for column in columns]
        differs = len({tuple(compared for _, compared in course) for course in courses}) > 1
        yield key, [_shown(course) for course in courses], differs


def _shown(course: Sequence[tuple[str, str]]) -> str:
    """Return the values that a setting had one after another."""
    return course[0][0] if len(course) == 1 else ", then ".join(value or "-" for value, _ in course)


def _courses(run: Run) -> dict[str, list[tuple[str, str]]]:
    """Return the values that each setting had one after another: each as it was, and as it is compared.

    A value that only a schedule has moved is not another one.
    """
    courses: dict[str, list[tuple[str, str]]] = {}
    last: dict[str, int] = {}  # the place of the last header that has a setting
    headers = [header for _, header in run.in_force] or [run.header]
    for i, header in enumerate(headers):
        begun = dict(_flat(_as_begun(header)))
        for key, value in dict(_flat(header)).items():
            if last.get(key, -1) < i - 1:
                _go_on(courses.setdefault(key, []), ("", ""))
            _go_on(courses.setdefault(key, []), (value, begun.get(key, "")))
            last[key] = i
    for key, course in courses.items():
        if last[key] < len(headers) - 1:
            _go_on(course, ("", ""))
    return courses


def _go_on(course: list[tuple[str, str]], value: tuple[str, str]) -> None:
    """Add a value to a course, unless it compares equal to the last one."""
    if not course or course[-1][1] != value[1]:
        course.append(value)


def _as_begun(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a header in which what a schedule moves has the value with which the schedule begins."""
    optimizer = dict(header.get("optimizer") or {})
    for name, first in (("lr", "initial_lr"), ("momentum", "max_momentum")):
        if name in optimizer:
            optimizer[name] = optimizer.get(first, optimizer[name])
    if {"betas", "max_momentum"} <= optimizer.keys():
        optimizer["betas"] = _cycled(optimizer["betas"], optimizer["max_momentum"])
    return {**header, "optimizer": optimizer}


def _cycled(betas: object, momentum: object) -> object:
    """Return Adam's coefficients with the momentum that begins a cycle, which PyTorch keeps in the first."""
    if is_by_group(betas) or is_by_group(momentum):
        each = zip(*_expanded(betas, momentum), strict=True)
        return {"by_group": [_cycled(*pair) for pair in each]}
    return [momentum, *betas[1:]] if isinstance(betas, list) and momentum is not None else betas


def _expanded(*values: Any) -> list[list[Any]]:
    """Return for each setting a list of its values by parameter group."""
    count = max(len(value["by_group"]) for value in values if is_by_group(value))
    return [value["by_group"] if is_by_group(value) else [value] * count for value in values]


def _flat(header: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = header.get("settings")
    if settings is None:
        yield "guard", "not known"
    for name, value in (settings or {}).items():
        yield name, _text(value)
    for name, value in (header.get("optimizer") or {}).items():
        yield ("optimizer" if name == "class" else f"optimizer: {name}"), _text(value)
    for name, value in (header.get("versions") or {}).items():
        yield f"version of {name}", str(value)


def _text(value: object) -> str:
    """Return a setting as its user would write it: a rule by its name, with its fields in brackets."""
    if isinstance(value, Mapping) and "rule" in value:
        fields = ", ".join(f"{name}={_text(field)}" for name, field in value.items() if name != "rule")
        return f"{value['rule']}({fields})"
    if isinstance(value, Mapping) and isinstance(value.get("by_group"), list):
        return "; ".join(_groups(value["by_group"]))
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return _number(value) if isinstance(value, float) else str(value)


def _groups(values: Sequence[object]) -> Iterator[str]:
    """Yield each value with the parameter groups in a row that have it."""
    last = -1
    for text, same in groupby(map(_text, values)):
        first, last = last + 1, last + sum(1 for _ in same)
        yield f"{text} (group {first})" if first == last else f"{text} (groups {first} to {last})"


def _number(value: float) -> str:
    """Return a whole number with all its digits, and another one with six."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.6g}"


def _table(head: str, rows: Sequence[str], kind: str = "") -> str:
    body = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="{f"scroll {kind}".strip()}" tabindex="0">{body}</div>'
