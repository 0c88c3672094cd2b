"""``stablenum explain script.py``: run a training script until a bad value does harm, and report why.

The script runs unmodified in a separate process, in which the watchers of the adapters observe it.
"""
