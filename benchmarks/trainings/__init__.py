"""Whole trainings, as users write them; ``stablenum explain`` and ``checkup`` run them unchanged."""
