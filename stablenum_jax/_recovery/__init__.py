"""Recovery in JAX: copy a training's state, put it back, look for what is bad in it, save it whole."""
