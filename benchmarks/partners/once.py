"""Run one partner's loop with one fault in a process of its own, and print the verdict as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings

from benchmarks.partners.judge import judge
from benchmarks.partners.loops import PARTNERS

__all__: list[str] = []


def _main(name: str, variant: str, *faults: str) -> None:
    warnings.simplefilter("ignore")  # partners' own; what matters is what their logs show
    for fault in faults:
        print(json.dumps({"fault": fault} | _verdict(name, fault, variant)), flush=True)


def _verdict(name: str, fault: str, variant: str) -> dict[str, bool | None]:
    try:
        outcome = PARTNERS[name].run(fault, guarded=variant == "guarded")
    except TimeoutError:  # of processes that wait for each other
        return {"ends": False}
    return dataclasses.asdict(judge(outcome)) | {"ends": True}


if __name__ == "__main__":
    _main(*sys.argv[1:])
