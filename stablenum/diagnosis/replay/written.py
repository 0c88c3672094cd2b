"""Infinities that a program writes into an array: bad data, or a mask.

``x[40, 0] = inf`` breaks an image; ``distances[i, i] = inf`` says that a point is not its own neighbour. The
operations that read the array tell which of them it is.
"""

from __future__ import annotations

from stablenum.diagnosis.replay.constants import constant_of, writes_infinity
from stablenum.diagnosis.replay.operations import MASKED, MOVING
from stablenum.diagnosis.replay.trace import Step, Trace

__all__ = ["LAYERS", "is_written_data"]

# Layers and statistics that use every element, so that an infinity among what they read is no mask.
LAYERS = frozenset({
    "batch_norm", "conv", "group_norm", "layer_norm", "matmul", "mean", "norm", "rms_norm", "std", "var",
})  # fmt: skip

# These are taken of masked scores, too, by mistake.
_BY_MISTAKE = ("mean", "norm")
# Operations for which +inf is a mask, and those for which -inf is one.
_LEAST = frozenset({"amin", "argmin", "cummin", "min", "minimum", "sort", "top_k", "topk"})
_GREATEST = MASKED | {
    "amax",
    "argmax",
    "cummax",
    "exp",
    "exp2",
    "max",
    "sigmoid",
    "softplus",
    "top_k",
    "topk",
}
_PASSING_ON = MOVING - _LEAST | {"add", "cast", "div", "mul", "neg", "sub"}


def is_written_data(trace: Trace, step: Step) -> bool:
    """Return whether a step writes infinities into data.

    They are data if a layer reads them. Otherwise -inf is a mask, and so is +inf for a minimum, or for a
    softmax once it was negated.

    Example:
        >>> t = Trace()
        >>> x, inf = t.add_value(), t.add_value(flags=(False, True, False), role="constant")
        >>> y = t.add_value(flags=(False, True, False))
        >>> is_written_data(t, t.add_step("copy", inputs=[x, inf], outputs=[y]))
        True
        >>> least = t.add_step("min", inputs=[y], outputs=[t.add_value(flags=(False, True, False))])
        >>> is_written_data(t, t.steps[0])
        False
    """
    if not writes_infinity(trace, step) or not all(
        constant_of(trace, v) for v in trace.inputs_of(step) if v.inf
    ):
        return False
    below = any(v.neginf for v in trace.outputs_of(step))
    layer, reached = False, set(step.outputs)
    for reader in trace.steps[step.index + 1 :]:
        read = [v for v in trace.inputs_of(reader) if v.id in reached and v.inf]
        if not read or reader.phase != "forward":
            continue
        if reader.operation in _PASSING_ON:
            reached.update(reader.outputs)
        elif reader.operation in LAYERS:
            layer |= reader.operation not in _BY_MISTAKE
        elif below or reader.operation in (_LEAST if any(v.posinf for v in read) else _GREATEST):
            return False
    return layer or not below
