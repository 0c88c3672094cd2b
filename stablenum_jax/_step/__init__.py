"""The guarded step: measure the gradients, decide in the core, apply or skip."""
