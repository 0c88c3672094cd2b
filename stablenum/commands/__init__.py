"""The command line: one package per command. Commands load the adapters lazily, by name."""
