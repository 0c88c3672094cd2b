"""Pairs of programs, one in PyTorch and one in JAX, for ``stablenum diff``.

Each was written by someone who had not read the library. ``cases.json`` says how a pair is changed and where
the first difference then is, in its author's words: "left" and "right" are fragments of the line, null where
a side has no such operation. The comparison was tuned to the pairs in ``tuned``; those in ``blind`` were run
once after that. ``found.json`` says what is right today.
"""
