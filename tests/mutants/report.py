"""The results of a run as text, and whether they are good enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.mutants.mutations import Mutant
from tests.mutants.running import ERROR, KILLED, SURVIVED, TIMED_OUT, UNSEEN, Result
from tests.mutants.sampling import Judged

__all__ = ["passes", "report"]

_STATES = (KILLED, TIMED_OUT, SURVIVED, UNSEEN, ERROR)


def _accepted(mutants: Sequence[Mutant], results: Mapping[tuple, Result], judged: Judged) -> set[tuple]:
    """The surviving mutants for which a reason is listed."""
    known = {survivor.key for survivor in judged.survivors}
    return {m.key for m in mutants if m.key in known and results[m.key].status in (SURVIVED, UNSEEN)}


def _complaints(
    mutants: Sequence[Mutant], results: Mapping[tuple, Result], judged: Judged, stale: Sequence[str]
) -> list[str]:
    killed = {key for key, result in results.items() if result.status in (KILLED, TIMED_OUT)}
    needless = [s for s in judged.survivors if s.key in killed]
    return [
        *(f"stale, no mutant is like it any more: {text}" for text in stale),
        *(f"needless, the tests kill it: {s.file}: {s.before} -> {s.after}" for s in needless),
        *(
            f"error: {m.file}:{m.line}: {results[m.key].error}"
            for m in mutants
            if results[m.key].status == ERROR
        ),
    ]


def _rate(mutants: Sequence[Mutant], results: Mapping[tuple, Result], accepted: set[tuple]) -> float:
    """The fraction of the detectable mutants that the tests killed; 1 if there are none."""
    judged = [results[m.key].status in (KILLED, TIMED_OUT) for m in mutants if m.key not in accepted]
    return sum(judged) / len(judged) if judged else 1.0


def passes(
    mutants: Sequence[Mutant],
    results: Mapping[tuple, Result],
    judged: Judged,
    stale: Sequence[str],
    *,
    least: float,
) -> bool:
    """Whether enough mutants are killed and every listed reason applies."""
    accepted = _accepted(mutants, results, judged)
    enough = _rate(mutants, results, accepted) >= least
    return enough and not _complaints(mutants, results, judged, stale)


def report(
    mutants: Sequence[Mutant],
    results: Mapping[tuple, Result],
    judged: Judged,
    stale: Sequence[str],
    *,
    least: float,
) -> str:
    """A table by package, the survivors with their places, and what is wrong with the list of reasons."""
    accepted = _accepted(mutants, results, judged)
    packages = sorted({m.file.split("/")[0] for m in mutants})
    rows = [["", "mutants", *_STATES, "with a reason", "rate"]]
    for package in [*packages, "all"]:
        of_it = [m for m in mutants if package in ("all", m.file.split("/")[0])]
        states = Counter(results[m.key].status for m in of_it)
        reasons = sum(m.key in accepted for m in of_it)
        rate = f"{100 * _rate(of_it, results, accepted):.1f} %"
        rows.append([package, len(of_it), *(states[state] for state in _STATES), reasons, rate])
    lines = [_table(rows), ""]
    alive = [m for m in mutants if results[m.key].status in (SURVIVED, UNSEEN)]
    for title, shown in (
        ("Survivors without a reason:", [m for m in alive if m.key not in accepted]),
        ("Survivors with a reason:", [m for m in alive if m.key in accepted]),
    ):
        if shown:
            lines += [
                title,
                *(
                    _survivor(m, results[m.key], judged)
                    for m in sorted(shown, key=lambda m: (m.file, m.line))
                ),
                "",
            ]
    lines += [f"  {text}" for text in _complaints(mutants, results, judged, stale)]
    seconds = sum(results[m.key].seconds for m in mutants)
    rate = _rate(mutants, results, accepted)
    lines.append(
        f"{100 * rate:.1f} % of those that can be told are killed; at least {100 * least:g} % are asked for. "
        f"{seconds / max(len(mutants), 1):.1f} s of processor time for a mutant."
    )
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[object]]) -> str:
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(str(x).ljust(w) if i == 0 else str(x).rjust(w) for i, (x, w) in enumerate(zip(row, widths)))
        for row in rows
    )


def _survivor(mutant: Mutant, result: Result, judged: Judged) -> str:
    reasons = {s.key: f"{s.why}: {s.reason}" for s in judged.survivors}
    tests = f"{result.status}, {result.ran} of {result.concerned} tests"
    lines = [
        f"  {mutant.file}:{mutant.line} in {mutant.function or 'the module'} ({mutant.kind}; {tests})",
        f"    {mutant.before}",
        f"    -> {mutant.after}",
    ]
    return "\n".join([*lines, *([f"    {reasons[mutant.key]}"] if mutant.key in reasons else [])])
