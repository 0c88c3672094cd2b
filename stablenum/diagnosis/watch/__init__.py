"""How a script is run and watched: what an adapter's watcher reports, to whom, and how the script is stopped.

- ``plan`` is the data that the command and the script's process exchange; ``launch`` starts the processes of
  a training on several ranks.
- ``session`` is the interface to which a watcher reports; ``courses`` decides when a script copes with bad
  results.
- ``frames`` keeps the watcher out of the script's tracebacks, ``imports`` waits for a framework, and
  ``numpy_errors`` and ``script_errors`` read what NumPy and the script themselves say.
"""
