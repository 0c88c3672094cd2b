"""Count the rewinds of trainings that need none: ``python -m benchmarks.recovery.healthy``."""
