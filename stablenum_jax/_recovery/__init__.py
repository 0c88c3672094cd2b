"""Recovery in JAX: checkpoints, and a training that goes back to a snapshot."""
