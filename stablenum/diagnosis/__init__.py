"""From "the loss is NaN" to the operation that made it, its cause and its cure."""

from __future__ import annotations

from stablenum.diagnosis.audit import Audit, Risk, Row
from stablenum.diagnosis.causes import CAUSES, Cause
from stablenum.diagnosis.findings import Finding, finding_of
from stablenum.diagnosis.judge import Evidence, Verdict, judge
from stablenum.diagnosis.report import Report
from stablenum.diagnosis.trace import Step, Trace, Value
from stablenum.diagnosis.values import Place, TensorStats
from stablenum.diagnosis.walk import Origin, first_causes

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
