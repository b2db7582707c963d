"""Measure the GPU at hand in sections of under four minutes: `python -m benchmarks.gpu --only ops` (ops, e2e, ranks, train).

Weights are created on the device; nothing is downloaded. Figures are written at once to benchmarks/results/gpu-<card>-<date>
(.jsonl, and .md made from it). Parts run in a child process: a part that fails is recorded as a failure, a part that hangs is
stopped, a part that crashes ends alone, and the next one runs. `--device cpu --tiny` tests the script without a GPU and writes
to out/gpu.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    args = _parser().parse_args()
    import torch

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not args.tiny:
        print(
            f"torch {torch.__version__} sees no GPU; --device cpu --tiny tries the script itself",
            file=sys.stderr,
        )
        return 1
    if args.worker:
        from .worker import work

        work(args.only[0], args.worker, device, args.tiny, Path(args.stem), args.until)
        return 0
    from .parts import SECTIONS
    from .worker import supervise

    return supervise(args.only or list(SECTIONS), device, args.tiny, _stem(args.out, device, args.tiny), args.seconds)


def _parser() -> argparse.ArgumentParser:
    from .parts import SECONDS, SECTIONS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="run only this section; may be repeated")
    parser.add_argument("--device", help='"cuda", "cuda:1" or "cpu"; default: a GPU if there is one')
    parser.add_argument("--tiny", action="store_true", help="small shapes for a CPU; the numbers mean nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most seconds per section")
    parser.add_argument("--out", type=Path, help="folder for the results")
    for name in ("--worker", "--stem", "--until"):  # for the child process
        options = {"--worker": {"nargs": "+"}, "--until": {"type": float}}.get(name, {})
        parser.add_argument(name, help=argparse.SUPPRESS, **options)
    return parser


def _stem(folder: Path | None, device: object, tiny: bool) -> Path:
    """Return the path of the results without a suffix."""
    import torch

    from .machine import card, slug

    assert isinstance(device, torch.device)
    usual = ROOT / "out" / "gpu" if tiny else ROOT / "benchmarks" / "results"
    return (folder or usual) / f"gpu-{slug(card(device))}-{time.strftime('%Y-%m-%d')}{'-tiny' if tiny else ''}"


if __name__ == "__main__":
    sys.exit(main())
