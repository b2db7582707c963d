"""Which split of the devices answers the most requests in time, by simulation.

    python -m benchmarks.cluster --case h100-chat-7b              # a table of all splits
    python -m benchmarks.cluster --case cpu-chat-7b --devices 16
    python -m benchmarks.cluster --measure MODEL --write FILE     # the costs of this machine's engine
    python -m benchmarks.cluster --case cpu-chat-7b --costs FILE  # with measured costs: splits without ranks
    python -m benchmarks.cluster --check MODEL --processes 1 2 4  # the simulation beside real engines: within 10 %?

The simulation needs Python alone. Run --measure and --check on a quiet machine. The exit status of --check is 1 if a mean is
more than 10 % away.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .costs import Costs
from .splits import CASES, splits_of, table


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.check or args.measure:
        from .check import check, measure  # needs sensorium

        if args.check:
            return check(args.check, args.processes, args.count)
        text = json.dumps(measure(args.measure).as_json(), indent=1)
        args.write.write_text(text) if args.write else print(text)
        return 0
    case = CASES[args.case]
    case = replace(case, devices=args.devices or case.devices, seconds=args.seconds or case.seconds)
    if args.costs:
        case = replace(case, costs=Costs.from_json(json.loads(args.costs.read_text())))
    print(f"{case.name}: 99 % of first tokens within {case.goal.first_token:g} s, of gaps within {case.goal.token_gap:g} s\n")
    print(table(case, [*splits_of(case.devices, layers=case.model.layers)], args.seed))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--case", choices=CASES, default="h100-chat-7b")
    parser.add_argument("--devices", type=int, help="another number of devices")
    parser.add_argument("--seconds", type=float, help="time during which requests come")
    parser.add_argument("--costs", type=Path, help="a table of --measure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", metavar="MODEL")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--check", metavar="MODEL")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--count", type=int, default=120, help="requests of each check")
    return parser


if __name__ == "__main__":
    sys.exit(main())
