"""Each planted JAX failure inside ``shard_map`` over four devices, with the fault on one of them.

``python -m tests.corpus.sharding FILE`` diagnoses every case in a process with four devices, and writes
what is right. The figures of all cases are kept in ``benchmarks/results/diagnosis-shards.json``. With
``healthy`` in place of names of cases, it writes which of the healthy programs are blamed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from corpus.case import Program, build, modules
from corpus.tools.ours import replay
from tests.corpus.diagnosing import compare
from tests.corpus.running import plain

__all__ = ["DEVICES", "Sharded", "diagnose_all", "sharded"]

DEVICES = 4
BAD = 2  # the shard with the fault


@dataclass(frozen=True)
class Sharded:
    """A planted failure inside ``shard_map``.

    Attributes:
        how: "data" if only the data is split and the parameters are the same everywhere, "all" if every
            argument is, "everywhere" if the program fails with any argument, so that all shards fail.
        check_vma: as for ``shard_map``; False for a program that JAX rejects otherwise.
    """

    program: Program
    how: str
    check_vma: bool


@dataclass(frozen=True, kw_only=True)
class Right:
    """What is right in the diagnosis of one case; ``shard`` is None where no operation is to be named."""

    name: str
    how: str
    check_vma: bool
    line: bool
    cause: bool
    shard: bool | None
    said: str


def sharded(program: Program) -> Sharded:
    """The program on four shards, of which one has the arguments of the case and three harmless ones."""
    args = program.args
    for how, kept in (("data", args[:1]), ("all", ())):
        # A step that differentiates adds up the gradients of parameters that all shards have in common.
        if how == "data" and (len(args) < 2 or not is_loss(program)):
            continue
        for harmless in harmless_arguments(args[len(kept) :]):
            if finite(replace(program, args=(*kept, *harmless))):
                split = [joined(*pair) for pair in zip(args[len(kept) :], harmless)]
                return on_a_mesh(program, (*kept, *split), len(kept), how)
    return on_a_mesh(program, args, len(args), "everywhere")


def on_a_mesh(program: Program, args: tuple[Any, ...], kept: int, how: str) -> Sharded:
    """The program with its arguments split after the first ``kept``."""
    for check in (True, False):
        wrapped = wrap(program, args, kept, check)
        try:
            traced = jax.grad(wrapped, has_aux=has_aux(program)) if is_loss(program) else wrapped
            jax.eval_shape(traced, *args)
        except (TypeError, ValueError, NotImplementedError):
            if not check:
                raise
            continue
        return Sharded(Program(wrapped, args, program.options), how, check)
    raise AssertionError("never reached")


def wrap(program: Program, args: tuple[Any, ...], kept: int, check: bool) -> Any:
    """The step inside ``shard_map``: the mean of a loss, or all results of the shards side by side."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    scalars = [jax.tree.map(jnp.ndim, a) for a in program.args]
    loss, aux = is_loss(program), has_aux(program)

    def body(*parts: Any) -> Any:
        split = [jax.tree.map(_without_axis, *pair) for pair in zip(parts[kept:], scalars[kept:])]
        given = [*parts[:kept], *split]
        result = program.step(*given)
        if not loss:
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result)
        mean = jax.lax.pmean(result[0] if aux else result, "data")
        return (mean, jax.tree.map(lambda x: jnp.asarray(x)[None], result[1])) if aux else mean

    specs = tuple(P() if i < kept else P("data") for i in range(len(args)))
    out = ((P(), P("data")) if aux else P()) if loss else P("data")
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)


def _without_axis(x: Any, ndim: int) -> Any:
    """What a shard has of an argument; a number was one of a row of them."""
    return x if ndim else x.reshape(())


def has_aux(program: Program) -> bool:
    """Whether the step returns more than its loss."""
    return bool(program.options.get("has_aux"))


def is_loss(program: Program) -> bool:
    """Whether the step returns a loss that is differentiated."""
    shape = jax.eval_shape(program.step, *program.args)
    if has_aux(program):
        shape = shape[0]
    return program.options.get("gradients") is not False and getattr(shape, "shape", None) == ()


def finite(program: Program) -> bool:
    """Whether a step is finite, without any diagnosis."""
    try:
        value, norm, _ = plain("jax", program)
    except (TypeError, ValueError, FloatingPointError):
        return False
    return value and norm


