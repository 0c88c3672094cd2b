"""The checkup in JAX: what is measured of a training that may have gone wrong without any NaN."""
