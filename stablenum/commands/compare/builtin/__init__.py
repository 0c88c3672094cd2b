"""The built-in scenarios of ``stablenum compare``."""

from stablenum.commands.compare.builtin.recovery_streams import RECOVERY_STREAMS
from stablenum.commands.compare.builtin.rule_streams import RULE_STREAMS
from stablenum.commands.compare.builtin.streams import STREAMS
from stablenum.commands.compare.builtin.trainings import TRAININGS
from stablenum.commands.compare.scenarios import Scenario

__all__ = ["SCENARIOS"]

_ALL: tuple[Scenario, ...] = (*STREAMS, *RULE_STREAMS, *RECOVERY_STREAMS, *TRAININGS)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
