"""A program's numbers in a file: recorded once, compared anywhere.

- ``saving`` records a program, and ``loading`` gives it back; ``layout`` is what both agree on.
- ``asserting`` makes an assertion of a comparison.
"""
