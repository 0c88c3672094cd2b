"""Basics that all other parts use: leaves of pytrees, their names, and the guard's state in an
optimizer's."""
