"""Number formats: which module computes in which, fp8 scaling, and exact sums in 16 bits."""
