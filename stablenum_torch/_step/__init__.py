"""The guarded step: measure the gradients, decide in the core, apply or skip.

``optimizer`` is what users see, ``wrap`` and ``GuardedOptimizer``, on top of ``inner_protocol``, which passes
on to the optimizer inside what torch asks. ``guard`` owns the state and takes a step by one of two paths:
``on_host`` where the host can read values at no cost, ``on_device`` where it must not wait. There the guard's
own kernels decide (``by_kernels``), or torch's operations do (``plain_decision``). Both paths hand the
``inputs`` of the step to ``observe`` (with the folder ``measure``), ``apply`` and ``clip_update``.
``parameters`` follows the optimizer's parameters and their names, ``checks`` rejects settings that cannot
work, and ``autocast`` picks the format of the forward pass.
"""
