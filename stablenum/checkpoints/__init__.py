"""Checkpoints that are written whole, verified before they are loaded, and never poisoned.

The policy is here, on the host and without arrays; an adapter's :class:`~stablenum.checkpoints.codec.Codec`
writes and reads one format and says which values are not finite.
"""
