"""Where two programs part: the first operation that differs, and what happens when its value is replaced.

- ``comparison`` holds both sides and their ``results``; ``frontier`` finds the first operation that differs.
- ``patches`` puts the other side's value in place; ``mended_places`` and ``missing_operations`` find where it
  helps.
- ``flow`` and ``slopes`` follow the gradients; ``locations`` says line, operation and module.
- ``arguments``, ``tables`` and ``doubts`` find differences that are not the programs'.
"""
