"""Why two programs part: each ``by_*`` module knows one kind of cause, and tries it on the ``scene``.

- ``causes`` asks them in turn; ``remedies`` has the vocabulary of causes and the sentence that mends each.
- ``update_laws`` and ``moment_laws`` read the law of an optimizer, ``targets`` the targets of a loss,
  ``variants`` and ``window_variants`` hold the formulas that ports confuse.
- ``stops``, ``stop_cases``, ``hidden_stops`` and ``frozen`` find where gradients end.
"""
