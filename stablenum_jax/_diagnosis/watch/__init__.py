"""Watch an unmodified JAX script: what its jitted functions, gradients and optimizers return.

Only the command ``stablenum explain`` uses this. A call whose result is not finite is replayed at once with
its arguments, so no buffers are donated in a watched script. Each check makes the host wait.

- ``transformations`` replaces JAX's transformations and the updates of optax; ``jitted`` is what its ``jit``
  returns. Both describe each call as a ``calls.Call`` to the ``watcher``, which runs it.
- ``judge`` replays the first of them whose result is not finite. ``results`` says what is not finite in a
  result, ``derivatives`` which part of a derivative's result is judged, ``sizes`` how large its arguments
  were, and ``programs`` what is known of a jitted function.
"""

from __future__ import annotations

from stablenum_jax._diagnosis.watch.transformations import watch

__all__ = ["watch"]
