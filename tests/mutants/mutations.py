"""Mutants of a source file: each is one small change of its text that keeps the number of lines."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Mutant", "mutants_of"]

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
# The boolean operators of arrays.
_BITWISE: dict[type[ast.operator], tuple[str, str]] = {ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&")}
_NOT_CODE = {"__all__", "__slots__", "__version__"}


@dataclass(frozen=True, order=True)
class Mutant:
    """One change.

    Attributes:
        file: path from the root of the tree.
        function: the qualified name of the function or class that it lies in, "" at the top of a module.
        kind: the kind of change.
        start, end, new: the bytes from ``start`` to ``end`` become ``new``.
        before, after: the changed lines with blanks squeezed.
        nth: its number, from 1, among those with the same file, function, ``before`` and ``after``.
        line: where it is.
        first, last: the lines that run if the mutated code does.
        name: the module's constant that is changed, if it is one; several are separated by ``|``.
    """

    file: str
    function: str
    kind: str
    start: int
    end: int
    new: str
    before: str
    after: str
    line: int
    first: int
    last: int
    name: str = ""
    nth: int = 1

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Its identity, which other changes of the file do not affect."""
        return (self.file, self.function, self.before, self.after, self.nth)

    @property
    def digest(self) -> str:
        """A short key. It holds the package but not the file, so that a sample survives moved files."""
        parts = (self.file.split("/")[0], *map(str, self.key[1:]))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def apply(self, source: bytes) -> bytes:
        """The mutated text."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """Every mutant of a file, in the order of the text."""
    source = path.read_bytes()
    finder = _Finder(source, path.relative_to(root).as_posix())
    finder.visit(ast.parse(source))
    seen: Counter[tuple[str | int, ...]] = Counter()
    found = []
    for mutant in sorted(finder.found, key=lambda m: (m.start, m.end, m.new)):
        what = mutant.key[:-1]
        seen[what] += 1
        found.append(replace(mutant, nth=seen[what]))
    return found


class _Finder(ast.NodeVisitor):
    """Walks a module and notes what may be changed.

    Left out are docstrings, annotations, decorators, assertions, ``strict=`` of ``zip`` (an assertion too),
    imports, ``__all__``, the values of exceptions and the messages of warnings.
    """

    def __init__(self, source: bytes, file: str) -> None:
        self.source, self.file = source, file
        self.found: list[Mutant] = []
        self.names: list[str] = []
        self.bound: list[set[str]] = []  # for each enclosing function: the names that have a value
        self.lines, self.constant = (1, 1), ""
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    # --- where a node is ---

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _squeezed(self, text: bytes) -> str:
        return " ".join(text.decode().split())

    def _note(self, kind: str, start: int, end: int, new: str) -> None:
        lost = self.source[start:end].count(b"\n") - new.count("\n")
        if lost:
            new = "pass" + "\n" * lost if new == "pass" else f"({new}" + "\n" * lost + ")"
        begin = self.source.rfind(b"\n", 0, start) + 1
        stop = self.source.find(b"\n", end)
        head, tail = self.source[begin:start], self.source[end:stop]
        self.found.append(
            Mutant(
                file=self.file,
                function=".".join(self.names),
                kind=kind,
                start=start,
                end=end,
                new=new,
                before=self._squeezed(self.source[begin:stop]),
                after=self._squeezed(head + new.encode() + tail),
                line=self.source.count(b"\n", 0, start) + 1,
                first=self.lines[0],
                last=self.lines[1],
                name=self.constant,
            )
        )

    def _put(self, kind: str, node: ast.AST, new: str) -> None:
        self._note(kind, *self._span(node), new)

    def _put_between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace the operator ``old``, a regular expression, between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        # Comments are blanked, so that the operator is not found in one.
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.source[start:end])
        at = re.search(old.encode(), gap)
        if at:
            self._note(kind, start + at.start(), start + at.end(), new)

    # --- statements ---

    def visit(self, node: ast.AST) -> None:
        """Remember the lines of the statement, or of its head if it has a body."""
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        kept = self.lines
        if self.bound:
            body = getattr(node, "body", None)
            self.lines = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno)
        super().visit(node)
        self.lines = kept

    def _visit_all(self, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.append(node.name)
        # A default value is computed once, but matters wherever the function runs.
        self.lines = (node.body[0].lineno, node.end_lineno)
        self.visit(node.args)
        arguments = ast.walk(node.args)
        self.bound.append({a.arg for a in arguments if isinstance(a, ast.arg)})
        self._visit_all(node.body)
        self.bound.pop()
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        kept, self.lines = self.lines, (node.lineno, node.end_lineno)
        bound, self.bound = self.bound, []
        self._visit_all(node.body)
        self.bound = bound
        self.lines = kept
        self.names.pop()

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in [*node.defaults, *node.kw_defaults]:
            if default is not None:
                self.visit(default)

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self._put("dropped statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._put("dropped statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._put("dropped statement", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring, or an ellipsis
        if not isinstance(node.value, (ast.Yield, ast.YieldFrom)):
            self._put("dropped statement", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        self._put("returned value", node.value, "None")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if names & _NOT_CODE:
            return
        if not self.names:
            # A module's constant matters wherever it is used.
            self.constant = "|".join(sorted(names))
        self._drop_if_it_may(node, node.targets)
        self.visit(node.value)
        self.constant = ""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        alias = ast.unparse(node.annotation).endswith("TypeAlias")
        if node.value is None or alias:
            return
        if not self.names and isinstance(node.target, ast.Name):
            self.constant = node.target.id
        self._drop_if_it_may(node, [node.target])
        self.visit(node.value)
        self.constant = ""

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._put("dropped statement", node, "pass")
        for table, kind in ((_ARITHMETIC, "arithmetic"), (_BITWISE, "boolean operator")):
            if type(node.op) in table:
                old, new = table[type(node.op)]
                self._put_between(kind, node.target, node.value, re.escape(old) + "=", new + "=")
        self.visit(node.value)

    def _drop_if_it_may(self, node: ast.Assign | ast.AnnAssign, targets: list[ast.expr]) -> None:
        """Any test would notice that a name has no first value; a later assignment may go unnoticed."""
        if not self.bound:
            return
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if len(names) < len(targets) or all(name in self.bound[-1] for name in names):
            whole = [t for t in targets if isinstance(t, (ast.Name, ast.Attribute, ast.Subscript))]
            if len(whole) == len(targets):
                self._put("dropped statement", node, "pass")
        for target in targets:
            self.bound[-1].update(n.id for n in ast.walk(target) if isinstance(n, ast.Name))

    def visit_If(self, node: ast.If) -> None:
        text = ast.unparse(node.test)
        if "TYPE_CHECKING" in text:
            self._visit_all(node.orelse)
            return
        if "__name__" in text:
            return
        self._branch(node.test)
        self._visit_all(node.body)
        self._visit_all(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branch(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._put("dropped branch", node.test, "False")
        self.visit(node.test)
        self._visit_all(node.body)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self._put("dropped branch", test, "True")
            self.visit(test)

    def _branch(self, test: ast.expr) -> None:
        self._put("dropped branch", test, "False")
        self._put("dropped branch", test, "True")
        self.visit(test)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._visit_all(node.body)

    # --- expressions ---

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, op in zip(operands, operands[1:], node.ops, strict=False):
            old, new = _COMPARISONS[type(op)]
            pattern = rf"\b{old}\b" if old[0].isalpha() else re.escape(old)
            self._put_between("comparison", left, right, pattern, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(_is_text(side) for side in (node.left, node.right))
        for table, kind in ((_ARITHMETIC, "arithmetic"), (_BITWISE, "boolean operator")):
            if type(node.op) in table and not text:
                old, new = table[type(node.op)]
                self._put_between(kind, node.left, node.right, re.escape(old), new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._put_between("boolean operator", left, right, rf"\b{old}\b", new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self._span(node)[0]
        if isinstance(node.op, ast.Not):
            self._note("boolean operator", start, start + len("not "), "")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._note("arithmetic", start, start + 1, "+")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._put("constant", node, repr(not value))
        elif isinstance(value, (int, float)):
            more = value + 1 if value + 1 != value else value * 2
            self._put("constant", node, repr(more))

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        warns = ast.unparse(node.func).endswith("warn")
        self._visit_all(node.args[1:] if warns else node.args)
        for keyword in node.keywords:
            if keyword.arg != "strict":
                self.visit(keyword.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Not visited: it is text, and before Python 3.12 the positions of its parts are not known."""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )
