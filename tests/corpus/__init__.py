"""The corpus: small programs with one planted failure each, and healthy ones with legitimate infinities."""
