"""The losses: oracles, edges, peers, properties."""
