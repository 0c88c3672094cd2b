"""Changes of what is done: something less, a gradient stopped or not, a turn, a function around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from stablenum.diagnosis.diff.mending.clues import Clues
from stablenum.diagnosis.diff.mending.names import Held
from stablenum.diagnosis.diff.mending.nodes import (
    COMMA,
    EQUAL,
    MOST_GIVEN,
    may_be_array,
    name_of,
    number,
    resolved,
    spelled,
    with_last,
    without,
)
from stablenum.diagnosis.edits.tree import atom, code_of, dotted

__all__ = [
    "ARITHMETIC",
    "clips",
    "decays",
    "drops",
    "masks",
    "operands",
    "stops",
    "straight_through",
    "turns",
    "unstops",
    "wraps",
]


def drops(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """A call, an operand, an index, a sign or an entry less, or all that is done to one variable."""
    if isinstance(node, cst.Call):
        first = next((a.value for a in node.args[:1] if a.keyword is None and not a.star), None)
        if isinstance(node.func, cst.Attribute) and resolved(node.func.value, clues) is None:
            yield node.func.value
        if first is not None:
            yield first
        if len(node.args) > 1:
            yield from (
                node.with_changes(args=without(node.args, i))
                for i, a in enumerate(node.args)
                if a.keyword is None
            )
    elif isinstance(node, cst.BinaryOperation):
        yield from (node.left, node.right)
    elif isinstance(node, cst.UnaryOperation):
        yield node.expression
    elif isinstance(node, cst.Subscript) or (
        isinstance(node, cst.Attribute) and node.attr.value in ("T", "mT")
    ):
        yield node.value
    elif isinstance(node, cst.Tuple | cst.List) and len(node.elements) > 1:
        for i in range(len(node.elements)):
            yield node.with_changes(elements=without(node.elements, i))
    if isinstance(node, cst.Call | cst.BinaryOperation):
        yield from _variables(node, clues)


def _variables(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """Yield the variables in an expression that may be arrays, each once."""
    found, waiting = dict[str, cst.BaseExpression](), list[cst.CSTNode]([node])
    while waiting:
        inner = waiting.pop(0)
        if isinstance(inner, cst.Name) and may_be_array(inner, clues):
            found.setdefault(inner.value, inner.with_changes(lpar=[], rpar=[]))
        skipped = inner.attr if isinstance(inner, cst.Attribute) else None
        skipped = inner.keyword if isinstance(inner, cst.Arg) else skipped
        waiting += [child for child in inner.children if child is not skipped]
    yield from found.values()


def stops(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression through which no gradient passes."""
    if not may_be_array(node, clues) or any(True for _ in unstops(node, clues)):
        return
    if clues.framework == "torch":
        yield cst.Call(cst.Attribute(atom(node), cst.Name("detach")))
        return
    name = name_of("jax.lax", "stop_gradient", clues)
    if name:
        yield cst.Call(cst.parse_expression(name), [cst.Arg(node)])


