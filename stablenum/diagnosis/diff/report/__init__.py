"""What a comparison says: as text, as a page, and as scripts that reproduce its first difference.

- ``report`` is the result of ``diff``; ``rendering`` writes it as text, ``page`` as HTML.
- ``reproduction`` and ``scripts`` write the folder that reproduces the first difference.
- ``omissions`` and ``nonfinite`` say what was not compared.
"""
