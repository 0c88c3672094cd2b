"""Measure one row in this process: time all variants in turn, check what they computed, count their work."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.steps.errors import BenchmarkError, NoisyError, WrongResultError
from benchmarks.steps.reference import TOLERANCE, check_against_each_other, check_parameters
from benchmarks.steps.rows import CLIPPED, LABELS, UNCLIPPED, Row, on_device
from benchmarks.timing import Times, interleaved, uncertainty

__all__ = ["check_spread", "compared", "measure", "measure_jax", "measure_torch"]

# What the extra time of ours is compared with.
PEER = {"torch": "scaler", "jax": "apply_if_finite"}
_TENSORS, _ELEMENTS = 40, 64  # looked at by the reference


def measure(row: Row, *, device: str = "cpu", attempt: int = 1) -> dict[str, Any]:
    """Time, check and count the row's variants; a later attempt has more rounds.

    Raises:
        MissingPeerError, WrongResultError, NoisyError: there is no result.
    """
    row, rounds = on_device(row, device), row.rounds * attempt
    if row.framework == "torch":
        return measure_torch(row, device=device, rounds=rounds)
    return measure_jax(row, device=device, rounds=rounds)


def check_spread(row: Row, times: Mapping[str, Times]) -> None:
    """See that the ratio to the bare step is known well enough of every variant.

    It is taken round by round, so that a mood of the machine that lasts longer than a round cancels.

    Raises:
        NoisyError: one is not.
    """
    known = {name: uncertainty(t.ratios_to(times["bare"])) for name, t in times.items() if name != "bare"}
    restless = {name: f"{u:.1%}" for name, u in known.items() if not u <= row.bound}
    if restless:
        raise NoisyError(
            f"{row.name}: the ratios to the bare step are uncertain by {restless}, beyond "
            f"{row.bound:.0%}. The machine is too busy; nothing is reported."
        )


def _extra(t: Times, bare: Times) -> float:
    """Milliseconds above the bare step, the median over the rounds."""
    return statistics.median(mine - base for mine, base in zip(t.samples, bare.samples, strict=True))


def compared(row: Row, times: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """Each variant's median, spread, ratio to bare, extra time, and that over the peer's extra.

    Ratios and extra time are medians over the rounds, of each round by itself, and the quartiles are of them.
    """
    bare, peer = times["bare"], times.get(PEER[row.framework])
    found: dict[str, dict[str, Any]] = {}
    for name, t in times.items():
        figures: dict[str, Any] = {"label": LABELS[name], **t.as_dict()}
        figures["ratio_to_bare"] = round(statistics.median(t.ratios_to(bare)), 4)
        if name != "bare":
            figures["uncertainty"] = round(uncertainty(t.ratios_to(bare)), 4)
        figures["extra_ms"] = round(_extra(t, bare), 4)
        if peer is not None and name != "bare":
            figures["ratio_to_peer"] = round(t.median / peer.median, 4)
            extra = _extra(peer, bare)
            if extra > 0:  # else the peer costs nothing that could be seen
                figures["extra_over_peers"] = round(_extra(t, bare) / extra, 4)
            rounds = [
                (mine - base) / (theirs - base)
                for mine, theirs, base in zip(t.samples, peer.samples, bare.samples, strict=True)
                if theirs > base
            ]
            if len(rounds) > 1:
                quarters = statistics.quantiles(rounds, n=4)
                figures["extra_over_peers_quartiles"] = [round(q, 4) for q in (quarters[0], quarters[2])]
        found[name] = figures
    return found


def _result(
    row: Row, device: str, rounds: int, times: Mapping[str, Times], off: Mapping[str, float]
) -> dict[str, Any]:
    figures = compared(row, times)
    for name, value in off.items():
        figures[name]["distance_from_reference"] = float(f"{value:.3g}")
    return {
        "name": row.name,
        "device": device,
        "framework": row.framework,
        "optimizer": row.optimizer,
        "kernel": row.kernel,
        "size": row.size,
        "parameters": row.parameters,
        "tensors": row.tensors,
        "dtype": row.dtype,
        "gradient_bytes": row.gradient_bytes,
        "rounds": rounds,
        "uncertainty_bound": row.bound,
        "tolerance": TOLERANCE[row.dtype],
        "peer": PEER[row.framework],
        "variants": figures,
    }


def _sampled(tensors: list[Any], to_numpy: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Some elements of some tensors, float64; the first and the last among them."""
    which = sorted({round(i) for i in np.linspace(0, len(tensors) - 1, min(_TENSORS, len(tensors)))})
    parts = []
    for i in which:
        flat = tensors[i].reshape(-1)
        each = np.unique(np.linspace(0, flat.shape[0] - 1, _ELEMENTS).astype(int))
        parts.append(to_numpy(flat[each.tolist()] if hasattr(flat, "untyped_storage") else flat[each]))
    return np.concatenate(parts)


def _pairs(row: Row) -> list[tuple[str, str]]:
    """Each variant with the first of those that have to agree with it."""
    pairs = []
    for kind in (UNCLIPPED, CLIPPED):
        names = [name for name in row.variants if name in kind]
        pairs += [(names[0], other) for other in names[1:]]
    return pairs


def _way(found: np.ndarray, start: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(found - start))))


# --- PyTorch ---------------------------------------------------------------------------------


