"""From "the loss is NaN" to the operation that caused it, the reason, and what to do."""

from __future__ import annotations

from stablenum.diagnosis.audit import Audit, Risk, Row
from stablenum.diagnosis.replay.causes import CAUSES, Cause
from stablenum.diagnosis.replay.findings import Finding, finding_of
from stablenum.diagnosis.replay.judge import Evidence, Verdict, judge
from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum.diagnosis.replay.values import Place, TensorStats
from stablenum.diagnosis.replay.walk import Origin, first_causes
from stablenum.diagnosis.report.report import Report

__all__ = [
    "CAUSES",
    "Audit",
    "Cause",
    "Evidence",
    "Finding",
    "Origin",
    "Place",
    "Report",
    "Risk",
    "Row",
    "Step",
    "TensorStats",
    "Trace",
    "Value",
    "Verdict",
    "finding_of",
    "first_causes",
    "judge",
]
