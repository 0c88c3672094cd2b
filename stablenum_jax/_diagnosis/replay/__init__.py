"""The replay: one step of JAX code, equation by equation, recorded as a trace that the core judges.

``arguments`` takes the call apart, ``programs`` makes its jaxpr, ``interpreting`` evaluates it, with
``control`` for branches and loops; ``places`` and ``naming`` say what an equation is called and where it was
written; ``phases`` tells forward from backward; ``runs`` evaluates one at a time or under jit; ``guards``
looks at what a guard inside the step refused; ``replaying`` puts the parts together.
"""

from __future__ import annotations

from stablenum_jax._diagnosis.replay.replay import replay

__all__ = ["replay"]
