"""A program of PyTorch for ``stablenum.diff``: recorded once, and evaluated again in float64."""
