"""Pairs that nobody wrote for the comparison: the optimizers and layers of PyTorch beside those of JAX.

``optimizers``, ``layers`` and ``within`` hold the pairs, each with what the report must say and, according to
the sources of the libraries, why it is so. ``formulas`` computes the optimizers in NumPy, independently of
both. The page ``docs/porting.md`` cites the calls of these pairs.
"""
