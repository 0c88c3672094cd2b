"""Other tools that compare two programs, run on the pairs of ``tests/pairs``."""
