"""Planted faults in real trainings, and what brings a run back: ``python -m benchmarks recovery``."""
