"""A source as libcst reads it: its expressions by line, with what surrounds each of them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider

from stablenum.diagnosis.edits.fix import lines_in

__all__ = ["Tree", "atom", "code_of", "dotted", "targets_of"]

_ATOMS = (
    cst.Name,
    cst.Attribute,
    cst.Call,
    cst.Subscript,
    cst.BaseNumber,
    cst.BaseString,
    cst.List,
    cst.Dict,
)
_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
# Places where an expression needs no parentheses.
_OPEN = (
    cst.Arg, cst.Assign, cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.Return, cst.Expr, cst.Index,
    cst.Element, cst.Param, cst.Lambda, cst.DictElement, cst.If, cst.While, cst.For,
)  # fmt: skip

_NAMES: dict[type, str] = {
    cst.Attribute: "attr",
    cst.Arg: "keyword",
    cst.Param: "name",
    cst.FunctionDef: "name",
    cst.ClassDef: "name",
}


def code_of(node: cst.CSTNode) -> str:
    """Return the text of a node."""
    return cst.Module([]).code_for_node(node)


def dotted(node: cst.CSTNode) -> str:
    """Return a name with dots, such as "jax.nn.gelu"; "" for another expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr.value}" if owner else ""
    return ""


def atom(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression that can be an operand of any operator."""
    if isinstance(node, _ATOMS) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


class Tree:
    """A source as a tree.

    Args:
        text: the source.

    Raises:
        libcst.ParserSyntaxError: the text is not Python.
    """

    def __init__(self, text: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.text, self._body = text, wrapper.module.body
        self._starts = list(itertools.accumulate(map(len, lines_in(text)), initial=0))
        self._ranges = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)

    def range_of(self, node: cst.CSTNode) -> CodeRange:
        """Return where a node begins and ends."""
        return self._ranges[node]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node around one."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode, kinds: type | tuple[type, ...]) -> cst.CSTNode | None:
        """Return the innermost node of some kinds around one; None if there is none."""
        found = self.parent(node)
        while found is not None and not isinstance(found, kinds):
            found = self.parent(found)
        return found

    @cached_property
    def statements(self) -> list[cst.CSTNode]:
        """All statements, in the order of their lines."""
        found = [n for n in self._ranges if isinstance(n, _STATEMENTS)]
        return sorted(found, key=lambda n: self._ranges[n].start.line)

    def statement_at(self, line: int) -> cst.CSTNode | None:
        """Return the innermost statement that holds a line; None if there is none."""
        around = [
            s for s in self.statements if self._ranges[s].start.line <= line <= self._ranges[s].end.line
        ]
        return max(around, key=lambda s: self._ranges[s].start.line, default=None)

    def expressions(self, statement: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """Yield the expressions of a statement, of a compound one those of its head: outer ones first."""
        waiting: list[cst.CSTNode] = [statement]
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, cst.BaseSuite) or (node is not statement and isinstance(node, _STATEMENTS)):
                continue
            if isinstance(node, cst.BaseExpression):
                yield node
            if isinstance(node, cst.Annotation | cst.Decorator):
                continue
            names = _NAMES.get(type(node))  # which are no expressions of their own
            left_out = None if names is None else getattr(node, names)
            waiting[:0] = [child for child in node.children if child is not left_out]

    def names(self, statement: cst.CSTNode) -> set[str]:
        """Return the names that a statement reads."""
        return {n.value for n in self.expressions(statement) if isinstance(n, cst.Name)}

    def attributes(self, statement: cst.CSTNode) -> set[str]:
        """Return the attributes that a statement reads."""
        return {n.attr.value for n in self.expressions(statement) if isinstance(n, cst.Attribute)}

    def may_run_otherwise(self, statement: cst.CSTNode) -> bool:
        """Return whether a statement may be run with a change: it computes something, and nothing that it
        calls, and nothing that reads what it gives a value, reads, writes or removes files or ends the
        process, as far as names tell."""
        small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        if small and all(isinstance(part, cst.Expr) for part in small):
            return False  # for its effect alone
        return not self.acts(statement) and not targets_of(statement) & self._acted_on(statement)

    def _acted_on(self, statement: cst.CSTNode) -> set[str]:
        """Return the names and attributes that are read by statements that act on files and processes: in the
        same function, or anywhere if a statement is in none."""
        function = self.function_of(statement)
        acting = [s for s in self._acting if function is None or self.function_of(s) is function]
        return set[str]().union(*(self.names(s) | self.attributes(s) for s in acting))

    @cached_property
    def _acting(self) -> list[cst.CSTNode]:
        return [s for s in self.statements if self.acts(s)]

    def acts(self, statement: cst.CSTNode) -> bool:
        """Return whether a statement acts on files or processes, as far as names tell."""
        return any(
            _EFFECTS & set(dotted(node.func).split(".")) or _last(node.func).startswith(_WRITES)
            for node in self.expressions(statement)
            if isinstance(node, cst.Call)
        )

    def function_of(self, statement: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the function around a statement, or itself; None if there is none."""
        found = (
            statement if isinstance(statement, cst.FunctionDef) else self.around(statement, cst.FunctionDef)
        )
        return found if isinstance(found, cst.FunctionDef) else None

    def within(self, function: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the statements in a function; none of another statement."""
        if not isinstance(function, cst.FunctionDef):
            return []
        own = self._ranges[function]
        ranges = ((s, self._ranges[s]) for s in self.statements)
        return [s for s, at in ranges if own.start.line < at.start.line and at.end.line <= own.end.line]

    def definitions(self, statement: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the statements that give a value to what a statement reads: in the function around it, else
        in the module; attributes anywhere; and the functions that it calls."""
        function = self.function_of(statement)
        inside = [] if function is None else self.within(function)
        own = set[str]().union(*map(targets_of, inside)) if inside else set[str]()
        outer = [s for s in self.statements if self.function_of(s) is None or isinstance(s, cst.FunctionDef)]
        names, attributes = self.names(statement), self.attributes(statement)
        for other in dict.fromkeys((*inside, *outer)):
            wanted = names & own if other in inside else names - own
            named = isinstance(other, cst.FunctionDef) and other.name.value in names | attributes
            if other is not statement and (named or targets_of(other) & wanted):
                yield other
        for other in self.statements if attributes else ():
            if targets_of(other) & attributes and other is not statement:
                yield other

    def readers(self, statement: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the statements of the same function that read what a statement gives a value."""
        function, made = self.function_of(statement), targets_of(statement)
        for other in self.within(function) if function is not None and made else ():
            if other is not statement and self.names(other) & made:
                yield other

    def uses(self, name: str) -> Iterator[cst.CSTNode]:
        """Yield the statements that read a name."""
        for statement in self.statements:
            of_def = isinstance(statement, cst.FunctionDef | cst.ClassDef)
            if not of_def and name in self.names(statement) | self.attributes(statement):
                yield statement

    def variables_at(self, line: int) -> tuple[str, ...]:
        """Return the variables of the function around a line, or of the module, the nearest first."""
        statement = self.statement_at(line)
        function = None if statement is None else self.function_of(statement)
        found = list[str]()
        for other in self.statements if function is None else self.within(function):
            if self._ranges[other].start.line <= line:
                found += sorted(targets_of(other))
        if function is not None:
            found[:0] = [p.name.value for p in function.params.params if p.name.value != "self"]
        return tuple(dict.fromkeys(reversed(found)))

    @cached_property
    def forgotten(self) -> tuple[str, ...]:
        """The constants of the module that nothing in the text reads."""
        names = [name for s in self._body for name in sorted(targets_of(s)) if name.isupper()]
        words = Counter(re.findall(r"\w+", self.text))
        return tuple(n for n in names if words[n] == 1)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The attributes of ``self`` that are given a value and that nothing in the text reads."""
        names = dict.fromkeys(name for s in self.statements for name in sorted(_own_attributes(s)))
        words = Counter(re.findall(r"\w+", self.text))
        return tuple(n for n in names if words[n] == 1)

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """The functions of the module that nothing in the text names, but for those that act on files."""
        functions = [s for s in self._body if isinstance(s, cst.FunctionDef)]
        names = [s.name.value for s in functions if not any(map(self.acts, self.within(s)))]
        words = Counter(re.findall(r"\w+", self.text))
        return tuple(n for n in names if words[n] == 1 and n not in ("left", "right", "program"))

    def with_next_first(self, statement: cst.CSTNode) -> str:
        """Return the source with a statement after the next one; "" if no simple one follows it there."""
        around = self.parent(statement)
        body = list(getattr(around, "body", ()))
        place = body.index(statement) if statement in body else len(body)
        both = body[place : place + 2]
        simple = all(isinstance(s, cst.SimpleStatementLine) and not self.acts(s) for s in both)
        if len(both) < 2 or not simple:
            return ""
        ranges, spans, text = [self._ranges[s] for s in both], [], self.text
        short = all(at.start.line == at.end.line for at in ranges)
        for at in ranges:
            begin, end = (self._starts[p.line - 1] + p.column for p in (at.start, at.end))
            if short:  # with what is written behind it
                end = begin + len(re.split(r"[\r\n]", text[begin:], maxsplit=1)[0])
            spans.append((begin, end))
        (a, b), (c, d) = spans
        return f"{text[:a]}{text[c:d]}{text[b:c]}{text[a:b]}{text[d:]}"

    def with_node(self, old: cst.BaseExpression, new: cst.BaseExpression) -> str:
        """Return the source with another expression, in parentheses where it needs them."""
        at, before, behind = self._ranges[old], 0, 0  # without its parentheses
        if old.lpar and isinstance(new, _ATOMS):
            before, behind = (sum(len(code_of(p)) for p in some) for some in (old.lpar, old.rpar))
        elif old.lpar:
            new = new.with_changes(lpar=[], rpar=[])
        elif not (isinstance(new, _ATOMS) or new.lpar or isinstance(self.parent(old), _OPEN)):
            new = atom(new)
        if _breaks_lines(new) and not isinstance(self.parent(old), cst.Arg | cst.Element):
            new = new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        begin = self._starts[at.start.line - 1] + at.start.column
        end = self._starts[at.end.line - 1] + at.end.column
        return f"{self.text[: begin - before]}{code_of(new)}{self.text[end + behind :]}"


def _breaks_lines(node: cst.BaseExpression) -> bool:
    """Return whether an expression over several lines is no bracket itself, as a chain of methods is none."""
    code = code_of(node)
    if "\n" not in code:
        return False
    try:
        compile(code, "<changed>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True
    return False


def _last(function: cst.BaseExpression) -> str:
    name = function.attr if isinstance(function, cst.Attribute) else function
    return name.value if isinstance(name, cst.Name) else ""


# What acts on files and processes: modules, functions, and how the names of methods begin.
_EFFECTS = {"os", "shutil", "subprocess", "sys", "open", "exec", "eval", "exit", "quit", "Path", "pathlib"}
_WRITES = (
    "save",
    "write",
    "dump",
    "unlink",
    "remove",
    "rename",
    "replace_",
    "rmdir",
    "rmtree",
    "mkdir",
    "touch",
    "copy2",
)


def _own_attributes(statement: cst.CSTNode) -> set[str]:
    """Return the attributes of ``self`` to which a statement gives a value."""
    found = set[str]()
    for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
        targets = [t.target for t in small.targets] if isinstance(small, cst.Assign) else []
        targets += [small.target] if isinstance(small, cst.AnnAssign) else []
        found |= {t.attr.value for t in targets if isinstance(t, cst.Attribute) and dotted(t.value) == "self"}
    return found


def targets_of(statement: cst.CSTNode) -> set[str]:
    """Return the names and attributes to which a statement gives a value."""
    small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    return set[str]().union(*map(_targets, small))


def _targets(small: cst.CSTNode) -> set[str]:
    targets: list[cst.CSTNode] = []
    if isinstance(small, cst.Assign):
        targets = [t.target for t in small.targets]
    elif isinstance(small, cst.AnnAssign | cst.AugAssign):
        targets = [small.target]
    found = set[str]()
    while targets:
        target = targets.pop()
        if isinstance(target, cst.Name):
            found.add(target.value)
        elif isinstance(target, cst.Attribute):
            found.add(target.attr.value)
        elif isinstance(target, cst.Tuple | cst.List):
            targets += [e.value for e in target.elements]
    return found
