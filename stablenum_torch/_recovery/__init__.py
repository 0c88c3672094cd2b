"""Checkpoints: what a run goes back to."""
