"""Watch an unmodified PyTorch script: losses, gradients and parameters, around every optimizer step.

Only the command ``stablenum explain`` installs this. Every check makes the host wait.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stablenum.diagnosis import Report
from stablenum.diagnosis.replay.descent import Descent
from stablenum.diagnosis.replay.growth import Growth
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.source_files import users_frame
from stablenum.diagnosis.watch.courses import GOOD, MOST_IN_A_ROW
from stablenum.diagnosis.watch.frames import transparent
from stablenum.diagnosis.watch.plan import Failure, Sent
from stablenum.diagnosis.watch.script_errors import last_line
from stablenum.diagnosis.watch.session import FAILED, Doubt, Session
from stablenum.errors import NonFiniteError
from stablenum_torch._diagnosis.audit import setting_problems, state_problems
from stablenum_torch._diagnosis.replay.collectives import local_of, own_rank
from stablenum_torch._diagnosis.replay.source_lines import is_user_file
from stablenum_torch._diagnosis.replay.tensor_memory import is_freed
from stablenum_torch._diagnosis.watch.by_hand import (
    REPAIRS,
    Gradients,
    Graph,
    finite,
    graph_of,
    item,
    tensors_of,
    unwrapped,
)
from stablenum_torch._diagnosis.watch.guarded_steps import Found, GuardedSteps
from stablenum_torch._diagnosis.watch.optimizers import StepFrames, largest, parameters_of, rate_of, will_skip
from stablenum_torch._diagnosis.watch.poisoned import Buffers
from stablenum_torch._diagnosis.watch.rates import Rates
from stablenum_torch._diagnosis.watch.script_errors import bad_in_frames, is_about_a_closure, is_about_numbers
from stablenum_torch._diagnosis.watch.script_recorder import Window, names_by_id, names_in_modules
from stablenum_torch._diagnosis.watch.unseen import Unseen, never_compiled, outside_graphs
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["watch"]

_Line: TypeAlias = tuple[str, int]  # file and number
# So many operations before the first step are recorded: a few seconds' worth.
MOST_PREPARED = 20_000


def watch(session: Session) -> None:
    """Watch everything that this process trains from now on."""
    torch.manual_seed(session.plan.seed + session.plan.rank)
    watcher = _Watcher(session)
    register_optimizer_step_pre_hook(watcher.before_step)
    register_optimizer_step_post_hook(watcher.after_step)
    watcher.wrap(torch.autograd, "backward", watcher.before_backward, watcher.after_backward)
    watcher.wrap(torch.autograd, "grad", watcher.before_grad, watcher.after_grad)
    watcher.wrap(torch.amp.GradScaler, "scale", watcher.before_scale)
    watcher.wrap(GuardedOptimizer, "scale", watcher.before_scale)
    # A script that checks its loss and stops never reaches the backward pass.
    for name in ("item", "__float__", "isnan", "isfinite", "isinf"):
        watcher.wrap(torch.Tensor, name, watcher.before_look, concerns=watcher.may_be_a_loss)
    for name in ("isnan", "isfinite", "isinf"):
        watcher.wrap(torch, name, watcher.before_look, concerns=watcher.may_be_a_loss)
    session.on_error.append(watcher.on_error)
    session.on_verdict.append(watcher.note_sent)
    watcher.open_window()


@dataclass
class _Broken:
    """A step that failed.

    Attributes:
        optimizer: a weak reference to what took it.
        doubt: the failure.
        others: how many steps other optimizers have taken since.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    doubt: Doubt
    others: int = 0


