"""The readers: one per format of checkpoint. Each loads its framework by name, and only when it reads."""
