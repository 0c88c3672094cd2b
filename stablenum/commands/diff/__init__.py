"""The command ``stablenum diff``."""