class _Watcher:
    """Counts optimizer steps, and reports the first value that is not finite to the session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.outcome = session.outcome
        self.unseen = Unseen(session, self.close_window)
        self.look, self.wrap = self.unseen.look, self.unseen.wrap
        self.stepping = StepFrames()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.bad_from_the_start: set[int] = set()  # parameters
        self.window: Window | None = None
        self.preparation: Window | None = None  # what the script does before it trains
        self.opened = 0  # the number of steps completed when the window was opened
        self.windows: list[tuple[int, int]] = []  # where each window begins: operations and steps before it
        self.state: tuple[str, ...] = ()  # what is wrong with the optimizer's state
        self.settings: tuple[str, ...] = ()  # and with its settings
        self.reproduced = True if session.plan.again else None
        self.growth, self.descent = Growth(), Descent()
        self.buffers, self.rates = Buffers(), Rates()
        self.by_closure = False  # whether the outermost step that runs computes its own gradients
        self.guarded = GuardedSteps(session)
        self.last_stepped: set[int] = set()  # the ids of the parameters of the last step
        self._named: dict[int, str] = {}
        self.scaled = False  # losses are scaled, and steps that overflow are skipped
        self.by_hand: list[Gradients] = []  # not finite, and not an optimizer's; and losses
        self.bad_loss: Doubt | None = None  # of the gradients that are being computed
        self.bad_root = False  # the backward pass that runs began at a bad loss
        self.finite_anyway = False  # as are the gradients of the bad loss
        self.repairs_watched = False
        self.bad_losses = 0  # in a row
        self.last_doubt: tuple[Gradients, Doubt] | None = None  # of a loss
        self.doubted_loss = False  # since the last step
        self.broken: list[_Broken] = []
        self.recovered = False  # a good loss came after a bad one
        self.graph = Graph([], set())  # of the last backward pass
        self.looked: dict[int, _Line] = {}  # where the script read tensors since the last step, by node
        self.loss_lines: set[_Line] = set()  # where the script reads losses

    @property
    def step(self) -> int:
        """The number of the optimizer step that is being prepared or taken, from 0."""
        return self.outcome.steps

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have taken a step, and still exist."""
        return [found for known in self._optimizers if (found := known()) is not None]

    def open_window(self) -> None:
        """Start recording if the next step is to be recorded, or the preparations for the first."""
        begin = self.session.plan.record_from
        if begin is not None and (self.step >= begin or self.preparation is None):
            most = None if self.step >= begin else MOST_PREPARED
            window = self.session.sheltered(Window, self.preparation, most=most)
            if window is not FAILED:
                self.preparation = self.preparation or window
                self.window, self.opened = window, self.outcome.steps
                self.windows.append((window.recorded, self.outcome.steps))
                if self.session.plan.settings and self.step >= begin:
                    self.rates.begin(self.optimizers)
        self.unseen.recording = self.window is not None

    def note_sent(self) -> None:
        """Note how a bad value went from this rank to others, and what this rank gave them although nothing
        fails here: with sharded parameters, the ranks that make a bad number may not be those that own the
        parameters it reaches."""
        window = self.preparation
        if window is None or own_rank() is None:
            return
        if self.outcome.report is not None:
            self.outcome.report = window.with_spread(Report.from_dict(self.outcome.report)).to_dict()
        found = window.report_of_sent()
        if found is not None:
            at, report = found
            step = max((step for begin, step in self.windows if begin <= at), default=0)
            self.outcome.sent = Sent(step=step, report=window.with_spread(report).to_dict())

    def close_window(self) -> None:
        """Stop recording."""
        if self.window is not None:
            self.rates.end()
            self.session.sheltered(self.window.close)
            self.window = None
        self.unseen.recording = False

    @outside_graphs
    @transparent
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.session.over:
            self.session.leave()
        by_closure = isinstance(optimizer, GuardedOptimizer) and _has_closure(args, kwargs)
        self.look(self.check_gradients, optimizer, sys._getframe(1), by_closure)

    @outside_graphs
    @transparent
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.session.over or self.stepping.ends_nested(sys._getframe(1)):
            return
        if isinstance(optimizer, GuardedOptimizer):
            self.look(self.end_guarded_step, optimizer)
        self.look(self.check_parameters, optimizer)
        for broken in self.broken:
            broken.others += broken.optimizer() is not optimizer
        self.outcome.steps += 1
        self.looked.clear()
        # With several optimizers, a step's gradients may be older than the previous step.
        if self.window is not None and self.outcome.steps - self.opened >= len(self.optimizers):
            self.close_window()
        if self.window is None:
            self.open_window()

    def check_gradients(self, optimizer: torch.optim.Optimizer, frame: FrameType, by_closure: bool) -> None:
        """Check what an optimizer is about to use, unless it is a part of another one.

        A closure computes the gradients inside the step: those that are there now are of the step before.
        """
        if self.stepping.begins_nested(frame):
            return
        self.by_closure = by_closure
        own, known = parameters_of(optimizer), self.optimizers
        if not any(optimizer is other for other in known):
            # Bounds and masks may be parameters, too.
            self.bad_from_the_start |= {id(p) for p in own if not finite(p)}
            self._optimizers.append(weakref.ref(optimizer))
            if not self.doubted_loss:
                self.buffers.note_start()
            self.outcome.optimizers = len(known) + 1
        self.last_stepped = set(map(id, own))
        if self.doubted_loss:
            self.doubt_buffers()
            self.doubted_loss = False
        if (broken := self.broken_by(optimizer)) is not None:
            self.session.found(broken.doubt.failure, broken.doubt.report)
        bad = self.note_growth(optimizer)
        if self.window is not None:
            self.state = state_problems(optimizer)
        if not (will_skip(optimizer) or self.by_closure):
            self.judge_gradients(optimizer, bad)

    def judge_gradients(self, optimizer: torch.optim.Optimizer, bad: Sequence[torch.Tensor]) -> None:
        """Doubt a step with parameters whose gradients are bad, or were made good by hand."""
        used = self.finite_anyway and any(p.grad is not None for p in parameters_of(optimizer))
        if not (bad or used):
            self.note_good_gradients()
        elif isinstance(optimizer, GuardedOptimizer):
            self.guarded.expect_skip(optimizer, lambda: self.found_in_gradients(bad))
            self.bad_loss, self.finite_anyway = None, False
        else:
            self.end(optimizer, *self.found_in_gradients(bad))

    def found_in_gradients(self, bad: Sequence[torch.Tensor]) -> Found:
        """Return the failure of gradients that an optimizer is about to use, or that of their loss."""
        if self.bad_loss is not None:
            return self.bad_loss.failure, self.bad_loss.report
        return self.described("gradient", bad, [p.grad for p in bad])

    def end_guarded_step(self, optimizer: GuardedOptimizer) -> None:
        """See whether a guard has skipped a bad step. One that it has applied all the same is a failure."""
        if self.by_closure:
            own = [p for p in parameters_of(optimizer) if p.grad is not None]
            self.judge_gradients(optimizer, _not_finite(own, largest([p.grad for p in own])))
        applied = self.guarded.ended(optimizer)
        if applied is not None and self.broken_by(optimizer) is None:
            self.end(optimizer, *applied)

    def broken_by(self, optimizer: torch.optim.Optimizer) -> _Broken | None:
        """Return the step of the optimizer that failed; None if none did."""
        return next((b for b in self.broken if b.optimizer() is optimizer), None)

    def end(self, optimizer: torch.optim.Optimizer, failure: Failure, report: Report | None = None) -> None:
        """End the script when the optimizer takes another step. A script may give a model up that it has
        ruined, as in a test of learning rates, and train another one."""
        broken = _Broken(weakref.ref(optimizer), Doubt(failure, report, lambda: self.given_up(broken)))
        self.broken.append(broken)
        self.session.doubt(broken.doubt)

    def given_up(self, broken: _Broken) -> bool:
        """Return whether a script has ended well without a model that it ruined."""
        return self.outcome.exit_code == 0 and broken.others >= GOOD

    def check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Check what an optimizer has made."""
        if self.broken_by(optimizer) is not None:
            return
        own = parameters_of(optimizer)
        bad = [p for p in _not_finite(own, largest(own)) if id(p) not in self.bad_from_the_start]
        if bad:
            self.settings = setting_problems(optimizer)
            self.end(optimizer, *self.described("setting" if self.settings else "parameter", bad, bad))

    def note_growth(self, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
        """Note how large the parameters are, and the gradients if an optimizer is about to use them; return
        the parameters whose gradients are not finite."""
        own = [p for o in self.optimizers for p in parameters_of(o)]
        given = [p for p in parameters_of(optimizer) if p.grad is not None] if optimizer else []
        sizes = largest([*own, *(p.grad for p in given)])
        gradients = sizes[len(own) :]
        self.growth.note(
            self.outcome.steps,
            dict(zip(self.names_of(own), sizes, strict=False)),
            gradient=max(gradients, default=None),
            rate=rate_of(optimizer),
        )
        return _not_finite(given, gradients)

    def note_loss(self, roots: Sequence[torch.Tensor]) -> None:
        """Note the loss from which a backward pass starts, if it is one number that can be read."""
        roots = [local_of(t) for t in roots]
        known = [t.detach() for t in roots if t.numel() == 1 and t.is_floating_point() and not t.is_meta]
        if len(roots) == len(known) == 1 and known[0].layout is torch.strided:
            self.descent.note(_line(), self.step, item(known[0]))

    def blown_up(self) -> dict[str, Any]:
        """Return what is known of parameters and of losses that have grown out of proportion."""
        return {"exploded": self.growth.explosion(), "unbounded": self.descent.runaway()}

    def names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return a name for each parameter; modules are searched for them once."""
        if {id(p) for p in parameters} != self._named.keys():
            known = names_by_id(parameters)
            self._named = {id(p): known.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)}
        return [self._named[id(p)] for p in parameters]

    def before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Graph:
        self.check_roots(tensors)
        return self.graph

    def before_grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], bool]:
        self.check_roots(outputs)
        return tensors_of(inputs), bool(kwargs.get("create_graph") or args[2:3] == (True,))

    def check_roots(self, given: Any) -> None:
        """Check what a backward pass starts from, and note the lines that have read the losses among it."""
        tensors = tensors_of(given)
        bad = [t for t in tensors if not finite(t)]
        roots = [given] if isinstance(given, torch.Tensor) else given
        self.graph = graph_of(t for t in roots if isinstance(t, torch.Tensor))
        self.loss_lines.update(line for node, line in self.looked.items() if node in self.graph.numbers)
        if not self.scaled:
            self.note_loss(tensors)
        # A scaled loss that overflows is left to the scaler, unless the loss itself was bad.
        if bad and self.scaled and not self.guarded.loss_known and any(t.isnan().any() for t in bad):
            self.session.found(*self.described("loss", [], bad))
        self.bad_root = bool(bad) and not self.scaled
        if self.bad_root:
            stepped = self.stepped()
            own = any(id(leaf) in stepped for leaf in self.graph.leaves)
            leaves = [] if own else _copies(self.graph.leaves)
            self.bad_loss = self.doubt_loss(Gradients(bad, leaves), final=False)

    def after_backward(self, graph: Graph, _: Any) -> None:
        """Check the gradients of what no optimizer has stepped with."""
        if self.scaled:
            return
        stepped = self.stepped()
        own = [p for p in graph.leaves if id(p) not in stepped and p.grad is not None]
        bad = [p for p in own if not finite(p.grad)]
        if bad:
            self.doubt_gradients(bad, names_in_modules(bad), Gradients([p.grad for p in bad], _copies(bad)))
        elif self.by_hand and all(p.grad is None or finite(p.grad) for p in graph.leaves):
            if self.bad_root:  # nothing is left to repair, but the loss was bad all the same
                self.finite_anyway = True
            else:
                self.note_good_gradients()

    def after_grad(self, called: tuple[list[Any], bool], result: Any) -> None:
        """Check the results of ``torch.autograd.grad``."""
        if self.scaled:
            return
        inputs, differentiable = called
        results = [unwrapped(t) if isinstance(t, torch.Tensor) else None for t in _several(result)]
        pairs = list(zip(inputs, results, strict=False))
        bad = [(i, p, g) for i, (p, g) in enumerate(pairs) if g is not None and not finite(g)]
        if not bad:
            self.note_good_gradients()
            return
        parameters = [p for _, p, _ in bad]
        names = names_in_modules(parameters) or tuple(f"result {i} of torch.autograd.grad" for i, _, _ in bad)
        leaves = _copies(p for p in parameters if p.is_leaf)
        self.doubt_gradients(parameters, names, Gradients([g for _, _, g in bad], leaves, differentiable))

    def stepped(self) -> set[int]:
        """Return the ids of the parameters that an optimizer has stepped with."""
        return {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}

    def doubt_gradients(
        self, of: Sequence[torch.Tensor], names: tuple[str, ...], gradients: Gradients
    ) -> None:
        """Doubt gradients until the script has ended, and see whether it repairs them."""
        self.watch_for_repairs()
        self.by_hand.append(gradients)
        self.doubt(
            Failure(step=self.step, what="by hand", names=names),
            gradients.tensors,
            lambda: gradients.coped_with(lambda leaf: id(leaf) in self.stepped()),
        )

    def watch_for_repairs(self) -> None:
        if self.repairs_watched:
            return
        self.repairs_watched = True
        for name in REPAIRS:
            self.wrap(torch.Tensor, name, self.before_repair)
            if hasattr(torch, name):
                self.wrap(torch, name, self.before_repair)

    def note_good_gradients(self) -> None:
        for gradients in self.by_hand:
            gradients.good_since = True
        self.recovered = self.recovered or self.bad_losses > 0
        self.bad_losses, self.bad_loss, self.finite_anyway = 0, None, False
        self.by_hand = [g for g in self.by_hand if not g.tested]  # nothing can change for the others

    def before_repair(self, *args: Any, **kwargs: Any) -> None:
        for gradients in self.by_hand:
            gradients.repaired |= any(gradients.hold(x) for x in (*args, *kwargs.values()))

    def before_scale(self, scaler: Any, outputs: Any = ()) -> None:
        guards = isinstance(scaler, GuardedOptimizer)
        if not (scaler.scales_loss if guards else scaler.is_enabled()):
            return
        self.scaled = True
        bad = [t for t in tensors_of(outputs) if not finite(t)]
        if bad and guards:
            self.guarded.expect_skip(scaler, lambda: self.described("loss", [], bad), known=True)
        elif bad:
            self.session.found(*self.described("loss", [], bad))

    @never_compiled
    def may_be_a_loss(self, tensor: Any = None, *args: Any, **kwargs: Any) -> bool:
        """Return whether the script may read a loss. An optimizer reads its own numbers at every step: plain
        tensors without a graph, which can be seen without a look where no mode of the script would notice."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or torch._C._len_torch_function_stack() or self.by_hand:
            return True
        return tensor.grad_fn is not None

    def before_look(self, *args: Any, **kwargs: Any) -> None:
        """Check a tensor only if training could minimise it: a single number with a gradient."""
        tensor = args[0] if args else next(iter(kwargs.values()), None)
        for gradients in self.by_hand:
            gradients.tested |= gradients.hold(tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.grad_fn is None:
            return
        line, node = _line(), tensor.grad_fn._sequence_nr()
        if not finite(tensor):
            self.doubt_look(line, unwrapped(tensor))
        elif node in self.graph.numbers:
            self.loss_lines.add(line)
        else:
            self.looked[node] = line

    def doubt_look(self, line: _Line, tensor: torch.Tensor) -> None:
        """Take a number for the loss where the script has read losses; elsewhere it may be a metric."""
        # What the script reads and then leaves alone has done no harm if it has a good loss afterwards.
        self.doubt_loss(Gradients([tensor], [], tested=True), final=line not in self.loss_lines)

    def doubt_loss(self, loss: Gradients, *, final: bool) -> Doubt:
        """Doubt a loss until a later step, or other good gradients, show that the script copes with it.

        Args:
            loss: the loss, and what its gradients change.
            final: whether the script may well end with such a number, because it may be a metric.
        """
        same = self.last_doubt
        if same is not None and same[0].hold(loss.tensors[0]):
            return same[1]
        steps = self.outcome.steps

        def settled() -> bool:
            """Return whether training went on, or ended well, without this number."""
            outcome = self.outcome
            if outcome.steps > steps or loss.coped_with(lambda leaf: id(leaf) in self.stepped()):
                return True
            return outcome.exit_code == 0 and (self.recovered or (final and outcome.steps > 0))

        self.by_hand.append(loss)
        self.bad_losses += not final
        doubt = self.doubt(Failure(step=self.step, what="loss"), loss.tensors, settled)
        self.last_doubt = loss, doubt
        self.doubted_loss = True
        self.doubt_buffers()
        if self.bad_losses > MOST_IN_A_ROW:
            self.session.give_up(doubt)
        return doubt

    def doubt_buffers(self) -> None:
        """Doubt the buffers that a bad loss has left NaN: leaving out its step does not undo that."""
        found = [] if self.broken else self.buffers.poisoned(self.stepped())
        if not found:
            return
        self.buffers.searches = 0  # what follows comes of this
        steps = self.outcome.steps

        def settled() -> bool:
            """Return whether they were put back, or their modules given up."""
            left = [b for b in found if b.still]
            return not left or (
                self.outcome.steps > steps and not any(b.trained(self.last_stepped) for b in left)
            )

        failure = Failure(step=self.step, what="buffer", names=tuple(b.name for b in found))
        doubt = self.doubt(failure, [b.tensor for b in found], settled)
        if self.session.plan.again and doubt.report is not None:  # an earlier run has shown that they stay so
            self.session.found(failure, doubt.report)

    def doubt(self, failure: Failure, bad: Sequence[torch.Tensor], settled: Callable[[], bool]) -> Doubt:
        """Keep a failure that counts only if it is not settled when the script has ended."""
        report = None
        if self.window is not None:
            known: dict[str, Any] = {"bad_gradients": failure.names} if failure.what == "by hand" else {}
            if failure.what == "loss":
                self.note_growth()
                known |= self.blown_up()
            if failure.what == "buffer":
                known["poisoned"] = failure.names
            known["loss_finite"] = failure.what not in ("loss", "buffer")
            report = self.explained(bad, known)
        doubt = Doubt(failure, report, settled)
        self.session.doubt(doubt)
        return doubt

    def on_error(self, error: BaseException) -> None:
        """Handle a script that fails with a message about NaN or inf, from a library's own check, or because
        its closure returns nothing."""
        if is_about_a_closure(error):
            self.outcome.error += (
                "; the closure given to the optimizer's step returns None: end it with `return loss`"
            )
            return
        self.look(self.explain_error, error)

    def explain_error(self, error: BaseException) -> None:
        # The error comes of a step that failed, or of the steps that a guard has skipped.
        if self.broken or (self.guarded.unsettled and isinstance(error, NonFiniteError)):
            return
        read = bad_in_frames(error)
        if not is_about_numbers(error, read):
            return
        self.outcome.failure = Failure(step=self.step, what="error", names=(type(error).__name__,))
        if self.window is None:
            return
        known = {"loss_finite": False, "reproduced": self.reproduced}
        report = self.window.report_of_failed(**known)
        if report is None and not read:
            report = self.window.report_of_refused(error, **known)
        if report is None:
            report = self.window.report(read, **known) if read else self.window.report_of_last(**known)
        self.outcome.report = None if report is None else report.to_dict()

    def described(self, what: str, parameters: Sequence[torch.Tensor], bad: Sequence[Any]) -> Found:
        """Return a failure, with its explanation if the step was recorded."""
        names = names_in_modules(parameters)
        failure = Failure(step=self.step, what=what, names=self.settings if what == "setting" else names)
        if self.window is None:
            return failure, None
        known: dict[str, Any] = {"loss_finite": what != "loss"}
        known |= {"gradient": {"bad_gradients": names}, "loss": {}}.get(what, {"bad_updates": names})
        if what in ("parameter", "setting"):
            known |= {"state": self.state, "settings": self.settings}
        else:
            self.note_growth()
            known |= self.blown_up()
        return failure, self.explained(bad, known)

    def explained(self, bad: Sequence[Any], known: dict[str, Any]) -> Report:
        """Return the report on values in the recorded step."""
        assert self.window is not None
        known = {"reproduced": self.reproduced, **known}
        try:
            return self.rates.with_line(self.window.report(bad, **known))
        except Exception as error:  # noqa: BLE001  the failure itself is reported all the same
            why = f"what was recorded could not be read: {last_line(error)}"
            return Report.of(Evidence(framework="torch", unreplayed=why, **known))


def _not_finite(tensors: Sequence[torch.Tensor], sizes: Sequence[float]) -> list[torch.Tensor]:
    return [t for t, size in zip(tensors, sizes, strict=True) if not math.isfinite(size)]


def _several(result: Any) -> Sequence[Any]:
    return [result] if isinstance(result, torch.Tensor) else result


def _copies(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor with a copy of its value, except those whose memory was given back."""
    return [(t, t.detach().clone()) for t in tensors if not is_freed(unwrapped(t))]


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(callable(given) for given in (*args, kwargs.get("closure")))


def _line() -> _Line:
    """Return the user's line that is running."""
    frame = users_frame(is_user_file)
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
