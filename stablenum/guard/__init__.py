"""The guard: its settings and state, the decision about a step, and reading and saving the state."""
