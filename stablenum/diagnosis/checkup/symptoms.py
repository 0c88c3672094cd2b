"""What can be wrong with a training although every number is finite: the symptoms, with their cures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any

from stablenum.diagnosis.replay.values import Place

__all__ = ["SYMPTOMS", "Complaint", "Level", "Symptom", "SymptomText"]


class Level(IntEnum):
    """How certain it is that something is wrong.

    Attributes:
        NOTE: worth knowing; many sound trainings do it.
        WARNING: likely to cost accuracy or time.
        FAULT: the training cannot work as it is written, or measurably does not.
    """

    NOTE = 0
    WARNING = 1
    FAULT = 2


class Symptom(StrEnum):
    """The symptoms that a checkup distinguishes, in the order from causes to consequences.

    Example:
        >>> Symptom.DEAD_UNITS.value
        'dead_units'
    """

    NOT_FINITE = "not_finite"
    NO_GRAPH = "no_graph"
    NOT_IN_MODEL = "not_in_model"
    NOT_IN_OPTIMIZER = "not_in_optimizer"
    RATE_ZERO = "rate_zero"
    CAPTURED_PARAMETERS = "captured_parameters"
    INDEX_OUT_OF_RANGE = "index_out_of_range"
    GRADIENTS_KEPT = "gradients_kept"
    OPTIMIZER_RENEWED = "optimizer_renewed"
    SAME_RANDOM_NUMBERS = "same_random_numbers"
    WRONG_GRADIENT = "wrong_gradient"
    UPHILL_UPDATES = "uphill_updates"
    FLUSHED_GRADIENTS = "flushed_gradients"
    LOST_UPDATES = "lost_updates"
    BROADCAST_LOSS = "broadcast_loss"
    WRONG_AXIS = "wrong_axis"
    ACTIVATION_BEFORE_LOSS = "activation_before_loss"
    UNSCALED_INPUT = "unscaled_input"
    UNSCALED_TARGET = "unscaled_target"
    ALIKE_UNITS = "alike_units"
    EXPLODING_ACTIVATIONS = "exploding_activations"
    VANISHING_ACTIVATIONS = "vanishing_activations"
    BATCH_NORM = "batch_norm"
    BAD_STATE = "bad_state"
    STILL_STATE = "still_state"
    STALE_STATE = "stale_state"
    EPS_DOMINATES = "eps_dominates"
    WEIGHT_DECAY = "weight_decay"
    STEPS_TOO_LARGE = "steps_too_large"
    NO_GRADIENT = "no_gradient"
    DETACHED = "detached"
    DEAD_UNITS = "dead_units"
    SATURATED = "saturated"
    ROUTER_COLLAPSE = "router_collapse"
    ATTENTION_COLLAPSE = "attention_collapse"
    EXPLODING_GRADIENTS = "exploding_gradients"
    VANISHING_GRADIENTS = "vanishing_gradients"
    ZERO_GRADIENT = "zero_gradient"
    CLIPPED_ALWAYS = "clipped_always"
    LOSS_SCALE = "loss_scale"
    STEPS_TOO_SMALL = "steps_too_small"
    CONSTANT_OUTPUT = "constant_output"
    LOSS_NOT_FINITE = "loss_not_finite"
    LOSS_DIVERGES = "loss_diverges"
    LOSS_OSCILLATES = "loss_oscillates"
    LOSS_CONSTANT = "loss_constant"


@dataclass(frozen=True, slots=True)
class SymptomText:
    """What a symptom means, what to do about it, and what that changes."""

    what: str
    cure: str
    expects: str


S = Symptom
SYMPTOMS: dict[Symptom, SymptomText] = {
    S.NOT_FINITE: SymptomText(
        "parameters or running statistics are NaN or inf, so nothing computed from them means anything",
        "run `stablenum explain` on the script, which names the operation where that begins",
        "the line and the cause",
    ),
    S.NO_GRAPH: SymptomText(
        "the loss was not computed from any parameter, so it has no gradient",
        "compute the loss from the model's output, without detach(), .data, .item() or torch.tensor(...) in "
        "between",
        "gradients exist",
    ),
    S.NOT_IN_MODEL: SymptomText(
        "the optimizer steps with parameters that no gradient reaches and no module has",
        "make the optimizer after the model has its final parameters, from model.parameters()",
        "the model's own parameters move",
    ),
    S.NOT_IN_OPTIMIZER: SymptomText(
        "gradients are computed for parameters that no optimizer changes",
        "give them to the optimizer, or set requires_grad=False if they are frozen on purpose",
        "these parameters move",
    ),
    S.RATE_ZERO: SymptomText(
        "the learning rate is 0, so nothing moves",
        "check the schedule: its length in steps, whether it is stepped too often, and its value at the "
        "first and the last step",
        "parameters move",
    ),
    S.CAPTURED_PARAMETERS: SymptomText(
        "a compiled step has the parameters as constants, so it computes gradients at their first values",
        "pass the parameters to the compiled function as an argument that is not static",
        "gradients at the parameters as they are",
    ),
    S.INDEX_OUT_OF_RANGE: SymptomText(
        "indices lie outside of the array that they read; JAX takes the nearest row or NaN for them, and "
        "drops their gradients",
        "map the indices to 0 ... n - 1, or make the array longer",
        "each index reads its own row",
    ),
    S.GRADIENTS_KEPT: SymptomText(
        "the gradients of earlier steps are still there and add up",
        "call optimizer.zero_grad() once per step, before the backward pass",
        "each step uses the gradient of its own batch",
    ),
    S.SAME_RANDOM_NUMBERS: SymptomText(
        "every step draws the same random numbers, because its key never changes",
        "give each step a key of its own (key, step_key = jax.random.split(key), or fold_in the number of "
        "the step), as an argument of the compiled function",
        "other random numbers in each step",
    ),
    S.OPTIMIZER_RENEWED: SymptomText(
        "the optimizer starts over, so that it never has momentum or second moments",
        "make the optimizer and its state once, before the loop, and hand the new state to the next step",
        "moments are averages over many steps",
    ),
    S.WRONG_GRADIENT: SymptomText(
        "a derivative that the script has written is not that of what it computes, so the gradient is wrong",
        "correct the derivative",
        "gradients along which the loss changes as they say",
    ),
    S.UPHILL_UPDATES: SymptomText(
        "the updates have the sign of the gradients, so each step makes the loss larger",
        "turn the sign of the update, unless the script is meant to maximise this number: end the chain with "
        "optax.scale_by_learning_rate or optax.scale(-1); in PyTorch leave out maximize=True",
        "a loss that falls",
    ),
    S.FLUSHED_GRADIENTS: SymptomText(
        "gradients that were not 0 become 0 here, because the numbers are too small for the format",
        "do not scale gradients below the smallest number of their format; in float16 use a loss scale, and "
        "take it out in float32 "
        '(stablenum_torch.wrap(optimizer, loss_scale="dynamic"), stablenum_jax.guard(loss_scale="dynamic"))',
        "gradients are not 0",
    ),
    S.LOST_UPDATES: SymptomText(
        "the updates are smaller than half an ulp of the parameters, so rounding undoes them",
        "keep the parameters in float32 (autocast computes in 16 bits), or update them with "
        "MasterWeights, KahanUpdate or StochasticRounding",
        "the parameters move",
    ),
    S.BROADCAST_LOSS: SymptomText(
        "two vectors of one length were combined into a matrix, so each prediction is compared with every "
        "target",
        "give both the same shape: prediction.squeeze(-1), or target[:, None]",
        "the loss compares each prediction with its own target",
    ),
    S.WRONG_AXIS: SymptomText(
        "a layer runs over the batch as if it were time",
        "make it with batch_first=True, or give it (time, batch, feature)",
        "outputs that depend on their own sequence alone",
    ),
    S.ACTIVATION_BEFORE_LOSS: SymptomText(
        "the loss expects logits but reads the output of an activation",
        "pass the output of the last layer itself; apply the activation only where probabilities are needed",
        "larger gradients, and a loss that can reach 0",
    ),
    S.UNSCALED_INPUT: SymptomText(
        "the inputs are far from mean 0 and standard deviation 1",
        "standardise them with the mean and the standard deviation of the training data",
        "activations of size 1, and steps that suit all weights",
    ),
    S.UNSCALED_TARGET: SymptomText(
        "the targets are far larger than what the model puts out",
        "standardise the targets, and undo that for predictions",
        "a loss of size 1",
    ),
    S.ALIKE_UNITS: SymptomText(
        "units have the same weights and get the same gradients, so they stay copies of one another",
        "initialise the weights of each unit with random numbers of their own: not with a constant, and not "
        "from the same key twice",
        "units that learn different things",
    ),
    S.EXPLODING_ACTIVATIONS: SymptomText(
        "activations grow from layer to layer",
        "initialise each layer for its activation",
        "activations of one size in all layers",
    ),
    S.VANISHING_ACTIVATIONS: SymptomText(
        "activations shrink from layer to layer",
        "initialise each layer for its activation",
        "activations of one size in all layers",
    ),
    S.BATCH_NORM: SymptomText(
        "the statistics of a batch normalisation do not fit the batches",
        "train in training mode with at least 16 values per channel, let a new batch count 0.1 (momentum 0.1 "
        "in PyTorch, 0.9 in flax), and evaluate in evaluation mode",
        "the same results in training and evaluation",
    ),
    S.STILL_STATE: SymptomText(
        "a state that should follow the training stays as it was",
        "update it in every step",
        "a state that moves",
    ),
    S.STALE_STATE: SymptomText(
        "the optimizer's moments do not fit the gradients",
        "start with a fresh optimizer state, or load the one that belongs to these parameters and this loss",
        "steps of the usual size",
    ),
    S.BAD_STATE: SymptomText(
        "the optimizer's state or settings hold numbers that it cannot use",
        "correct the setting; reset the elements of the state with repair(), or load a state from before",
        "updates that follow the gradients",
    ),
    S.EPS_DOMINATES: SymptomText(
        "the optimizer's eps is far above the root of the second moment, so steps are far smaller than the "
        "learning rate",
        "lower eps (1e-8 is usual in float32), or scale the loss up",
        "steps of the size of the learning rate",
    ),
    S.WEIGHT_DECAY: SymptomText(
        "weight decay shrinks the weights faster than the gradients rebuild them",
        "lower the weight decay (0.01 to 0.1 with AdamW), and leave norms, biases and embeddings out of it",
        "weights keep their size",
    ),
    S.STEPS_TOO_LARGE: SymptomText(
        "each step changes the parameters by a large part of their size, and the loss does not come down",
        "lower the learning rate",
        "a loss that falls",
    ),
    S.NO_GRADIENT: SymptomText(
        "no gradient reaches these parameters",
        "look for detach(), .data, .item(), argmax, stop_gradient or torch.no_grad() between them and the "
        "loss, and for modules that the forward pass does not use",
        "these parameters move",
    ),
    S.DETACHED: SymptomText(
        "gradients stop inside a loop, so only its last rounds are trained",
        "do not detach what one round hands to the next, or do so only every few rounds",
        "gradients over all rounds",
    ),
    S.DEAD_UNITS: SymptomText(
        "units of a ReLU give 0 for every input, so nothing behind them learns",
        "lower the learning rate, initialise with a smaller gain and bias 0, or use leaky ReLU or GELU",
        "units that respond to some inputs",
    ),
    S.SATURATED: SymptomText(
        "an activation is at the edge of its range, where its derivative is 0",
        "reduce its input: scale the data, initialise with a smaller gain, normalise before the "
        "activation, or divide the logits by a temperature",
        "gradients pass",
    ),
    S.ROUTER_COLLAPSE: SymptomText(
        "the router sends nearly everything to one expert",
        "add a load-balancing loss, or check the sign of the one that is there; add noise to the router's "
        "logits, and initialise it small",
        "all experts are used",
    ),
    S.ATTENTION_COLLAPSE: SymptomText(
        "attention logits are so large that each row looks at few keys",
        "divide the scores by the root of the head's size, normalise queries and keys, or lower the rate",
        "attention that can still be learned",
    ),
    S.EXPLODING_GRADIENTS: SymptomText(
        "gradients grow on their way back through the layers or the time steps",
        "clip the global norm (clip=1.0), initialise for the activation, use orthogonal recurrent weights, "
        "a gated cell or normalisation",
        "gradients of one size in all layers",
    ),
    S.VANISHING_GRADIENTS: SymptomText(
        "gradients shrink on their way back through the layers or the time steps",
        "use residual connections, normalisation, ReLU-like activations with the initialisation for them, or "
        "a gated cell with a forget bias of 1",
        "gradients of one size in all layers",
    ),
    S.LOSS_SCALE: SymptomText(
        "the loss scale does not settle",
        "at its smallest value: some number overflows at any scale, so find it with "
        "`stablenum explain`, or compute it in float32; growing without end: the gradients are 0, or need no "
        "scale",
        "a scale that changes rarely",
    ),
    S.ZERO_GRADIENT: SymptomText(
        "the gradient of these parameters is exactly 0 in every step",
        "look for a factor that is 0 or a part of the model that the loss does not use",
        "these parameters move",
    ),
    S.CLIPPED_ALWAYS: SymptomText(
        "gradients are clipped at every step, far below their usual norm",
        "raise the bound to about the usual norm, or take the bound into account in the learning rate",
        "clipping only of unusual steps",
    ),
    S.STEPS_TOO_SMALL: SymptomText(
        "the steps are so small that the loss hardly changes",
        "raise the learning rate",
        "a loss that falls",
    ),
    S.CONSTANT_OUTPUT: SymptomText(
        "the output is the same for every item of the batch",
        "look for what removes the input: a wrong axis, an input that is overwritten, dead or saturated "
        "units",
        "outputs that differ from item to item",
    ),
    S.LOSS_NOT_FINITE: SymptomText(
        "the loss is NaN or inf",
        "run `stablenum explain` on the script, which names the operation where that begins",
        "the line and the cause",
    ),
    S.LOSS_DIVERGES: SymptomText(
        "the loss grows", "lower the learning rate, or clip gradients (clip=1.0)", "a loss that falls"
    ),
    S.LOSS_OSCILLATES: SymptomText(
        "the loss jumps up and down without falling", "lower the learning rate", "a loss that falls"
    ),
    S.LOSS_CONSTANT: SymptomText(
        "the loss does not change",
        "look for a loss that does not depend on the parameters, or steps that move nothing",
        "a loss that falls",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """One symptom that was found.

    Attributes:
        symptom: what it is.
        level: how certain it is that something is wrong.
        since: the number of the optimizer step, from 0, at which it was first seen.
        place: the user's line.
        places: further lines that belong to it.
        module: the path of the module, if there is one.
        parameters: the names of the parameters concerned.
        what: one sentence, with the evidence.
        evidence: what was measured, a line each.
        cure: what to do.
        expects: what the cure changes.
        tried: what a trial of the cure has shown; "" if it was not tried.
        consequences: complaints that follow from this one.
    """

    symptom: Symptom
    level: Level
    what: str
    since: int = 0
    place: Place | None = None
    places: tuple[Place, ...] = ()
    module: str = ""
    parameters: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    cure: str = ""
    expects: str = ""
    tried: str = ""
    consequences: tuple[Complaint, ...] = ()

    @classmethod
    def of(cls, symptom: Symptom, level: Level, evidence: str | tuple[str, ...], **rest: Any) -> Complaint:
        """Return a complaint in the words of the table, unless ``rest`` has others."""
        text = SYMPTOMS[symptom]
        shown = (evidence,) if isinstance(evidence, str) else evidence
        common = {"what": text.what, "cure": text.cure, "expects": text.expects, "evidence": shown}
        return cls(symptom=symptom, level=level, **{**common, **rest})

    def with_(self, **changes: Any) -> Complaint:
        """Return the complaint with other fields."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        plain |= {"symptom": self.symptom.value, "level": self.level.name.lower()}
        plain["consequences"] = [c.to_dict() for c in self.consequences]
        return plain

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Complaint:
        """Return the object from which :meth:`to_dict` made ``d``."""
        values = dict(d)
        values["symptom"] = Symptom(d["symptom"])
        values["level"] = Level[d["level"].upper()]
        values["place"] = None if d["place"] is None else Place(**d["place"])
        values["places"] = tuple(Place(**p) for p in d["places"])
        values["parameters"], values["evidence"] = tuple(d["parameters"]), tuple(d["evidence"])
        values["consequences"] = tuple(cls.from_dict(c) for c in d["consequences"])
        return cls(**values)