def harmless_arguments(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Arguments of the same structure that may be harmless, the likeliest first."""
    for number in (0.5, 1.0, 0.1, 2.0):
        for whole in (True, False):
            yield jax.tree.map(partial(_harmless, number=number, whole=whole), args)
    yield jax.tree.map(_distinct, args)


def _harmless(x: Any, number: float, whole: bool) -> Any:
    x = np.asarray(x)
    if x.dtype.kind == "b":
        return jnp.full(x.shape, whole)
    if x.dtype.kind in "iu":
        return jnp.asarray(np.minimum(np.abs(x), 1) if whole else np.zeros_like(x))
    spread = 1.0 + 0.3 * np.arange(x.size).reshape(x.shape) / max(x.size, 1)
    return jnp.asarray(number * spread, dtype=x.dtype)


def _distinct(x: Any) -> Any:
    """A matrix far from singular, with distinct eigenvalues."""
    x = np.asarray(x)
    if x.dtype.kind in "biu" or x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        return _harmless(x, 0.5, True)
    return jnp.asarray(np.broadcast_to(np.diag(1.0 + np.arange(x.shape[-1])), x.shape), dtype=x.dtype)


def joined(bad: Any, harmless: Any) -> Any:
    """The arguments of all shards along the first axis."""

    def join(a: Any, b: Any) -> Any:
        parts = [jnp.atleast_1d(jnp.asarray(a if i == BAD else b)) for i in range(DEVICES)]
        return jnp.concatenate(parts)

    return jax.tree.map(join, bad, harmless)


def diagnose(module: ModuleType) -> Right:
    """What is right in the diagnosis of a case on four shards."""
    make = build(module, "jax")
    assert make is not None
    case = sharded(make())
    report = replay("jax", case.program)
    outcome = compare(module, "jax", report)
    first = report.findings[0] if report.findings else None
    shard: bool | None = None
    said = first.shard if first else ""
    if module.CASE.operations("jax"):
        wanted = ("every shard",) if case.how == "everywhere" else (f"the shard data={BAD} (device {BAD})",)
        # What all shards hold before the step, such as a parameter, is nothing of a shard.
        wanted += ("",) if case.how == "everywhere" and first and first.phase == "before" else ()
        shard = said in wanted
    return Right(
        name=outcome.name,
        how=case.how,
        check_vma=case.check_vma,
        line=outcome.line,
        cause=outcome.cause,
        shard=shard,
        said=f"{outcome.said}; on {said or 'no shard'}; {'; '.join(report.notes)}",
    )


def diagnose_all(names: tuple[str, ...] = ()) -> list[Right]:
    """What is right for every case that JAX can express, or for those of some names."""
    cases = [m for m in modules("failing") if build(m, "jax")]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in cases:
            if not names or module.__name__.rpartition(".")[2] in names:
                found.append(diagnose(module))
                jax.clear_caches()
    return found


def blamed() -> list[str]:
    """The healthy programs, the same on all shards, in which a fault is found, and what is said of it."""
    found = []
    for module in modules("healthy"):
        make = build(module, "jax")
        if make is None:
            continue
        program = make()
        args = tuple(joined(a, a) for a in program.args)
        report = replay("jax", on_a_mesh(program, args, 0, "all").program)
        if not report.ok or report.notes:
            found.append(f"{module.__name__}: {report}")
    return found


def figures(found: list[Right]) -> dict[str, Any]:
    """How many diagnoses are right, and which are not."""
    judged = [r for r in found if r.shard is not None]
    return {
        "jax": jax.__version__,
        "devices": DEVICES,
        "failures": len(found),
        "line": sum(r.line for r in found),
        "cause": sum(r.cause for r in found),
        "with a shard to name": len(judged),
        "shard": sum(bool(r.shard) for r in judged),
        "split": dict(sorted(Counter(r.how for r in found).items())),
        "without check_vma": [r.name for r in found if not r.check_vma],
        "missed": {r.name: r.said for r in found if not (r.line and r.cause and r.shard is not False)},
    }


def main() -> None:
    """Diagnose the cases that the arguments name, or all of them."""
    file, *names = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", DEVICES)
    made = blamed() if names == ["healthy"] else figures(diagnose_all(tuple(names)))
    Path(file).write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
