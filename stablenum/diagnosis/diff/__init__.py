"""``stablenum diff``: the first operation at which two programs part.

An adapter gives a ``Program``, which can be played: evaluated operation by operation, in float64 or as it is,
with its own or with given weights. Everything else is here:

- ``fingerprints`` describes a value independently of its layout; ``classes`` finds the values that two plays
  share; ``frontier`` finds the first operation that differs;
- ``weights`` carries the parameters of one program over to the other;
- ``causes`` finds the reason by trying;
- ``report`` and ``rendering`` say it.
"""
