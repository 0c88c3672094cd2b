"""The record of a run in a file: what its lines hold, and how they are written and read."""
