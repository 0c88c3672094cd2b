"""Which parameter of one program is which of the other, and in which layout.

- ``weights`` makes the map from the ``parameter_uses``: ``sequences`` aligns them in order, ``neighbours``,
  ``siblings``, ``gates`` and ``pieces`` tell similar ones apart, ``orientation`` and ``axis_roles`` choose a
  layout.
- ``settling`` settles by trial what these leave open; ``given`` is a map that the caller gives.
- ``carrying`` gives one program the other one's parameters, ``optimizer_states`` its optimizer's state.
"""
