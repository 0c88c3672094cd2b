"""The guard in other libraries of JAX: one module per partner, which imports it when it is used."""
