"""``stablenum explain script.py``: run a training script until something is not finite, and say why.

The script runs unmodified in a separate process, in which the watchers of the adapters observe it.
"""