def unstops(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression through which a gradient passes that was stopped."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return
    name = node.func.attr.value
    if name == "stop_gradient" and len(node.args) == 1:
        yield node.args[0].value
    elif name == "detach" and not node.args:
        yield node.func.value


def straight_through(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression whose gradient is that of another variable, x + stop(node - x)."""
    if not may_be_array(node, clues):
        return
    for name in clues.variables:
        if name != code_of(node):
            inner = cst.BinaryOperation(atom(node), cst.Subtract(), cst.Name(name))
            for stopped in stops(inner, clues):
                yield cst.BinaryOperation(cst.Name(name), cst.Add(), stopped)


def turns(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression transposed, flipped, or as its negation."""
    if not may_be_array(node, clues):
        return
    own = atom(node)
    yield cst.Attribute(own, cst.Name("T"))
    for a, b in ((-1, -2), (1, 2)):
        axes = _arguments(number(a, whole=True), number(b, whole=True))
        yield cst.Call(cst.Attribute(own, cst.Name("swapaxes")), axes)
    if clues.framework == "torch":
        flip = cst.Attribute(own, cst.Name("flip"))
        yield from (cst.Call(flip, [cst.Arg(number(axis, whole=True))]) for axis in (0, 1, -1))
    else:
        cuts = (cst.parse_expression(f"_{cut}") for cut in ("[::-1]", "[:, ::-1]", "[..., ::-1]"))
        yield from (cut.with_changes(value=own) for cut in cuts)
    yield cst.UnaryOperation(cst.Minus(whitespace_after=cst.SimpleWhitespace("")), own)


def operands(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression to which is done what the other side's line does with a number, such as a factor, or that
    is combined with an attribute that nothing reads."""
    if may_be_array(node, clues):
        for operation, value in clues.operands:
            yield cst.BinaryOperation(atom(node), ARITHMETIC[operation](), spelled(value, clues))
        for name in clues.kept:
            for operator in (cst.Multiply(), cst.Add()):
                yield cst.BinaryOperation(
                    atom(node), operator, cst.Attribute(cst.Name("self"), cst.Name(name))
                )


# The operations that a line may do with a number, by the names that users know.
ARITHMETIC: Mapping[str, type[cst.BaseBinaryOp]] = {
    "mul": cst.Multiply,
    "div": cst.Divide,
    "add": cst.Add,
    "sub": cst.Subtract,
    "pow": cst.Power,
}


def masks(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An expression with the entries left out for which a variable does not hold."""
    where = name_of("jax.numpy" if clues.framework == "jax" else "torch", "where", clues)
    if not where or not may_be_array(node, clues):
        return
    for name in (n for n in clues.variables if clues.held.get(n, Held()).logical):
        for filled in ('float("-inf")', "0.0"):
            parts = (cst.Name(name), node, cst.parse_expression(filled))
            yield cst.Call(cst.parse_expression(where), _arguments(*parts))


def _arguments(*values: cst.BaseExpression) -> list[cst.Arg]:
    return [*(cst.Arg(value, comma=COMMA) for value in values[:-1]), cst.Arg(values[-1])]


def clips(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """An optimizer of optax whose gradients are clipped before, by a function of the file or of optax."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return
    made, module = resolved(node.func, clues), dotted(node.func.value)
    if (
        not (getattr(made, "__module__", None) or "").startswith("optax.")
        or "schedule" in node.func.attr.value
    ):
        return
    for function in (*clues.unused, f"{module}.clip_by_global_norm"):
        for limit in (*clues.forgotten, *(code_of(spelled(n, clues)) for n in clues.new[:MOST_GIVEN])):
            clip = cst.parse_expression(f"{function}({limit})")
            if node.func.attr.value == "chain":
                yield node.with_changes(args=[cst.Arg(clip, comma=COMMA), *node.args])
            else:
                yield cst.Call(cst.parse_expression(f"{module}.chain"), _arguments(clip, node))


def decays(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """AdamW as Adam with the decay in its gradients, and the inverse."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return
    name, module = node.func.attr.value, node.func.value
    coupled = cst.Attribute(module, cst.Name("add_decayed_weights"))
    given = {a.keyword.value: i for i, a in enumerate(node.args) if a.keyword is not None}
    if name == "adamw" and "weight_decay" in given:
        decay = node.args[given["weight_decay"]].value
        adam = node.with_changes(
            func=cst.Attribute(module, cst.Name("adam")), args=without(node.args, given["weight_decay"])
        )
        first = cst.Call(coupled, [cst.Arg(decay)])
        yield cst.Call(cst.Attribute(module, cst.Name("chain")), _arguments(first, adam))
    if name == "chain" and len(node.args) > 1:
        pairs = zip(node.args, node.args[1:], strict=False)
        for i, (a, b) in enumerate(pairs):
            if not (isinstance(a.value, cst.Call) and isinstance(b.value, cst.Call) and a.value.args):
                continue
            if (dotted(a.value.func), dotted(b.value.func)) == (dotted(coupled), f"{dotted(module)}.adam"):
                keyword = cst.Arg(a.value.args[0].value, cst.Name("weight_decay"), EQUAL)
                adamw = cst.Call(cst.Attribute(module, cst.Name("adamw")), with_last(b.value.args, keyword))
                rest = [*node.args[:i], b.with_changes(value=adamw), *node.args[i + 2 :]]
                yield adamw if len(rest) == 1 else node.with_changes(args=rest)


def wraps(node: cst.BaseExpression, clues: Clues) -> Iterator[cst.BaseExpression]:
    """A function of the other side around an expression, and a number by which it is multiplied, divided or
    moved."""
    if not may_be_array(node, clues):
        return
    modules = ("jax.nn", "jax.numpy") if clues.framework == "jax" else ("torch", "torch.nn.functional")
    for function in clues.functions:
        name = next((n for m in modules if (n := name_of(m, function, clues))), "")
        if name:
            yield cst.Call(cst.parse_expression(name), [cst.Arg(node)])
    own = atom(node)
    if clues.code == "label_smoothing" and clues.framework == "jax":
        smooth = name_of("optax", "smooth_labels", clues)
        for given in clues.new[:MOST_GIVEN] if smooth else ():
            yield cst.Call(cst.parse_expression(smooth), _arguments(node, spelled(given, clues)))
    if clues.ratio:
        yield cst.BinaryOperation(
            own, cst.Multiply(), number(clues.ratio, whole=clues.ratio == int(clues.ratio))
        )
    for given in clues.said[:MOST_GIVEN]:
        for operator in (cst.Multiply(), cst.Divide(), cst.Add()):
            yield cst.BinaryOperation(own, operator, number(given, whole=True))
    yield cst.BinaryOperation(own, cst.Power(), cst.Integer("2"))
    yield cst.BinaryOperation(own, cst.Add(), cst.Integer("1"))
    yield cst.BinaryOperation(own, cst.Subtract(), cst.Integer("1"))
