"""The error of an integration whose partner is not installed."""

from __future__ import annotations

__all__ = ["missing"]


def missing(module: str, needs: str, extra: str) -> ImportError:
    """Return an ImportError that names the partner, its oldest tested version and the command to install it.

    Example:
        >>> raise missing("stablenum_jax.integrations.flax", "flax 0.12.8 or newer", "flax")
        Traceback (most recent call last):
        ImportError: stablenum_jax.integrations.flax needs flax 0.12.8 or newer: pip install 'stablenum[flax]'
    """
    return ImportError(f"{module} needs {needs}: pip install 'stablenum[{extra}]'", name=module)
