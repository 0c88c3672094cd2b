"""The built-in scenarios of ``stablenum compare``."""
