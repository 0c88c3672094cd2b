"""The guard's own kernels for a GPU: one measures all gradients, one decides."""
