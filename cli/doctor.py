"""`sensorium doctor`: print installed packages, the device, the kernels in use, and what is missing. It changes nothing."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..mm.errors import ConfigError
from .common import add_model_name

EXAMPLE = "sensorium doctor --model Qwen/Qwen2.5-VL-3B-Instruct --option max_model_len=8192"
OPTIONAL = {
    "triton": "pip install 'sensorium[gpu]'",
    "mistral-common": "pip install 'sensorium[mistral]'",
    "transformers": "pip install 'sensorium[fallback]'",
    "librosa": "pip install 'sensorium[test]'",
    "prometheus-client": "pip install 'sensorium[observe]'",
    "opentelemetry-sdk": "pip install 'sensorium[observe]'",
}
"""Optional distributions with the command that installs them."""
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, use="also print what a checkpoint is and the memory it takes, from its JSON files: ")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of LLM for the memory plan, with its value as JSON or plain text; may be repeated",
    )
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Return 1 if a required package is missing, else 0. Raise ConfigError for options without a model."""
    given = dict(map(parse_option, args.option))
    for name, flag in (("model", args.model), ("revision", args.revision), ("device", args.device)):
        if flag is not None and name in given:
            raise ConfigError(f"--{name} {flag} and --option {name}={given[name]} set the same option; give one of them")
    options = {"revision": args.revision, "offline": args.offline, "device": args.device or "auto"} | given
    device = str(options["device"])
    if args.option and not args.model:
        raise ConfigError(f"--option {args.option[0]} is for the memory plan of a checkpoint; give --model as well")
    missing = [name for name in required() if version(name) is None]
    folder = args.model
    if args.model and "torch" not in missing:
        from ..engine.config import make_config
        from ..engine.model_files import load_model_files
        from ..engine.setup.hub import find_model

        config = find_model(make_config(args.model, options), weights=False)
        folder, options["revision"], options["adapter"] = config.model, config.revision, config.adapter
        load_model_files(folder)  # report a wrong path before the long output
    _print("python", [("python", platform.python_version()), ("sensorium", version("sensorium") or "not installed")])
    _print("packages", [(name, version(name) or f"MISSING: pip install {name}") for name in required()])
    _print("optional", [(name, version(name) or f"not installed: {how}") for name, how in OPTIONAL.items()])
    if "torch" not in missing:
        from ..engine.setup.doctor import active_backends, describe_checkpoint, describe_device, describe_memory

        _print("device", [*describe_device(device).items(), ("cpu features", " ".join(cpu_flags()) or "unknown")])
        for dtype, table in active_backends(device, str(options.get("kernels", ""))).items():
            _print(f"kernels, {dtype}", list(table.items()))
        if args.model:
            found = describe_checkpoint(folder, str(options.get("dtype", "auto")), device, adapter=config.adapter)
            if config.revision is not None:
                found["revision"] = config.revision
            _print("checkpoint", [(name, text.replace("dtype=", "--option dtype=")) for name, text in found.items()])
            _print("memory", describe_memory(folder, options))
    return int(bool(missing))


def parse_option(text: str) -> tuple[str, Any]:
    """Parse `name=value`, where the value is JSON or plain text and dashes in the name become underscores.

    Raises:
        ConfigError: there is no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text!r} is not NAME=VALUE, as in --option max_model_len=8192")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def required() -> list[str]:
    """Return the distributions that sensorium's metadata requires, or only torch if sensorium itself is not installed."""
    try:
        lines = metadata.requires("sensorium") or []
    except metadata.PackageNotFoundError:
        return ["torch"]
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_flags() -> list[str]:
    """Return the flags of CPU_FLAGS that Linux reports; empty on other systems."""
    if not sys.platform.startswith("linux"):
        return []
    words = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    return [flag for flag in CPU_FLAGS if flag in words]


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"{title}:")
    for name, value in rows:
        print(f"  {name:<24} {value}")
