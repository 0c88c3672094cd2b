"""``stablenum explain script.py``: run a training script until something is not finite, and say why.

The script runs unmodified in a process of its own, which the watchers of the adapters look into.
"""
