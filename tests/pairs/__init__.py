"""Pairs of programs, most of them one in PyTorch and one in JAX, for ``stablenum diff``.

Each was written by someone who had not read the library. ``cases.json`` says how a pair is changed and where
the first difference then is, in its author's words: "left" and "right" are fragments of the line, null where
a side has no such operation. The comparison was tuned to the pairs in ``tuned``; those in ``blind`` were run
once after that. ``found.json`` says what is right today.

In ``within`` both programs are in PyTorch: the left one is that of another set, the right one its rewriting,
or, where the case says ``"both": "left"``, the left one with a change. These were written for the comparison
with other tools, by someone who knew the library. Where the rewriting calls layers of one shape in another
order, the file has a function ``weights``, which says what belongs to what.
"""
