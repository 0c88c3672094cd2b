"""Read from a compiled XLA program which kernels run in an ordinary step, and how much memory they touch.

XLA's own cost analysis counts the most expensive branch of every conditional. A guarded step has a branch
that is hardly ever taken: it measures again those norms that are beyond float32's range. Conditionals are
therefore distinguished here: one that returns at least as many bytes as all gradients is the step itself, and
its most expensive branch is counted; one that returns less is such a measurement, and its cheapest branch is
counted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Work", "ordinary_step"]

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8, "s8": 1, "u8": 1, "s16": 2, "u16": 2}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
# Instructions that name, pass or slice arrays and have no kernel of their own.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "iota",
}
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_CALLS = ("call", "conditional", "while")


@dataclass
class Work:
    """The work of a program or a part of it.

    Attributes:
        kernels: the number of separate instructions; a fusion is one.
        traffic: bytes of all their operands and results.
        read: bytes of their operands that are watched arguments of the program.
        collectives: the number of kernels that communicate between devices.
        sent: bytes of the results of the collectives.
    """

    kernels: int = 0
    traffic: int = 0
    read: int = 0
    collectives: int = 0
    sent: int = 0

    def add(self, other: Work) -> None:
        """Add another part's work to this one."""
        self.kernels += other.kernels
        self.traffic += other.traffic
        self.read += other.read
        self.collectives += other.collectives
        self.sent += other.sent


@dataclass
class _Instruction:
    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


@dataclass
class _Computation:
    instructions: list[_Instruction] = field(default_factory=list)
    root: str = ""


def ordinary_step(program: str, watched: str, *, gradient_bytes: int) -> Work:
    """The work of a step in which nothing goes wrong.

    Args:
        program: ``compiled.as_text()``.
        watched: the start of the ``op_name`` of the watched arguments (``"grads["``).
        gradient_bytes: the bytes of all gradients, which distinguish conditionals as described above.

    Raises:
        ValueError: the program has no entry or no watched argument, so its format is not the expected one.
    """
    computations, entry = _parse(program)
    if not entry:
        raise ValueError("program must be optimized HLO with an ENTRY computation; found none.")
    marked = {
        i.name
        for i in computations[entry].instructions
        if i.kind == "parameter" and f'op_name="{watched}' in i.rest
    }
    if not marked:
        raise ValueError(f"program must have an argument whose op_name begins with {watched!r}; found none.")
    _, work = _walk(computations, entry, None, marked, gradient_bytes)
    return work


def _parse(program: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, now = "", _Computation()
    for line in program.splitlines():
        header = _HEADER.match(line)
        if header:
            now = computations[header.group(2)] = _Computation()
            entry = header.group(2) if header.group(1) else entry
            continue
        found = _INSTRUCTION.match(line)
        if found:
            root, name, shape, kind, rest = found.groups()
            inside, after = _split(rest)
            operands = [inside.strip()] if kind == "parameter" else _NAME.findall(inside)
            now.instructions.append(_Instruction(name, shape, kind, operands, after))
            now.root = name if root else now.root
    return computations, entry


def _split(rest: str) -> tuple[str, str]:
    """The text up to the parenthesis that closes the one already open, and the text after it."""
    depth = 1
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:i], rest[i + 1 :]
    return rest, ""


def _size(shape: str) -> int:
    return sum(
        _BYTES.get(kind, 4) * math.prod(int(n) for n in sides.split(",") if n)
        for kind, sides in _SHAPE.findall(shape)
    )


def _walk(
    computations: dict[str, _Computation], name: str, given: list[Any] | None, marked: set[str], large: int
) -> tuple[Any, Work]:
    """Whether a computation's result is a watched argument (a bool, or a list for a tuple), and its work.

    ``given`` says for each parameter whether it is watched; None for the entry, where ``marked`` says it.
    """
    watch: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    work = Work()
    for i in computations[name].instructions:
        sizes[i.name] = _size(i.shape)
        of = [watch.get(operand, False) for operand in i.operands]
        watch[i.name] = False
        if i.kind == "parameter":
            watch[i.name] = i.name in marked if given is None else given[int(i.operands[0])]
        elif i.kind == "tuple":
            watch[i.name] = of
        elif i.kind == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", i.rest)[0])
            watch[i.name] = of[0][index] if isinstance(of[0], list) else False
        elif i.kind == "bitcast":
            watch[i.name] = of[0]
        elif i.kind in _CALLS:
            result, inner = _called(computations, i, of, large)
            watch[i.name] = result
            work.add(inner)
        elif i.kind not in _FREE:
            distinct = dict.fromkeys(i.operands)
            work.kernels += 1
            work.traffic += sizes[i.name] + sum(sizes.get(operand, 0) for operand in distinct)
            work.read += sum(sizes[operand] for operand in distinct if watch.get(operand) is True)
            if i.kind.removesuffix("-start") in _COLLECTIVES:
                work.collectives += 1
                work.sent += sizes[i.name]
            if i.kind == "copy":
                watch[i.name] = of[0]  # the same values, so reading the copy is a pass too
    return watch.get(computations[name].root, False), work


def _called(
    computations: dict[str, _Computation], i: _Instruction, of: list[Any], large: int
) -> tuple[Any, Work]:
    """The same two results for a call, a loop (one iteration) or a conditional."""
    if i.kind == "call":
        return _walk(computations, _attribute(i, "to_apply")[0], of, set(), large)
    if i.kind == "while":
        return _walk(computations, _attribute(i, "body")[0], of, set(), large)
    branches = _attribute(i, "branch_computations") or [
        *_attribute(i, "true_computation"),
        *_attribute(i, "false_computation"),
    ]
    done = [
        _walk(computations, branch, [argument], set(), large)
        for branch, argument in zip(branches, of[1:], strict=True)
    ]
    choose = max if _size(i.shape) >= large else min
    return choose(done, key=lambda result_and_work: result_and_work[1].traffic)


def _attribute(i: _Instruction, name: str) -> list[str]:
    found = re.search(rf"\b{name}=(\{{[^}}]*\}}|%[\w.\-]+)", i.rest)
    return [] if found is None else _NAME.findall(found.group(1))
