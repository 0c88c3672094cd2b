"""The range report: what each number format would do to the values of one training step."""

from stablenum.diagnosis.ranges.counting import RangeCollector
from stablenum.diagnosis.ranges.report import RangeReport
from stablenum.diagnosis.ranges.rows import KINDS, RangeRow
from stablenum.diagnosis.ranges.verdicts import FormatVerdict, Trouble

__all__ = ["KINDS", "FormatVerdict", "RangeCollector", "RangeReport", "RangeRow", "Trouble"]
