"""Record a running script, from the end of one optimizer step to the end of a later one.

Unlike a replay, this restores nothing, because the script continues.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stablenum.diagnosis import Finding, Report
from stablenum.diagnosis.replay.findings import finding_of, refusal_of
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.ranks import is_received, made_here, own_first, sent_through
from stablenum.diagnosis.replay.trace import Value
from stablenum.diagnosis.replay.walk import Origin, first_causes
from stablenum_torch._diagnosis.replay.collectives import as_rank, local_of, own_rank
from stablenum_torch._diagnosis.replay.module_paths import ModulePaths
from stablenum_torch._diagnosis.replay.recorder import Recorder
from stablenum_torch._diagnosis.replay.snapshot import Snapshot
from stablenum_torch._diagnosis.replay.trial import with_trial
from stablenum_torch._diagnosis.watch.by_hand import unwrapped

__all__ = [
    "Window", "existing_modules", "names_by_id", "names_in_modules", "recorder_of", "roles_and_names",
]  # fmt: skip


class _KeepNothing(Snapshot):
    """A snapshot of nothing: what is recorded is not undone."""

    def __init__(self) -> None:
        """Make an empty snapshot; nothing is read."""

    def keep_tensor(self, tensor: Tensor) -> None:
        """Leave the tensor's gradient in place, because gradients may be accumulated."""

    def keep_memory(self, tensor: Tensor) -> None:
        """Keep no copy."""

    def keep_generator(self, generator: torch.Generator) -> None:
        """Keep no copy."""


class Window:
    """A recorder that runs until :meth:`close`. Compiled functions run eagerly during that time.

    Args:
        earlier: a window that has been closed, in which bad data may have been made.
        most: how many operations it records at most; None for no limit.
    """

    def __init__(self, earlier: Window | None = None, *, most: int | None = None) -> None:
        names = roles_and_names()
        self._parts = _with_parts(names)
        # Where the findings of reports began.
        self._origins: dict[tuple[object, ...], Origin] = {} if earlier is None else earlier._origins
        if earlier is None:
            self._recorder = recorder_of(names)
        else:
            self._recorder = earlier._recorder
            self._recorder.begin_again(names)
        self._recorder.most = most
        torch.compiler.set_stance("force_eager")
        self._recorder.__enter__()

    def close(self) -> None:
        """Stop recording."""
        self._recorder.__exit__(None, None, None)
        torch.compiler.set_stance("default")

    def report(self, bad: Sequence[Tensor], **evidence: Any) -> Report:
        """Return a report on where the values in ``bad``, which are not finite, come from."""
        return self._report([self._recorder.values.of(unwrapped(t)) for t in bad], evidence)

    def report_of_failed(self, **evidence: Any) -> Report | None:
        """Report on what a failed operation read, if that was not finite."""
        failed, trace = self._recorder.failure, self._recorder.trace
        read = [] if failed is None else [v for v in trace.inputs_of(failed.step) if not v.finite]
        return self._report(read, evidence) if read else None

    def report_of_refused(self, error: BaseException, **evidence: Any) -> Report | None:
        """Report on an operation that refused finite numbers, which ended the script."""
        failed = self._recorder.failure
        if failed is None or failed.error is not error:
            return None
        finding = refusal_of(self._recorder.trace, failed.step)
        return Report.of(Evidence(framework="torch", findings=(finding,), **evidence))

    def report_of_last(self, **evidence: Any) -> Report | None:
        """Report on the last computed value that is not finite."""
        values = reversed(self._recorder.trace.values)
        last = next((v for v in values if not v.finite and v.producer is not None), None)
        return self._report([last], evidence) if last is not None else None

    def report_of_sent(self) -> tuple[int, Report] | None:
        """Report on the first value that is not finite which this rank made and gave to a collective, with
        the index of the collective; None if it gave none."""
        trace = self._recorder.trace
        for step in self._recorder.sent:
            bad = made_here(trace, step)
            if bad:
                return step.index, self._report([trace.values[i] for i in bad], {})
        return None

    def with_spread(self, report: Report) -> Report:
        """Return a report of this window with the collectives through which the value has gone to other
        ranks since the report was made."""
        if not report.findings or report.evidence.other_rank:
            return report
        first, *others = report.findings
        origin = self._origins.get(_key(first))
        recorder = self._recorder
        spread = () if origin is None else sent_through(recorder.trace, recorder.sent, origin, first.place)
        if not spread:
            return report
        evidence = replace(report.evidence, findings=(replace(first, spread=spread), *others))
        return Report.of(evidence, notes=report.notes, seconds=report.seconds)

    @property
    def recorded(self) -> int:
        """The number of operations recorded so far."""
        return len(self._recorder.trace.steps)

    def _report(self, bad: Sequence[Value], evidence: dict[str, Any]) -> Report:
        recorder, rank = self._recorder, own_rank()
        origins = own_first(first_causes(recorder.trace, [v.id for v in bad]))
        steps = [None if o.step is None else o.step.index for o in origins]
        findings = tuple(
            finding_of(recorder.trace, o, wide_finite=None if i is None else recorder.wide.get(i))
            for o, i in zip(origins, steps, strict=True)
        )
        if rank is not None:
            findings = tuple(replace(f, shard=as_rank(rank), rank=rank) for f in findings)
            evidence = {"other_rank": bool(origins) and is_received(origins[0]), **evidence}
            self._origins.update({_key(f): o for f, o in zip(findings, origins, strict=True)})
        labels = next((recorder.labels[i] for i in steps if i in recorder.labels), "")
        found = Evidence(framework="torch", findings=findings, labels=labels, **evidence)
        first = origins[0].step if origins else None
        return Report.of(
            with_trial(found, None if first is None else recorder.kept.of_operation(recorder.trace, first))
        )


