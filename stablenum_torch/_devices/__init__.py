"""The ground: ranks, devices, state tensors, and the decision on a host or compiled for a device."""
