"""Why two programs part: each ``by_*`` module knows one kind of cause, and proposes it for the ``scene``.

- ``choice`` asks them in turn, and ``judge`` tries what they propose: nothing else confirms a cause.
- ``remedies`` has the vocabulary of causes and the sentence that mends each.
- ``formulas`` holds the functions that ports confuse and the laws of optimizers; ``targets`` finds the
  targets of a loss from its gradients.
- ``stops`` finds where gradients end.
"""
