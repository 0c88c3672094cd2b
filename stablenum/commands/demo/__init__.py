"""``stablenum demo``: what the library does, shown in about a minute on programs that come with it."""
