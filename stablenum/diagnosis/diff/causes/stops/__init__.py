"""Where only one of two programs ends the flow of gradients, or adds a number that has none.

- ``stopped`` tries the lines that ``cases`` and ``hidden`` find: without what passes there on the other side,
  the gradients agree.
- ``frozen`` finds the parameters that only one side trains, and ``offsets`` what only one adds to its loss.
"""
