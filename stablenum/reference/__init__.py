"""The NumPy adapter: the executable specification of a guarded step."""
