"""The report of a replay, rendered as text, as HTML and for a terminal."""

from stablenum.diagnosis.report.report import Report

__all__ = ["Report"]
