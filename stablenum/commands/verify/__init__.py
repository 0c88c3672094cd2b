"""``stablenum verify``: what in a checkpoint is not finite, out of range or suspicious."""
