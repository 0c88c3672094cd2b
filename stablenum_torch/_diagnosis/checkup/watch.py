"""Watch an unmodified PyTorch script for a checkup: the losses, and a sample of its steps in full.

A measured step takes many times as long as a plain one. The first steps are measured, then as many as fit
into a part of the script's time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stablenum.diagnosis.checkup.course import MOST_PLACES, UNTRAINED, Clip, Course, Loss, Probe, Recurrence
from stablenum.diagnosis.checkup.remedies import Change
from stablenum.diagnosis.checkup.schedule import Schedule
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.watch.session import FAILED, Session
from stablenum_torch._diagnosis.audit import setting_problems, state_problems
from stablenum_torch._diagnosis.checkup import remedy
from stablenum_torch._diagnosis.checkup.copies import Copies
from stablenum_torch._diagnosis.checkup.custom_functions import CustomFunctions
from stablenum_torch._diagnosis.checkup.held import constructed, place_of_construction, plain_tensors, unique
from stablenum_torch._diagnosis.checkup.measuring import MeasuredStep
from stablenum_torch._diagnosis.checkup.updates import copies_of, is_measurable, parameters_seen, settings_of
from stablenum_torch._diagnosis.replay.source_lines import users_place, users_places
from stablenum_torch._diagnosis.watch.by_hand import Graph, graph_of, item, tensors_of
from stablenum_torch._diagnosis.watch.optimizers import StepFrames, parameters_of, rate_of
from stablenum_torch._diagnosis.watch.script_recorder import roles_and_names
from stablenum_torch._diagnosis.watch.unseen import Unseen, outside_graphs
from stablenum_torch._step.measure.norms import dense_values
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["watch"]

# More backward passes than this and no step are a training whose steps were forgotten. Chosen, not measured.
_WITHOUT_STEP = 4
# So many losses wait on their device until they are read. Chosen, not measured.
_MOST_UNREAD = 256
_INITIALISERS = [
    name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_") and name != "sparse_"
]


def watch(session: Session) -> None:
    """Watch everything that this process trains from now on."""
    torch.manual_seed(session.plan.seed)
    watcher = _Watcher(session)
    watcher.watch_modules()
    register_optimizer_step_pre_hook(watcher.before_step)
    register_optimizer_step_post_hook(watcher.after_step)
    watcher.unseen.wrap(torch.autograd, "backward", watcher.before_backward)
    for owner in (nn.utils, nn.utils.clip_grad):
        watcher.unseen.wrap(owner, "clip_grad_norm_", watcher.before_clip, watcher.after_clip)
    watcher.unseen.wrap(torch.amp.GradScaler, "step", watcher.before_scaler_step)
    watcher.unseen.wrap(torch.optim.Optimizer, "__init__", watcher.before_optimizer)
    watcher.unseen.wrap(torch.optim.Optimizer, "load_state_dict", watcher.before_load_state)
    watcher.unseen.wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", watcher.before_schedule)
    watcher.unseen.wrap(nn.Module, "load_state_dict", watcher.before_load)
    watcher.unseen.wrap(nn.Module, "__init__", watcher.before_module_init)
    for name in _INITIALISERS:
        watcher.unseen.wrap(nn.init, name, watcher.before_init)
    for name in ("normal_", "uniform_"):
        watcher.unseen.wrap(Tensor, name, watcher.before_init)
    if session.remedy is not None:
        remedy.apply(session.remedy, session.note_applied)
    session.on_end.append(watcher.conclude)


class _Watcher:
    """Collects the course of a training."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.unseen = Unseen(session, self.close)
        self.course = Course(framework="torch")
        self.window: MeasuredStep | None = None
        self.modules: RemovableHandle | None = None
        self.schedule = Schedule() if session.remedy is None else Schedule(session.remedy.measured)
        self.stepping = StepFrames()
        # In the order of their first steps; they are kept, as are the ids of their parameters.
        self.optimizers: list[torch.optim.Optimizer] = []
        self.names: dict[int, tuple[str, str]] = {}  # id of a tensor -> its role and name
        self.renamed = True  # whether there may be tensors without a name
        self.before: dict[int, Tensor] = {}  # parameters before the step that is measured
        self.given: set[int] = set()  # ids of parameters that had a gradient in a step
        self.owned: dict[int, str] = {}  # id of a parameter -> the class of its optimizer
        self.leaves: dict[int, tuple[Tensor, int]] = {}  # what gradients have reached, with its version
        self.losses: list[tuple[int, Tensor, Place | None]] = []
        self.initialised: dict[int, Place] = {}  # by the address of a tensor's memory
        self.began = False
        self.recurrences: list[Recurrence] = []
        self.since_step = 0  # backward passes since the last step
        self.uncleared: set[int] = set()  # ids of parameters with the gradient of a step that was taken
        self.growing: set[int] = set()  # of these, those to which a backward pass has added since
        self.backward_place: Place | None = None
        self.constructed: dict[int, Place] = {}  # id of a module -> where it was made
        self.made_last: tuple[Place, ...] = ()  # where the last optimizer was made, with its callers
        self.custom, self.copies = CustomFunctions(self.unseen), Copies()
        # The numbers of the losses that were differentiated since the last step, with their lines.
        self.differentiated: dict[int, Place | None] = {}

    # --- a step that is measured ---

    def open(self) -> None:
        """Begin to measure, if there is time for it."""
        first, self.began = not self.began, True
        if first and self.session.remedy is not None:
            self.names = unique(roles_and_names(), {})
            remedy.before_first_step(self.session.remedy, self.names, self.session.note_applied)
        probes = self.course.probes
        last = probes[-1].step if probes else 0
        if self.window is not None or not self.schedule.is_due(self.course.steps, len(probes), last):
            return
        self.schedule.begin()
        if self.renamed:
            self.names, self.renamed = unique(plain_tensors() | roles_and_names(), self.names), False
        if first:
            self.session.sheltered(self.copies.begin)
        else:
            self.session.sheltered(self.copies.look, set(self.owned))
        window = self.session.sheltered(MeasuredStep, dict(self.names))
        if window is not FAILED:
            self.window = window
            self.unseen.recording = True
            self.custom.step, self.custom.written_on = self.course.steps, window.written_on
            self.custom.install()
            self.watch_modules()

    def close(self) -> None:
        """Stop measuring."""
        if self.window is not None:
            self.session.sheltered(self.custom.uninstall)
            self.session.sheltered(self.window.close)
            self.schedule.end()
            self.window, self.unseen.recording = None, False
            self.leave_modules()

    def watch_modules(self) -> None:
        """Look at the calls of modules, which takes a few us for each: only where they are needed."""
        self.modules = self.modules or register_module_forward_pre_hook(self.before_module)

    def leave_modules(self) -> None:
        if self.modules is not None:
            self.modules.remove()
            self.modules = None

    @outside_graphs
    def before_module(self, module: nn.Module, args: Any) -> None:
        """Open the first window before the first forward pass of the training."""
        if not self.began and torch.is_grad_enabled():
            self.session.sheltered(self.open)
            if self.window is None:
                self.leave_modules()
        if self.window is not None:
            self.copies.note_call(module)
        if self.window is not None and isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            self.unseen.look(self.note_recurrence, module, args)

    def note_recurrence(self, module: nn.RNNBase | nn.MultiheadAttention, args: Any) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is not None and given.ndim == 3 and not module.batch_first:
            weight = self.names.get(id(next(module.parameters())), ("", ""))[1]
            lengths = given.shape[0], given.shape[1]
            path = weight.rpartition(".")[0]
            self.recurrences.append(Recurrence(path, weight, users_place(), *lengths))

    @outside_graphs
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.unseen.look(self.note_before, optimizer, sys._getframe(1))

    @outside_graphs
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.stepping.ends_nested(sys._getframe(1)):
            return
        self.unseen.look(self.note_after, optimizer)
        # With several optimizers, each round ends with the step of the one that came last.
        if self.window is None or optimizer is self.optimizers[-1]:
            self.close()
            self.session.sheltered(self.open)
        if self.session.plan.steps is not None and self.course.steps >= self.session.plan.steps:
            self.session.stop()

    def note_before(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        # A closure computes the gradients inside a guard's step: only the optimizer inside begins with them.
        self.note_gradients(optimizer)
        if self.stepping.begins_nested(frame):
            return
        self.course.step_place = self.course.step_place or users_place()
        if not any(optimizer is known for known in self.optimizers):
            self.note_new(optimizer)
        if self.window is not None:
            self.before |= copies_of(parameters_of(optimizer), optimizer)

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients with which a step begins."""
        with_gradient = [p for p in parameters_of(optimizer) if p.grad is not None]
        self.given.update(map(id, with_gradient))
        first = next(iter(with_gradient), None)
        known = self.course.steps in self.course.kept[-1:]
        if first is not None and id(first) in self.uncleared & self.growing and not known:
            self.course.kept.append(self.course.steps)
            self.course.kept_place = self.course.kept_place or self.backward_place

    def note_new(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that has not taken a step before."""
        self.optimizers.append(optimizer)
        self.renamed = True
        kind = type(optimizer).__name__
        own = list(parameters_of(optimizer))
        if own and all(self.owned.get(id(p)) == kind for p in own):
            self.course.renewed.append(self.course.steps)
            self.course.renewed_places = self.course.renewed_places or self.made_last
        self.owned.update((id(p), kind) for p in own)
        self.course.settings += (settings_of(optimizer),)
        self.course.guarded = self.course.guarded or isinstance(optimizer, GuardedOptimizer)

    def note_after(self, optimizer: torch.optim.Optimizer) -> None:
        course = self.course
        rate = rate_of(optimizer)
        if rate is not None:
            course.rates.append((course.steps, rate))
        if isinstance(optimizer, GuardedOptimizer) and optimizer.scales_loss:
            course.scales.append((course.steps, optimizer.loss_scale))
        first = next((p for p in parameters_of(optimizer) if p.grad is not None), None)
        if first is not None:  # whether its gradient is 0 is asked before the next backward pass
            self.uncleared.add(id(first))
            self.growing.discard(id(first))
        if self.window is not None:
            self.note_probe(optimizer)
        course.steps += 1
        self.since_step = 0
        self.differentiated.clear()

    def note_probe(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer has done with its parameters."""
        assert self.window is not None
        seen = parameters_seen(optimizer.param_groups, self.before, self.names, optimizer)
        for p in parameters_of(optimizer):
            self.before.pop(id(p), None)
        self.renamed = self.renamed or any(i not in self.names for i in self.window.leaves)
        self.course.probes.append(
            Probe(
                step=self.course.steps,
                trace=self.window.trace,
                signals=self.window.signals,
                parameters=seen,
                recurrences=tuple(self.recurrences),
            )
        )
        self.recurrences.clear()

    # --- what the script sets up ---

    def before_optimizer(self, *args: Any, **kwargs: Any) -> None:
        self.made_last = users_places()
        self.course.made = _with(self.course.made, next(iter(self.made_last), None))

    def before_module_init(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        place = None if self.course.steps else place_of_construction(module)
        if place is not None:
            self.constructed[id(module)] = place

    def before_schedule(self, *args: Any, **kwargs: Any) -> None:
        self.course.scheduled = _with(self.course.scheduled, users_place())

    def before_load_state(self, *args: Any, **kwargs: Any) -> None:
        self.course.loaded_state = self.course.loaded_state or users_place()

    def before_load(self, *args: Any, **kwargs: Any) -> None:
        self.course.loaded = True

    def before_init(self, tensor: Any = None, *args: Any, **kwargs: Any) -> None:
        if self.course.steps or type(tensor) not in (Tensor, nn.Parameter) or not is_measurable(tensor):
            return
        place = users_place()
        if place is not None:
            self.initialised[tensor.untyped_storage().data_ptr()] = place

    # --- losses and gradients ---

    def before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        place = self.backward_place = users_place()
        roots = [t for t in tensors_of(tensors) if isinstance(t, Tensor)]
        if not all(t.requires_grad for t in roots):
            self.course.groundless = self.course.groundless or place
        for t in roots[:1]:
            if t.numel() == 1 and t.is_floating_point() and not t.is_meta:
                self.losses.append((self.course.steps, t.detach().clone(), place))
        if len(self.losses) > _MOST_UNREAD:
            self.read_losses()
        graph = graph_of(roots)
        self.note_sums(roots, graph, place, **kwargs)
        for leaf in graph.leaves:
            self.leaves.setdefault(id(leaf), (leaf, leaf._version))
            if id(leaf) in self.uncleared and _is_zero(leaf.grad):
                self.uncleared.discard(id(leaf))
            elif id(leaf) in self.uncleared:
                self.growing.add(id(leaf))
        self.since_step += 1

    def note_sums(
        self,
        roots: Sequence[Tensor],
        graph: Graph,
        place: Place | None,
        *,
        create_graph: bool = False,
        inputs: Any = None,
        **options: Any,
    ) -> None:
        """Note a loss of which an earlier one is a part, whose gradients are still there."""
        if create_graph or inputs is not None:  # gradients of gradients, or of chosen tensors
            return
        before = [line for number, line in self.differentiated.items() if number in graph.numbers]
        if before and not all(_is_zero(leaf.grad) for leaf in graph.leaves):
            self.course.summed_twice.append((self.course.steps, before[0], place))
        numbers = [t.grad_fn._sequence_nr() for t in roots if t.grad_fn is not None]
        self.differentiated |= dict.fromkeys(numbers, place)

    def before_clip(self, parameters: Any, max_norm: Any = None, *args: Any, **kwargs: Any) -> Any:
        return max_norm, users_place()

    def after_clip(self, given: tuple[Any, Place | None], norm: Any) -> None:
        bound, place = given
        if bound is not None:
            self.course.clips.append(Clip(self.course.steps, float(norm), float(bound), place))

    def before_scaler_step(self, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler.is_enabled():
            self.course.scales.append((self.course.steps, float(scaler.get_scale())))

    def read_losses(self) -> None:
        self.course.losses += [Loss(step, item(t), place) for step, t, place in self.losses]
        self.losses.clear()

    # --- the end ---

    def conclude(self) -> None:
        """Judge the course of the training, which has ended."""
        self.close()
        course = self.course
        course.custom, course.cut = self.custom.found, tuple(self.custom.cut)
        course.copies = self.copies.found
        self.read_losses()
        leaves = [p for p, _ in self.leaves.values()]
        # What the script itself writes to is trained, as with master weights.
        written = {i for i, (p, version) in self.leaves.items() if p._version != version}
        own = [p for optimizer in self.optimizers for p in parameters_of(optimizer)]
        ids = {id(p) for p in own}
        # The modules may be gone, but those of the parameters that optimizers keep had their names before.
        held = unique(self.names | roles_and_names(), self.names)
        names = {i: name for i, (_, name) in held.items()}
        weights = [p for p in leaves if isinstance(p, nn.Parameter) or held.get(id(p), ("",))[0] == UNTRAINED]
        # A loss scale may have skipped them all.
        trained = course.steps or (self.since_step > _WITHOUT_STEP and not course.scales)
        outside = [p for p in weights if id(p) not in ids | written and trained]
        course.outside = tuple(names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in outside)
        course.inside = tuple(dict.fromkeys(names[id(p)] for p in own if id(p) in names))
        course.constructed = {
            names[i]: place for i, place in constructed(self.constructed).items() if i in names
        }
        reached = {id(p) for p in leaves} | self.given
        for p in own + leaves:
            place = self.initialised.get(p.untyped_storage().data_ptr()) if is_measurable(p) else None
            if place is not None and id(p) in names:
                course.initialised[names[id(p)]] = place
        course.strangers = sum(
            id(p) not in names and id(p) not in reached and p.requires_grad for p in _distinct(own)
        )
        for optimizer in self.optimizers:
            known = [(names[id(p)], p) for p in parameters_of(optimizer) if id(p) in names]
            found = self.session.sheltered(state_problems, optimizer, known or None)
            course.bad_state += (*setting_problems(optimizer), *(() if found is FAILED else found))
        if course.steps or course.groundless is not None or self.since_step:
            # With a loss scale, gradients may still be scaled when the optimizer begins.
            changes = set(Change) - ({Change.CLIP} if course.scales else set())
            self.session.judge(course, changes)


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(dense_values(gradient.detach()).count_nonzero())


def _with(places: tuple[Place, ...], place: Place | None) -> tuple[Place, ...]:
    """Return the places with another one, unless it is known; no more than four."""
    full = len(places) >= MOST_PLACES
    return places if place is None or place in places or full else (*places, place)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())
