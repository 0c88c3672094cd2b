"""The loop: it hands out batches, looks for symptoms between two steps, and goes back when there is one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stablenum._support.settings_checks import check_int
from stablenum.errors import RecoveryStopped, bad_type
from stablenum.recovery.hooks import Easing, Hooks
from stablenum.recovery.identifiers import Identifiers
from stablenum.recovery.ledger import Ledger, RecoveryEvent
from stablenum.recovery.ledger_file import events_in, read_file, write_events
from stablenum.recovery.logged import Why, of_event, of_stop
from stablenum.recovery.pairing import Pairing
from stablenum.recovery.plan import Rewind, Stop, plan
from stablenum.recovery.positions import position_of
from stablenum.recovery.reports import stopped_report
from stablenum.recovery.settings import RecoveryPolicy, Response
from stablenum.recovery.snapshots import Snapshot, Snapshots
from stablenum.recovery.symptoms import Symptom, SymptomCode, Watch, first_of

__all__ = ["RecoveryLoop"]

_logger = logging.getLogger("stablenum")
_AUDITED = (SymptomCode.POISONED_MOMENTS, SymptomCode.RUNAWAY_PARAMETER)  # looked for at snapshots


class RecoveryLoop:
    """Runs the steps of a training that can go back.

    Args:
        policy: the settings.
        hooks: the adapter's.
        data: see :func:`stablenum.recovery.positions.position_of`.
        folder: where the ledger is kept; None for nowhere. Only the first of several ranks has one.
        predicate: returns a clause if the user sees a symptom, None otherwise; called at each check.
        identify: returns a batch's identifier, plain values for JSON; its place in the data by default.
        explain: is given the batch of the first of several skipped steps, and returns what it finds.
    """

    def __init__(
        self,
        policy: RecoveryPolicy,
        hooks: Hooks,
        data: Any,
        *,
        folder: Path | None = None,
        predicate: Callable[[], str | None] | None = None,
        identify: Callable[[Any], Any] | None = None,
        explain: Callable[[Any], object] | None = None,
    ) -> None:
        self.policy, self._hooks, self._folder = policy, hooks, folder
        self._position = position_of(data, hooks.generators)
        self._predicate, self._explain = predicate, explain
        self._identifiers = Identifiers(identify, keep_batches=explain is not None)
        self._pairing = Pairing()
        self._snapshots = Snapshots(policy.keep, policy.good_after)
        self._ledger = Ledger()
        self._watch = Watch(policy)
        self._reported: list[Symptom] = []
        self.step = 0
        self._handed_out = False  # whether there is a batch whose step has not been counted
        self._checked = self._audited = self._evaluated = 0  # the last steps after which all was well
        self._easing: Easing | None = None

    @property
    def events(self) -> Sequence[RecoveryEvent]:
        """The rewinds so far, oldest first."""
        return self._ledger.events

    def fields(self) -> dict[str, object]:
        """Return where the run is and its main settings, for the line that shows a recovery."""
        shown = ("budget", "every", "keep", "good_after", "check_every")
        settings = {name: getattr(self.policy, name) for name in shown}
        return {"step": self.step, "rewinds": len(self.events), **settings}

    def history(self) -> list[dict[str, Any]]:
        """Return the guard's history with the identifier of each step's batch; None where it is not known.

        If the guard gets sums of the gradients of several batches, ``batch`` is the list of these batches.
        """
        rows = self._hooks.rows()
        if self._handed_out:
            self._pairing.count(self.step + 1, self._hooks.counts())  # the step may have been made
        steps = self._pairing.steps(rows, self.step, under_way=self._handed_out)
        return [{**row, "batch": self._batch_of(steps.get(row["step"]))} for row in rows]

    def _batch_of(self, steps: tuple[int, ...] | None) -> Any:
        if steps is None or not self._pairing.of_sums:
            return None if steps is None else self._identifiers.of(steps[0])
        return [self._identifiers.of(step) for step in steps]

    # --- what the user says --------------------------------------------------------------------

    def report(self, detail: str, origin: int | None = None) -> None:
        """Report a symptom that only the user sees; it is answered at the next check.

        Raises:
            TypeError: ``detail`` is not a string.
            ValueError: ``origin`` is not a whole number from 1.
        """
        if not isinstance(detail, str):
            raise bad_type("text", "a string", detail)
        since = self._checked + 1 if origin is None else check_int("origin", origin, at_least=1)
        self._reported.append(Symptom(SymptomCode.REPORTED, self.step, since, detail))

    def evaluated(self, *, finite: bool) -> None:
        """Take in whether the result of an evaluation is finite."""
        if finite:
            self._evaluated = self.step
        else:
            detail, since = "the result of an evaluation is not finite", self._evaluated + 1
            self._reported.append(Symptom(SymptomCode.NONFINITE_EVALUATION, self.step, since, detail))

    # --- the loop ------------------------------------------------------------------------------

    def batches(self, steps: int) -> Iterator[Any]:
        """Yield batches until ``steps`` steps have been made; each must be used for one step.

        Raises:
            ValueError: ``steps`` is not a whole number from 0; or a run begins that has no good state.
            RecoveryStopped: the responses or the budget are used up.
        """
        check_int("steps", steps, at_least=0)
        if not len(self._snapshots):
            self._hooks.check_beginning()
        return self._batches(steps)

    def _batches(self, steps: int) -> Iterator[Any]:
        if not len(self._snapshots):
            if self.policy.audit:
                self._watch.look(self._hooks.measures())
            self._pairing.begin(self._hooks.rows(), self.step, self._hooks.counts())
            self._take_snapshot()
        if self._handed_out:  # the loop before was left with ``break``
            self._after_step(steps)
        while self.step < steps:
            place, batch = self._position.next()
            self._identifiers.note(self.step + 1, place, batch)
            self._handed_out = True
            yield batch
            self._after_step(steps)

    def _after_step(self, steps: int) -> None:
        self._handed_out = False
        self.step += 1
        self._pairing.count(self.step, self._hooks.counts())
        if self.policy.buffer_threshold is not None:
            self._hooks.note_buffers(self.step)
        last = self.step == steps
        if self._easing is not None and self.step >= self._easing.until:
            self._ease(None)
        at_snapshot = self.step % self.policy.every == 0
        if not (last or at_snapshot or self.step % self.policy.check_every == 0):
            return
        audit = self.policy.audit and (at_snapshot or last)
        symptom = first_of(self._hooks.agree(self._symptoms(audit=audit)))
        self._reported.clear()
        if symptom is not None:
            self._answer(symptom)
            return
        self._checked = self.step
        self._audited = self.step if audit else self._audited
        if at_snapshot:
            self._take_snapshot()

    def _symptoms(self, *, audit: bool) -> list[Symptom]:
        rows = self._hooks.rows()
        self._pairing.look(rows, self.step)
        found = self._watch.read(rows, self.step)
        found += self._watch.look_at_buffers(self._hooks.noted_buffers(), self.step)
        findings = self._hooks.findings()
        if audit and not findings:
            findings += self._watch.look(self._hooks.measures())
        for code, detail, names in findings:
            since = self._audited if code in _AUDITED else self._checked
            found.append(Symptom(code, self.step, since + 1, detail, names))
        seen = None if self._predicate is None else self._predicate()
        if seen is not None:
            self.report(str(seen))
        return found + self._reported

    # --- going back ----------------------------------------------------------------------------

    def _answer(self, symptom: Symptom) -> None:
        move = plan(symptom, self._snapshots, self._ledger, self.policy)
        if isinstance(move, Stop):
            self._stop(symptom, move)
        else:
            self._rewind(symptom, move)

    def _rewind(self, symptom: Symptom, move: Rewind) -> None:
        snapshot, response = move.snapshot, self._hooks.possible(move.response)
        usual = self._watch.usual_grad_norm
        # A usual norm of 0 has no multiple to clip at.
        clip_at = response.clip * usual if response.clip is not None and usual else None
        left_out = self._left_out(snapshot, response)
        event = RecoveryEvent(
            symptom=symptom,
            attempt=move.attempt,
            to_step=snapshot.step,
            response=response,
            left_out=left_out,
            suspects=self._identifiers.range(symptom.origin, symptom.step),
            clip_at=clip_at,
        )
        self._snapshots.confirm_before(symptom.origin)
        # First, so that whatever fails from here on is in the budget of a restart.
        self._ledger.events.append(event)
        write_events(self._folder, self.events)
        self._go_back_to(snapshot, of_event(event))
        if response.skip_data:
            # Whoever comes back here again leaves the same data out.
            snapshot = dataclasses.replace(snapshot, position=self._position.state())
            self._snapshots.add(snapshot)
        else:
            self._position.go_to(snapshot.position)
        if response.eases:
            self._ease(Easing(response.rate, clip_at, response.wider, event.eased_until))
        # A restart goes on from here, as carefully as this run, and with what it has learnt.
        self._save(dataclasses.replace(snapshot, course=self._course()))
        _logger.warning("Recovery at %s.", event)

    def _left_out(self, snapshot: Snapshot, response: Response) -> tuple[Any, Any] | None:
        """Read on past the batches that are left out, and return the first and the last of them."""
        if not response.skip_data:
            return None
        first, last = self._identifiers.of(snapshot.step + 1), self._identifiers.of(self.step)
        for _ in range(response.skip_further):
            last = self._identifiers.identified(*self._position.next())
        return first, last

    def _go_back_to(self, snapshot: Snapshot, why: Why | None = None) -> None:
        self._handed_out = False
        self._ease(None)
        self._put_back(snapshot, why)
        self._snapshots.drop_from(snapshot.step + 1)
        self._pairing.go_back_to(snapshot.step)
        self._set_course(snapshot.course)
        self.step = snapshot.step

    def _put_back(self, snapshot: Snapshot, why: Why | None) -> None:
        """Put the state back; where there is a reason, it is in the log before anything follows."""
        before = [] if why is None else self._hooks.rows()
        self._hooks.restore(snapshot.state)
        self._hooks.noted_buffers()  # of steps that were not made
        if why is not None:
            self._hooks.log(why, before)

    def _stop(self, symptom: Symptom, move: Stop) -> None:
        verdict = self._verdict(symptom)
        suspects = self._identifiers.range(symptom.origin, symptom.step)
        self._go_back_to(move.snapshot, of_stop(symptom, move))
        self._position.go_to(move.snapshot.position)
        self._save(move.snapshot)  # what is newer there is not known to be good
        write_events(self._folder, self.events)
        report = stopped_report(
            symptom, move, self.events, suspects=suspects, verdict=verdict, folder=self._folder
        )
        _logger.error(report)
        raise RecoveryStopped(report, step=move.snapshot.step)

    def _verdict(self, symptom: Symptom) -> str | None:
        """Return what ``explain`` says of the first of several skipped steps: nothing has moved since."""
        if self._explain is None or symptom.code is not SymptomCode.SKIPS_IN_A_ROW:
            return None
        kept = self._identifiers.batch_of(symptom.origin)
        return None if kept is None else str(self._explain(kept[0]))

    def _ease(self, easing: Easing | None) -> None:
        if easing != self._easing:
            self._hooks.ease(easing)
            self._easing = easing

    # --- snapshots -----------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        state = self._hooks.capture()
        snapshot = Snapshot(self.step, state, self._position.state(), self._course())
        self._snapshots.add(snapshot)
        self._save(snapshot)

    def _save(self, snapshot: Snapshot) -> None:
        self._hooks.save(snapshot, self._snapshots.steps())

    def _course(self) -> dict[str, Any]:
        return {
            "watch": self._watch.state_dict(),
            "checked": self._checked,
            "audited": self._audited,
            "evaluated": self._evaluated,
            **self._attempt(),
        }

    def _attempt(self) -> dict[str, Any]:
        easing = None if self._easing is None else list(self._easing)
        return {
            "easing": easing,
            "rewinds": len(self._ledger.events),
            "confirmed": self._snapshots.confirmed,
        }

    def _set_course(self, course: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(course["watch"])
        self._checked, self._audited = course["checked"], course["audited"]
        self._evaluated = course["evaluated"]
        self._ease(None if course["easing"] is None else Easing(*course["easing"]))

    # --- on the disk ---------------------------------------------------------------------------

    def resume(self) -> int:
        """Go on from the newest whole snapshot on the disk, with the budget that is left there.

        Returns:
            The step of the snapshot; 0 if there is none, and nothing is changed.

        Raises:
            CheckpointError: there are snapshots, but none is whole, or what the file says of the rewinds so
                far cannot be read.
        """
        snapshots = self._hooks.load()
        if not snapshots:
            return 0
        found = self._hooks.shared(
            read_file(self._folder)
        )  # ranks with other budgets would not stop together
        if found is not None:
            self._ledger.events = events_in(*found)
        self._snapshots.confirmed = snapshots[-1].course["confirmed"]
        for snapshot in snapshots:
            self._snapshots.add(snapshot)
        self._go_back_to(snapshots[-1])
        self._position.go_to(snapshots[-1].position)
        self._pairing.begin(self._hooks.rows(), self.step, self._hooks.counts())
        return self.step
