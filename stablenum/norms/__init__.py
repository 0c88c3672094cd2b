"""The numbers that norms are made of: ``wide`` for any range, ``exact_sums`` for sums without rounding."""
