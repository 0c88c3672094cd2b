"""What is known of functions and optimizers, as formulas of NumPy that a cause is tried with.

- ``variants`` and ``window_variants`` are the functions that ports confuse.
- ``update_laws`` and ``moment_laws`` find the law of an optimizer's update from its numbers.
"""
