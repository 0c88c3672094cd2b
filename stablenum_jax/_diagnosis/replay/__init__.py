"""The replay: one step of JAX code, equation by equation, recorded as a trace that the core judges.

In the order of the work:

- ``inputs`` splits the call into its arrays and the rest; ``programs`` traces it.
- ``interpreter`` evaluates the jaxpr, with ``control_flow`` for branches and loops, ``cells`` for values, and
  ``numpy_answers`` for equations that need no XLA. ``flags`` finds NaN and inf; ``source_lines`` and
  ``naming`` find the user's line and the name of an equation.
- ``shard_map`` evaluates the body of a ``shard_map`` for each shard: ``shards`` has their places and parts,
  ``shards_in_turn`` lets them take turns, and ``collectives`` says what they exchange. ``processes`` gathers
  arrays that span several processes.
- ``phases`` separates forward, backward and update; ``guards`` finds what a guard in the step measured;
  ``labels`` finds indices that are out of range.
- ``run`` evaluates a program once, eagerly or under jit; ``replay`` makes the report.

``jax_internals`` contains what depends on the version of JAX.
"""

from __future__ import annotations

from stablenum_jax._diagnosis.replay.replay import replay

__all__ = ["replay"]
