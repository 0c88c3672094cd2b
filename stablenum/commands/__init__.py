"""The command line: each command in a package of its own, which loads adapters lazily and by name."""
