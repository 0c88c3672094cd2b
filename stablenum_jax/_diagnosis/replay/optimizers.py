"""The line that made the optimizer whose setting is at fault."""

from __future__ import annotations

from dataclasses import replace
from types import FrameType
from typing import Any

from stablenum.diagnosis import Finding
from stablenum.diagnosis.replay.script_variables import variables
from stablenum.diagnosis.replay.source_files import lines_around

__all__ = ["with_optimizer"]


def with_optimizer(finding: Finding, frame: FrameType | None) -> Finding:
    """Return a finding about a setting of optax's optimizer (an eps that is 0 in its format) with the line
    that made the optimizer, if there is one such line among those of the script's variables.

    Args:
        finding: any finding.
        frame: the innermost of the frames whose variables are searched.
    """
    if finding.phase != "update" or not finding.lost or not finding.library.startswith("optax."):
        return finding
    places = {v.place for v in variables(frame, _is_optimizer)}
    if len(places) != 1:
        return finding
    (place,) = places
    return replace(finding, place=place, around=lines_around(place))


def _is_optimizer(value: Any) -> bool:
    return type(value).__module__.startswith("optax.") and hasattr(value, "init") and hasattr(value, "update")