def _key(finding: Finding) -> tuple[object, ...]:
    return finding.operation, finding.phase, finding.kind, finding.place, finding.name


def recorder_of(names: dict[int, tuple[str, str]], kind: type[Recorder] = Recorder) -> Recorder:
    """Return a recorder of a running script, which keeps no copies.

    Args:
        names: id of a tensor -> (role, name).
        kind: the class of the recorder.
    """
    return kind(_KeepNothing(), names, ModulePaths(), existing_modules.__code__)


def roles_and_names() -> dict[int, tuple[str, str]]:
    """Return the roles and the names of the parameters and buffers of all existing modules, by id."""
    names: dict[int, tuple[str, str]] = {}
    # The outermost module, which has the longest names, comes last and overrides the others.
    for module in sorted(existing_modules(), key=lambda m: sum(1 for _ in m.modules())):
        names |= {id(b): ("buffer", name) for name, b in module.named_buffers()}
        names |= {id(p): ("parameter", name) for name, p in module.named_parameters()}
    return names


def _with_parts(names: dict[int, tuple[str, str]]) -> list[Tensor]:
    """Name this rank's parts of DTensors as these, and return the parts: an id is a name only as long as its
    tensor exists."""
    if own_rank() is None:
        return []
    parts = []
    for module in existing_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            part = local_of(tensor)
            if part is not tensor and id(tensor) in names:
                names[id(part)] = names[id(tensor)]
                parts.append(part)
    return parts


def names_in_modules(parameters: Sequence[Tensor]) -> tuple[str, ...]:
    """Return names of parameters in the outermost module that has them; parameters of no module are left
    out."""
    found = names_by_id(parameters)
    return tuple(name for p in parameters if (name := found.get(id(p), "")))


def names_by_id(parameters: Sequence[Tensor]) -> dict[int, str]:
    """Return id of a parameter -> its name in the outermost module that has it."""
    wanted = {id(p) for p in parameters}
    found: dict[int, str] = {}
    for module in existing_modules() if wanted else ():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in wanted and len(name) > len(found.get(id(parameter), "")):
                found[id(parameter)] = name
    return found


def existing_modules() -> list[nn.Module]:
    """Return all existing modules, found without isinstance, which would run the code of proxy objects."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
