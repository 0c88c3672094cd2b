"""Kernels that have no float64: the attention of cuDNN, as its formula, and others, in their own format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import stablenum
import stablenum_jax

SHAPE = (2, 8, 4, 16)  # batch, positions, heads, size
KEYS = jax.random.split(jax.random.key(0), 5)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let JAX trace calls of the kernels where there is no cuDNN; there is no public switch."""
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(kernels, "check_is_flash_attention", lambda *args: None)


def program(implementation: str, dtype: Any = jnp.bfloat16, heads: int = 4, **options: Any) -> Any:
    query, kept = jax.random.normal(KEYS[0], SHAPE), (*SHAPE[:2], heads, SHAPE[3])
    params = {"q": query, "k": jax.random.normal(KEYS[1], kept), "v": jax.random.normal(KEYS[2], kept)}
    if "bias" in options:
        params["bias"] = options.pop("bias")
    target = jax.random.normal(KEYS[3], SHAPE)

    def loss_fn(params: Any) -> Any:
        narrow = {name: x.astype(dtype) for name, x in params.items()}
        out = jax.nn.dot_product_attention(
            narrow["q"],
            narrow["k"],
            narrow["v"],
            narrow.get("bias"),
            implementation=implementation,
            **options,
        )
        return (out.astype(jnp.float32) * target).sum()

    return stablenum_jax.program(loss_fn, params)


LENGTHS = jnp.asarray([8, 5])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "shared heads": {"heads": 2, "is_causal": True},
    "bias": {"bias": jax.random.normal(KEYS[4], (1, 4, 8, 8))},
    "mask": {"mask": jnp.arange(8)[:, None] >= jnp.arange(8) - 2},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS - 2},
    "causal lengths": {
        "is_causal": True, "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS,
    },
    "window": {"is_causal": True, "local_window_size": (3, 0)},
}  # fmt: skip


def results(made: Any) -> dict[tuple[str, str], Any]:
    kept: dict[int, Any] = {}
    play = made.play(lambda index, data: kept.setdefault(index, np.asarray(data)))
    return {(r.kind, r.name): kept[r.value] for r in play.results}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_kernel_of_cudnn_is_evaluated_as_its_formula(options: dict[str, Any], cudnn: None) -> None:
    kernel, formula = results(program("cudnn", **options)), results(program("xla", **options))
    assert set(kernel) == set(formula)
    for name, array in formula.items():
        np.testing.assert_allclose(kernel[name], array, rtol=1e-9, atol=1e-9, err_msg=str(name))


def test_a_kernel_that_drops_entries_is_not_taken_for_the_formula(cudnn: None) -> None:
    from stablenum_jax._diagnosis.diff.fused_attention import formula_of

    empty, params = jnp.zeros(0), {"dropout_rate": 0.1}
    assert formula_of("dot_product_attention_fwd_wrapper", [empty] * 10, params) is None
    assert formula_of("exp", [empty], {}) is None


half_p = Primitive("kernel_without_float64")
half_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))


@half_p.def_impl
def _half(x: Any) -> Any:
    if jnp.asarray(x).dtype == jnp.float64:
        raise NotImplementedError("no kernel for float64")
    return x * jnp.asarray(0.5, jnp.asarray(x).dtype)


mlir.register_lowering(
    half_p, mlir.lower_fun(lambda x: x * jnp.asarray(0.5, x.dtype), multiple_results=False)
)


def test_another_kernel_without_float64_is_evaluated_in_its_own_format() -> None:
    x = jnp.linspace(-2.0, 2.0, 16)

    def made(halve: Any) -> Any:
        return stablenum_jax.program(lambda p, x: jnp.tanh(halve(p["w"] * x)), {"w": jnp.asarray(1.5)}, x)

    report = stablenum.diff(made(half_p.bind), made(half_p.bind))
    assert report.ok, str(report)
    other = stablenum.diff(made(half_p.bind), made(lambda x: x * 0.6))
    assert not other.ok


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "lengths"])
def test_the_kernel_of_cudnn_on_a_gpu_is_the_same_as_other_kernels(name: str) -> None:
    options = {"is_causal": True} | OPTIONS[name] if name == "bias" else OPTIONS[name]
    report = stablenum.diff(program("xla", **options), program("cudnn", **options))
    assert report.ok, str(report)
    assert report.right_off is not None
    assert 1e-5 < report.right_off.added < 0.1
    assert not stablenum.diff(program("cudnn", scale=0.25), program("cudnn", scale=0.3)).ok
