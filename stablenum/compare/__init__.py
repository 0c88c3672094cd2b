"""The research tool: the same unstable trainings on every backend, and whether they agree.

Scenarios are data (:mod:`stablenum.compare.spec`); the built-in ones are in
:mod:`stablenum.compare.streams`, :mod:`stablenum.compare.rule_streams` and
:mod:`stablenum.compare.trainings`. The command is
``stablenum compare``.
"""

from stablenum.compare.backends import BACKENDS, find_backends
from stablenum.compare.rule_streams import RULE_STREAMS
from stablenum.compare.runner import Result, run_scenario
from stablenum.compare.spec import Scenario, Stream, Training
from stablenum.compare.streams import STREAMS
from stablenum.compare.trainings import TRAININGS

__all__ = [
    "BACKENDS",
    "SCENARIOS",
    "Result",
    "Scenario",
    "Stream",
    "Training",
    "find_backends",
    "run_scenario",
]

_ALL: tuple[Scenario, ...] = (*STREAMS, *RULE_STREAMS, *TRAININGS)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
