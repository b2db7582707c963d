"""Percentiles, tables, JSON files and plots of measurements."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...callers.errors import ConfigError
from ..output import print_line

Result = dict[str, Any]
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "time between tokens",
    "e2el": "time of a request",
}
"""Latencies by their names in vLLM's results."""


def percentiles(text: str) -> list[float]:
    """Parse an argument that is a list of percentiles, separated by commas."""
    values = [float(part) for part in text.split(",")]
    if all(0 <= value <= 100 for value in values):
        return values
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 to 100, like 50,99")


def add_report_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add and return the group of options about results."""
    group = parser.add_argument_group("report")
    help_text = "percentiles of each latency (default: 90,99)"
    group.add_argument("--metric-percentiles", metavar="P,P", type=percentiles, default=[90.0, 99.0], help=help_text)
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument("--result-dir", metavar="DIR", type=Path, default=Path(), help="folder of the JSON file (default: .)")
    group.add_argument("--result-filename", metavar="NAME", help="name of the JSON file (default: mode, model and time)")
    return group


def latencies(seconds: Mapping[str, Sequence[float]], wanted: Sequence[float]) -> Result:
    """Return mean, median, standard deviation and percentiles of each latency in milliseconds, with vLLM's names."""
    import numpy as np

    result: Result = {}
    for name, values in seconds.items():
        times = 1000 * np.array(values or [math.nan])
        numbers = {"mean": times.mean(), "median": np.median(times), "std": times.std()}
        numbers |= {f"p{value:g}": np.percentile(times, value) for value in wanted}
        result |= {f"{key}_{name}_ms": None if math.isnan(number) else float(number) for key, number in numbers.items()}
    return result


def print_table(result: Mapping[str, Any]) -> None:
    """Print numbers by name, and latencies as one line each."""
    for name, value in result.items():
        if isinstance(value, int | float) and not name.endswith("_ms"):
            print_line(f"{name.replace('_', ' '):<28} {value:,.2f}" if isinstance(value, float) else f"{name:<28} {value:,}")
    for name, text in LATENCIES.items():
        if result.get(f"mean_{name}_ms") is not None:
            shown = {key.removesuffix(f"_{name}_ms"): value for key, value in result.items() if key.endswith(f"_{name}_ms")}
            print_line(f"{text:<42} " + "  ".join(f"{key} {value:.1f} ms" for key, value in shown.items()))


def save(args: argparse.Namespace, result: Mapping[str, Any], kind: str, number: int | None = None) -> None:
    """Write a result as JSON, if --save-result asks for it. `number`: its index among the results of several rates."""
    if not args.save_result:
        return
    name = args.result_filename or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path: Path = args.result_dir / name
    path = path if number is None else path.with_stem(f"{path.stem}-{number}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print_line(f"written to {path}")


def check_plot() -> None:
    """Raise ConfigError if plots cannot be made."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; pip install 'sensorium[bench]', or leave --plot out", param="plot")


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot latencies and throughput against the rate of requests that were finished."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    rates = [result["request_throughput"] for result in results]
    panels = list(figure.subplots(2, 2).flat)
    for panel, name in zip(panels, ("ttft", "tpot", "itl"), strict=False):
        keys = [key for key in results[0] if key.endswith(f"_{name}_ms") and not key.startswith(("mean", "std"))]
        for key in keys:
            values = [math.nan if result[key] is None else result[key] for result in results]
            panel.plot(rates, values, "o-", label=key.removesuffix(f"_{name}_ms"))
        panel.set_title(LATENCIES[name])
        panel.set_ylabel("ms")
        panel.legend()
    panels[3].plot(rates, [result["output_throughput"] for result in results], "o-")
    panels[3].set_title("output tokens per second")
    for panel in panels:
        panel.set_xlabel("finished requests per second")
        panel.set_ylim(bottom=0)
    figure.savefig(path)
