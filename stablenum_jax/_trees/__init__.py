"""Basics that all other parts use: the leaves of pytrees, their names, and the guard's state within an
optimizer's state."""
