"""One program under comparison, and the values that two of them share.

- ``play`` is what an adapter gives; ``recording`` runs it, ``resume_points`` takes an evaluation up again.
- ``sides`` describes each value by its ``fingerprints`` and a tolerance from ``rounding`` and ``compiled``.
- ``capturing`` measures what a file keeps of a program, with ``bounds`` for its rounding; such a program is a
  ``recorded`` one. A ``dump`` holds named arrays alone.
- ``equality`` says how near numbers without a tolerance of their own must be.
- ``matching`` and ``row_matching`` find the values that both sides share, inside ``loops`` too.
"""
