"""Run all healthy trainings, or those that are named, and print a table."""

from __future__ import annotations

import argparse
import logging

from rich.console import Console

from benchmarks.recovery.healthy.run import TRAININGS, rows, table


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery.healthy", description=__doc__)
    parser.add_argument("trainings", nargs="*", metavar="TRAINING", help="by default all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data")
    given = parser.parse_args()
    if unknown := set(given.trainings) - set(TRAININGS):
        parser.error(f"there are no trainings {sorted(unknown)}; there are {sorted(TRAININGS)}")
    logging.getLogger("stablenum").setLevel(logging.CRITICAL)  # what happens is in the rows
    console, found = Console(highlight=False), []
    for row in rows({name: TRAININGS[name] for name in given.trainings or TRAININGS}, given.seed):
        found.append(row)
        for message in row["why"] or ["no rewind"]:
            console.print(f"{row['training']}: {message}", soft_wrap=True)
    console.print(table(found))


if __name__ == "__main__":
    _main()
