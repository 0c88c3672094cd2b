"""A program's numbers in a file: recorded once, compared anywhere.

- ``saving`` records a program and ``loading`` gives it back; ``layout`` is what both agree on.
- ``dump`` reads the named arrays of a program that cannot be recorded.
- ``precision`` finds where a program rounds more than its recording allows.
"""
