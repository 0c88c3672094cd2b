"""Devices and ranks: state tensors, waits, and the decision on the host, compiled for an accelerator, or as a
kernel of the guard's own (``kernels/``)."""
