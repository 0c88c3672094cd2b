"""Programs with legitimate infinities, in which nothing is wrong."""
