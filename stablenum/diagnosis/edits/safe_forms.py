"""Propose edits that put the safe function of a verdict in the place of what the user wrote."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.edits.edit import Edit, segment
from stablenum.diagnosis.edits.expressions import Called, ancestors, called, expression_at, span_of, text_of
from stablenum.diagnosis.edits.written_by_hand import argument_of
from stablenum.diagnosis.replay.evidence import Verdict
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.operations import REMEDIES, ROWS

__all__ = ["edits_for"]

# How operations are written that have other names in the source.
_WRITTEN = {
    "acos": ("acos", "arccos"), "arctanh": ("arctanh", "atanh"), "atan2": ("arctan2", "atan2"),
    "div": ("div", "divide", "true_divide"), "norm": ("norm", "vector_norm"),
    "pow": ("float_power", "pow", "power"),
}  # fmt: skip
# Functions whose other arguments mean the same as those of the safe function.
_SAME_ARGUMENTS = ("losses.cosine_similarity", "losses.cross_entropy", "losses.gaussian_nll")
# Safe functions that are given something else than the function in whose place they are put.
_OTHER_ARGUMENTS = (
    "losses.binary_cross_entropy", "losses.binary_focal", "losses.kl_divergence", "losses.poisson_nll",
    "numerics.layer_norm", "numerics.rms_norm",
)  # fmt: skip
_AXES = ("axis", "dim")


def edits_for(finding: Finding, verdict: Verdict, source: str) -> list[Edit]:
    """Return edits of the finding's expression, the most specific first; none if the verdict names no safe
    function, or if the expression does not show what the function would be given.

    Args:
        finding: the first finding.
        verdict: has the line of code with the safe function.
        source: the text of the finding's file.

    Example:
        >>> from stablenum.diagnosis.replay.judge import Evidence, judge
        >>> from stablenum.diagnosis.replay.values import Place
        >>> at = Place("a.py", 1, "", "y = (a * m).sum() / n", (1, 1, 4, 21))
        >>> f = Finding(operation="div", phase="forward", kind="nan", place=at)
        >>> verdict = judge(Evidence(framework="torch", findings=(f,), loss_finite=False))
        >>> edits_for(f, verdict, "y = (a * m).sum() / n\\n")[0].after
        'stablenum_torch.numerics.divide((a * m).sum(), n, fill=0.0)'
    """
    place, at = finding.place, expression_at(finding.place, source)
    if place is None or at is None or not verdict.code:
        return []
    tree, node = at
    proposed = [*_by_hand(finding, verdict, tree, node, source), *_in_place(finding, verdict, node, source)]
    found: dict[str, Edit] = {}
    for where, text in proposed:
        span = span_of(where)
        if span is not None:
            before, module = segment(source, span), _namespace(text)
            found.setdefault(text, Edit(file=place.file, span=span, before=before, after=text, module=module))
    return list(found.values())


def _by_hand(
    f: Finding, verdict: Verdict, tree: ast.AST, node: ast.expr, source: str
) -> Iterator[tuple[ast.expr, str]]:
    """Yield the function in place of the whole expression that writes it out."""
    for whole in ancestors(tree, node) if f.by_hand else ():
        found = argument_of(f.by_hand, whole)
        if found is None:
            continue
        argument, negated = found
        text = text_of(source, [argument])[0]
        call = _filled(verdict.code, [f"-({text})" if negated else text], called(whole), source, f)
        if call:
            yield whole, call
        return


def _in_place(f: Finding, verdict: Verdict, node: ast.expr, source: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield the safe function in place of the operation itself."""
    written = called(node)
    if written is None or f.options.get("count", math.inf) <= f.options.get("correction", 0):
        return  # without its correction, the function would give other numbers for longer rows
    namespace = _namespace(verdict.code)
    operation = "div" if written.name in _WRITTEN["div"] else f.operation  # 1 / x is a reciprocal
    if operation != f.operation and f.operation != "reciprocal":
        return
    if written.name not in _WRITTEN.get(operation, (operation,)):
        return
    code = verdict.code
    if f.by_hand or operation != f.operation:
        safe = REMEDIES.get(operation)
        if safe is None or "{axis}" in safe.code or not namespace:
            return
        code = safe.code.format(ns=namespace)
    operands = text_of(source, written.operands)
    if operation == "pow" and len(operands) == 2 and not _is_number(written.operands[1]):
        call = _power_of_arrays(operands, namespace, source)
    else:
        call = _filled(code, operands, written, source, f)
    if call:
        yield node, call


def _filled(code: str, operands: Sequence[str], written: Called | None, source: str, f: Finding) -> str:
    """Return the line of code with the user's expressions; "" if they do not fit."""
    body = ast.parse(code, mode="eval").body
    if not isinstance(body, ast.Call):
        return ""
    name = ast.unparse(body.func)
    kind = ".".join(name.split(".")[-2:])
    if kind in _OTHER_ARGUMENTS and not f.by_hand:
        return ""
    wanted = len(body.args)
    plain = sum(isinstance(a, ast.Constant) for a in body.args)  # the exponent of a power
    if len(operands) < wanted - plain:
        return ""
    given = [*operands[: wanted - plain], *(ast.unparse(a) for a in body.args[wanted - plain :])]
    options = {k.arg: ast.unparse(k.value) for k in body.keywords if not isinstance(k.value, ast.Name)}
    if kind in ROWS:
        options |= _axis_of(written, operands, options, f, source)
    if kind in _SAME_ARGUMENTS and written is not None:
        given += operands[wanted - plain :]
        options |= {k.arg: text_of(source, [k.value])[0] for k in written.keywords}
    return f"{name}({', '.join([*given, *(f'{k}={v}' for k, v in options.items())])})"


def _is_number(node: ast.expr) -> bool:
    """Return whether an expression is a number that is written out, such as ``-1.5`` or ``1 / 3``."""
    parts = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
    return all(isinstance(part, parts) for part in ast.walk(node))


def _power_of_arrays(operands: Sequence[str], namespace: str, source: str) -> str:
    """Return a power whose exponent may be an array, which the safe power does not take."""
    base, exponent = operands
    own = "torch" if namespace == "stablenum_torch" else "jnp" if " as jnp" in source else "jax.numpy"
    return f"{own}.exp(({exponent}) * {namespace}.numerics.log({base}))"


def _axis_of(
    written: Called | None, operands: Sequence[str], options: dict[str | None, str], f: Finding, source: str
) -> dict[str | None, str]:
    """Return the axis of the user's call where the recording does not show it."""
    word = next((word for word in _AXES if word in options), None)
    if "axis" in f.options or written is None or word is None:
        return {}
    keyword = next((k for k in written.keywords if k.arg in _AXES), None)
    if keyword is not None:
        return {word: text_of(source, [keyword.value])[0]}
    if len(operands) > 1:
        return {word: operands[1]}
    return {word: "None"} if written.name in ("norm", "std", "var", "vector_norm") else {}


def _namespace(code: str) -> str:
    return next((name for name in ("stablenum_torch", "stablenum_jax") if name in code), "")
