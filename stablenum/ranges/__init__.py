"""The range report: what each number format would do to the values of one training step."""

from stablenum.ranges.counting import RangeCollector
from stablenum.ranges.report import RangeReport
from stablenum.ranges.rows import KINDS, RangeRow
from stablenum.ranges.verdicts import FormatVerdict, Trouble

__all__ = ["KINDS", "FormatVerdict", "RangeCollector", "RangeReport", "RangeRow", "Trouble"]
