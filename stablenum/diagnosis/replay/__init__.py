"""From a recorded step to the operation that failed first, its cause and its remedy."""
