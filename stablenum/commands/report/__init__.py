"""``stablenum report``: the logs of runs as a page, or on a terminal while a run goes on."""
