"""The ground: leaves of pytrees, their names, and the guard's place in an optimizer's state."""
