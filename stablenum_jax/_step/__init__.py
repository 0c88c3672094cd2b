"""The guarded step: measure the gradients, decide in the core, apply or skip.

``transform`` has ``guard`` and ``chain``, ``training`` has ``step``. ``eager`` compiles an eager caller's
step; ``decide_and_update`` decides and runs the update inside one ``lax.cond``, and tells the guard inside
the optimizer through ``driver_mode`` what remains to be done. Measuring is in ``observe`` (with the
folder ``measure``), changing gradients and updates in ``apply`` and ``clip_update``.
``scaled_loss`` multiplies the loss by the scale, ``readout`` reads the state on the host. ``plain_update``
warns callers of plain ``tx.update``, ``unscaled`` those whose gradients do not carry the loss scale.
"""
