"""``python -m corpus``: run a tool on the programs, score results, write the labels."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from corpus import labels
from corpus.case import FRAMEWORKS
from corpus.judging import COLUMNS, score
from corpus.runner import SETS, chosen, run
from corpus.task import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m corpus", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run a tool and write a result file")
    tool = running.add_mutually_exclusive_group(required=True)
    tool.add_argument("--tool", metavar="MODULE:FUNCTION", help="a function from corpus.Task to corpus.Found")
    tool.add_argument("--command", dest="line", metavar="LINE", help="a command line with {script} in it")
    running.add_argument("--framework", required=True, choices=FRAMEWORKS)
    running.add_argument("--set", dest="sets", nargs="+", choices=SETS, default=SETS[:3])
    running.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these programs of the sets")
    running.add_argument("--timeout", type=float, default=300.0, help="seconds for one program (300)")
    running.add_argument("--name", default="", help="the tool's name on the leaderboard")
    running.add_argument("--verbose", action="store_true", help="show what programs and tools print")
    running.add_argument("--out", type=Path, required=True, help="the result file")
    scoring = commands.add_parser("score", help="print the scores of result files")
    scoring.add_argument("files", nargs="+", type=Path)
    commands.add_parser("labels", help="write labels.json from the programs and the answers")
    options = parser.parse_args(arguments)
    if options.command == "labels":
        labels.write()
        return 0
    return _run(options) if options.command == "run" else _score(options.files)


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.framework, options.sets, options.only)
    if not names:
        sys.exit(f"--only: none of these is a program of {', '.join(options.sets)}: {' '.join(options.only)}")
    try:
        result = run(
            options.tool or f"command:{options.line}",
            names,
            title=options.name,
            timeout=options.timeout,
            quiet=not options.verbose,
            report=lambda line: print(line, flush=True),
        )
    except RuntimeError as error:
        sys.exit(str(error))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return _score([options.out])


def _score(files: Sequence[Path]) -> int:
    known = labels.read()
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        print(f"{result['tool']}, {file.name}")
        for kind in SETS:
            names = [name for name in result["programs"] if Task(name).set == kind]
            if names:
                total = score(known, result["programs"], names)
                cells = [f"{c} {total.right[c]} of {total.of[c]}" for c in COLUMNS if total.of[c]]
                cells += [f"false alarms {len(total.alarms)} of {total.healthy}"] if total.healthy else []
                cells += [f"errors {len(total.errors)}"] if total.errors else []
                print(f"  {kind}: {', '.join(cells)}")
        if result.get("not_run"):
            lacking = sorted({need for needs in result["not_run"].values() for need in needs})
            print(f"  not run: {len(result['not_run'])}, for want of {', '.join(lacking)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
