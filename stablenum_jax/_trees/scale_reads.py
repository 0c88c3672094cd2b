"""Whether this process has read a guard's loss scale, without which no gradient can be multiplied by it."""

from __future__ import annotations

__all__ = ["note_scale_read", "scale_was_read"]

_WAS_READ = False


def note_scale_read() -> None:
    """Remember that the caller got the scale, as an array or a tracer."""
    global _WAS_READ  # a fact about the process, which only ever becomes true
    _WAS_READ = True


def scale_was_read() -> bool:
    """Return whether the scale of any guard has been read.

    This is a question about the process and not about one state or one trace: gradients may come from another
    jit than the step, from a scan, or from a state that was restored since. Wherever they come from, the
    scale was read before.
    """
    return _WAS_READ
