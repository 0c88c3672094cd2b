"""The cost of a guarded step compared with every peer's: ``python -m benchmarks steps``, and ``gpu``.

``rows`` lists what is measured and why, ``torch_variants`` and ``jax_variants`` run the peers and ours,
``torch_counts`` and ``jax_counts`` count passes, waits and kernels. ``measure`` measures a row in one
process, through ``torch_bench`` or ``jax_bench``; ``run`` starts the processes, ``summary`` computes the
figures from their results, and ``keeping`` lets an interrupted run continue. ``benchmarks/README.md``
describes the file format.
"""
