"""Why two programs part: each ``by_*`` module knows one kind of cause, and tries it on the ``scene``.

- ``choice`` asks them in turn; ``remedies`` has the vocabulary of causes and the sentence that mends each.
- ``formulas`` holds the functions that ports confuse and the laws of optimizers; ``targets`` finds the
  targets of a loss from its gradients.
- ``stops`` finds where gradients end.
"""
