"""A labelled corpus of programs that fail numerically in PyTorch and JAX, and of healthy ones.

See README.md. Nothing here imports a framework before a program of that framework is built.
"""

from corpus.case import CAUSES, FRAMEWORKS, Case, Program
from corpus.task import Found, Task

__all__ = ["CAUSES", "FRAMEWORKS", "Case", "Found", "Program", "Task"]
