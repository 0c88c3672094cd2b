"""Devices and ranks: state tensors, waits, and the decision on the host or compiled for an accelerator."""
