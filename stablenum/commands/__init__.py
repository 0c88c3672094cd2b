"""The commands of the command line, one package for each. Commands load the adapters lazily, by name."""
