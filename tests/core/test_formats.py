"""The table of number formats compared with the libraries that implement them."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from stablenum.formats import FORMATS, get_format

EVERY = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
SCALAR = {name: getattr(np, name, None) or getattr(ml_dtypes, name) for name in EVERY}


def test_the_table_is_complete():
    assert list(FORMATS) == EVERY


@pytest.mark.parametrize("name", EVERY)
def test_against_ml_dtypes(name):
    ours, info = FORMATS[name], ml_dtypes.finfo(SCALAR[name])
    assert ours.name == name
    assert ours.bits == info.bits
    assert ours.max == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.smallest_subnormal == float(info.smallest_subnormal)
    assert ours.eps == float(info.eps)


@pytest.mark.parametrize("name", EVERY)
def test_against_torch(name):
    ours, info = FORMATS[name], torch.finfo(getattr(torch, name))
    assert (ours.bits, ours.max, ours.smallest_normal, ours.eps) == (info.bits, info.max, info.tiny, info.eps)


@pytest.mark.parametrize("name", EVERY)
def test_each_value_is_the_limit_it_is_named_for(name):
    ours, scalar = FORMATS[name], SCALAR[name]
    assert float(scalar(ours.max)) == ours.max
    assert float(scalar(ours.smallest_subnormal)) == ours.smallest_subnormal
    assert float(scalar(ours.smallest_subnormal / 2)) == 0.0
    assert float(scalar(1.0 + ours.eps)) == 1.0 + ours.eps
    assert float(scalar(1.0 + ours.eps / 2)) == 1.0


@pytest.mark.parametrize("name", EVERY)
def test_the_dtypes_of_every_framework_are_known(name):
    spellings = [
        name,
        f"torch.{name}",
        getattr(torch, name),
        SCALAR[name],
        np.dtype(SCALAR[name]),
        getattr(jnp, name),
        jnp.dtype(name),
    ]
    assert {get_format(spelling).name for spelling in spellings} == {name}


@pytest.mark.parametrize("dtype", ["int32", "half", None, 16, np.int32, torch.int64, torch.complex64])
def test_other_dtypes_are_rejected(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float64, float32, bfloat16"):
        get_format(dtype)
