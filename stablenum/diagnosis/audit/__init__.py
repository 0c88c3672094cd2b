"""The audit of an optimizer's state: what is measured for each parameter, and which values are a risk."""

from __future__ import annotations

from stablenum.diagnosis.audit.entry_roles import OPTAX_STATES, TORCH_ROLES, torch_formula, torch_kind
from stablenum.diagnosis.audit.measured import Measured, join_blocks, measure_block, poisoned
from stablenum.diagnosis.audit.report import Audit
from stablenum.diagnosis.audit.risk_rules import Risk, Severity, eps_is_lost, risks_of
from stablenum.diagnosis.audit.rows import Row
from stablenum.diagnosis.audit.update_formulas import Moments, Role, UpdateFormula, update_of

__all__ = [
    "OPTAX_STATES",
    "TORCH_ROLES",
    "Audit",
    "Measured",
    "Moments",
    "Risk",
    "Role",
    "Row",
    "Severity",
    "UpdateFormula",
    "eps_is_lost",
    "join_blocks",
    "measure_block",
    "poisoned",
    "risks_of",
    "torch_formula",
    "torch_kind",
    "update_of",
]
