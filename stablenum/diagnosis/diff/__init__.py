"""``stablenum diff``: the first operation at which two programs part.

An adapter gives a ``Program``, which can be played: evaluated operation by operation, in float64 or as it is,
with its own or with given weights. Everything else is here:

- ``sides`` evaluates both programs, describes each value and finds the values that both share;
- ``weights`` decides which parameter of one program is which of the other;
- ``places`` finds the first operation that differs, and what happens when its value is replaced;
- ``causes`` finds the reason by trying;
- ``report`` says it;
- ``lockfile`` keeps a program's numbers in a file, ``recordings`` and ``named_arrays`` compare with one;
- ``compare`` is the entry, ``search`` goes from one difference to the next, and ``differences`` holds them.
"""
