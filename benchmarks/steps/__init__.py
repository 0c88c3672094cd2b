"""The cost of a guarded step beside every peer's: ``python -m benchmarks steps``, and ``gpu``.

``rows`` says what is measured and why, ``torch_variants`` and ``jax_variants`` drive the peers and ours,
``torch_counts`` and ``jax_counts`` count passes, waits and kernels. ``measure`` is one process's share of
a row, through ``torch_bench`` or ``jax_bench``; ``run`` starts the processes, ``summary`` makes figures of
what they found, ``keeping`` lets an interrupted run go on. ``benchmarks/README.md`` has the file's form.
"""
