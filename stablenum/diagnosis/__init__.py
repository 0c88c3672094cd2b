"""Diagnosis: from "the loss is NaN" to the operation that caused it, the reason, and what to do.

The public names are the types that replays, audits, range reports and checkups return.
"""

from __future__ import annotations

from stablenum._support.public_names import present
from stablenum.diagnosis.audit import Audit, Measured, Risk, Row
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.ranges import FormatVerdict, RangeReport, RangeRow, Trouble
from stablenum.diagnosis.replay.causes import Cause
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.judge import Verdict
from stablenum.diagnosis.replay.values import Place, TensorStats
from stablenum.diagnosis.report.report import Report

__all__ = [
    "Audit",
    "Cause",
    "Checkup",
    "Complaint",
    "Finding",
    "FormatVerdict",
    "Level",
    "Measured",
    "Place",
    "RangeReport",
    "RangeRow",
    "Report",
    "Risk",
    "Row",
    "Symptom",
    "TensorStats",
    "Trouble",
    "Verdict",
]

__dir__ = present(globals())
