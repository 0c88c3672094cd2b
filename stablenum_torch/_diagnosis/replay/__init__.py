"""The replay: one step of PyTorch code with every operation recorded, as a trace that the core judges.

In the order of the work:

- ``inputs`` finds what the step reads; ``snapshot`` keeps it and restores it; ``tensor_memory`` tells which
  tensors share memory.
- ``recorder`` records every operation below autograd and autocast; ``public_calls`` records calls of
  functions that hide their operations. ``tensor_values`` finds the recorded value of a tensor, ``contexts``
  where an operation runs. ``flags`` finds NaN and inf, ``schemas`` what an operation writes, and
  ``in_float32`` repeats a half-precision operation in float32.
- ``source_lines``, ``module_paths`` and ``naming`` find the user's line, the module and the name of an
  operation; ``phases`` separates forward, backward and update; ``labels`` finds labels out of range.
- ``run`` replays the step once; ``replay`` makes the report.
"""

from __future__ import annotations