def measure_torch(row: Row, *, device: str, rounds: int) -> dict[str, Any]:
    """See :func:`measure`."""
    import torch

    from benchmarks.steps import torch_counts
    from benchmarks.steps.devices import timer_of
    from benchmarks.steps.torch_variants import TorchProblem, build

    def numbers(t: Any) -> np.ndarray:
        return t.detach().double().cpu().numpy()

    problem = TorchProblem(row, device)
    variants = build(problem)
    start = _sampled(variants["bare"].params, numbers)
    gradient = _sampled(problem.raw, numbers)

    def prepare(name: str) -> None:
        problem.put(variants[name].steps, variants[name].scale)
        variants[name].steps += 1

    times = interleaved(
        {name: variant.step for name, variant in variants.items()},
        rounds=rounds,
        warmup=row.warmup,
        prepare=prepare,
        timer=timer_of(device),
    )
    off, samples = {}, {}
    for name, variant in variants.items():
        variant.check(variant.steps)
        samples[name] = _sampled(variant.params, numbers)
        off[name] = check_parameters(
            row,
            name,
            start=start,
            gradient=gradient,
            found=samples[name],
            norm=problem.norm,
            steps=variant.steps,
        )
    apart = {}
    for one, other in _pairs(row):
        square = sum(
            float((a.detach().float() - b.detach().float()).square().sum(dtype=torch.float64))
            for a, b in zip(variants[one].params, variants[other].params, strict=True)
        )
        apart[one, other] = math.sqrt(square / row.parameters) / _way(samples[one], start)
    check_against_each_other(row, apart)
    check_spread(row, times)
    result = _result(row, device, rounds, times, off)
    for name, variant in variants.items():
        counts = torch_counts.count(problem, variant)
        if device == "cuda":
            counts |= torch_counts.kernels(problem, variant)
        result["variants"][name] |= counts | {"peak_bytes": torch_counts.peak_bytes(problem, variant)}
        if variant.skips:
            _check_torch_skip(row, problem, variant)
    return result


def _check_torch_skip(row: Row, problem: Any, variant: Any) -> None:
    """One infinite gradient, and nothing may move."""
    import torch

    tracked = [*variant.params]
    tracked += [
        t for s in variant.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    ]
    picked = [tracked[i] for i in sorted({*range(3), *range(len(tracked) - 3, len(tracked))})]
    before = [t.detach().clone() for t in picked]
    problem.put(variant.steps, variant.scale)
    problem.grads[-1].view(-1)[-1] = math.inf
    variant.step()
    if not all(torch.equal(a, b.detach()) for a, b in zip(before, picked, strict=True)):
        raise WrongResultError(f"{row.name}: {variant.name!r} did not skip a step with an infinite gradient.")


# --- JAX -------------------------------------------------------------------------------------


def measure_jax(row: Row, *, device: str, rounds: int) -> dict[str, Any]:
    """See :func:`measure`. On JAX's default device."""
    import jax
    import jax.numpy as jnp

    from benchmarks.steps import jax_counts
    from benchmarks.steps.jax_variants import JaxProblem, build

    def numbers(x: Any) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32), np.float64)

    if device == "cuda" and jax.default_backend() != "gpu":
        raise BenchmarkError(
            f"{row.name}: JAX runs on {jax.default_backend()!r}. Install its build for CUDA: "
            "`python -m pip install 'jax[cuda12]'`."
        )
    problem = JaxProblem(row)
    start, gradient = (_sampled(list(tree.values()), numbers) for tree in (problem.parameters(), problem.raw))
    variants = build(problem)
    times = interleaved(
        {name: variant.step for name, variant in variants.items()},
        rounds=rounds,
        warmup=row.warmup,
        prepare=lambda name: variants[name].put(),
    )
    off, samples = {}, {}
    for name, variant in variants.items():
        variant.check()
        samples[name] = _sampled(list(variant.carry[0].values()), numbers)
        off[name] = check_parameters(
            row,
            name,
            start=start,
            gradient=gradient,
            found=samples[name],
            norm=problem.norm,
            steps=variant.steps,
        )
    apart = {}
    for one, other in _pairs(row):
        square = sum(
            float(jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32)).sum())
            for a, b in zip(variants[one].carry[0].values(), variants[other].carry[0].values(), strict=True)
        )
        apart[one, other] = math.sqrt(square / row.parameters) / _way(samples[one], start)
    check_against_each_other(row, apart)
    check_spread(row, times)
    result = _result(row, jax.default_backend(), rounds, times, off)
    for name, variant in variants.items():
        result["variants"][name] |= jax_counts.count(variant)
        if variant.skips:
            _check_jax_skip(row, problem, variant)
        variant.carry = ()
        gc.collect()
    return result


def _check_jax_skip(row: Row, problem: Any, variant: Any) -> None:
    """One infinite gradient, and nothing may move."""
    import jax
    import jax.numpy as jnp

    grads = dict(problem.gradients(0, variant.scale))
    last = list(grads)[-1]
    grads[last] = grads[last].reshape(-1).at[-1].set(jnp.inf).reshape(row.shape)
    before = _first_and_last(variant, row)
    variant.step_on(grads)
    after = _first_and_last(variant, row)
    if not jax.tree.all(jax.tree.map(np.array_equal, before, after)):
        raise WrongResultError(f"{row.name}: {variant.name!r} did not skip a step with an infinite gradient.")


def _first_and_last(variant: Any, row: Row) -> list[np.ndarray]:
    """The first and the last parameter, and the first and the last of each of the optimizer's moments."""
    import jax
    import jax.numpy as jnp

    like_parameters = [leaf for leaf in jax.tree.leaves(variant.carry[:2]) if leaf.shape == row.shape]
    ends = like_parameters[:: row.tensors] + like_parameters[row.tensors - 1 :: row.tensors]
    return [np.asarray(leaf.astype(jnp.float32)) for leaf in ends]
