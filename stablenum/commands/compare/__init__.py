"""The comparison: run the same unstable trainings on every backend, and check that the backends agree.

Scenarios are data (:mod:`stablenum.commands.compare.scenarios`); the built-in ones are in
:mod:`stablenum.commands.compare.builtin.streams`, :mod:`stablenum.commands.compare.builtin.rule_streams` and
:mod:`stablenum.commands.compare.builtin.trainings`. The command is ``stablenum compare``.
"""

from stablenum.commands.compare.backends import BACKENDS, find_backends
from stablenum.commands.compare.builtin.recovery_streams import RECOVERY_STREAMS
from stablenum.commands.compare.builtin.rule_streams import RULE_STREAMS
from stablenum.commands.compare.builtin.streams import STREAMS
from stablenum.commands.compare.builtin.trainings import TRAININGS
from stablenum.commands.compare.runner import Result, run_scenario
from stablenum.commands.compare.scenarios import Scenario, Stream, Training

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

_ALL: tuple[Scenario, ...] = (*STREAMS, *RULE_STREAMS, *RECOVERY_STREAMS, *TRAININGS)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
