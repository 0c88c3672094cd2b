"""The NumPy adapter: an executable specification of the guarded step."""
