"""The small classifier in both frameworks."""

from __future__ import annotations

from tests.lockfile.jax_program import in_jax
from tests.lockfile.torch_program import in_torch

__all__ = ["PROGRAMS", "in_jax", "in_torch"]

PROGRAMS = {"torch": in_torch, "jax": in_jax}
