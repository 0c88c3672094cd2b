"""The cost of a guarded step beside every peer's: ``python -m benchmarks steps``, and ``gpu``.

``rows`` says what is measured and why, ``torch_variants`` and ``jax_variants`` drive the peers and ours,
``torch_counts`` and ``jax_counts`` count passes, waits and kernels, ``measure`` measures a row in this
process, ``run`` each row in a process of its own. The form of the file is in ``benchmarks/README.md``.
"""
