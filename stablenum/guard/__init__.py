"""The guard: its settings, its state, the decision about one step, and how both are read and saved."""
