"""A program of JAX for ``stablenum.diff``: traced once, and evaluated again in float64."""
