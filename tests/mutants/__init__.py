"""Mutation testing: small faults are put into the library, one at a time, and the tests must notice them.

``make mutants`` runs it. Existing tools do not fit. mutmut forks processes from one in which the tests are
loaded, which JAX does not support, and it rewrites functions, which disturbs ``torch.compile`` and tests that
read line numbers. cosmic-ray runs the same command for every mutant, here the whole suite. Neither
draws a sample.
"""
