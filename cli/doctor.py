"""`sensorium doctor`: print what is wrong, then packages, device, kernels in use and the checkpoint.

It changes nothing, except that it measures and keeps the rates of the CPU's kernels if none are kept, as a first start does.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..callers.errors import ConfigError, ErrorInfo, SensoriumError
from .common import add_model_name
from .decoding import decoding_problems
from .output import exit_code, print_error
from .wording import message_of

EXAMPLE = "sensorium doctor --model Qwen/Qwen2.5-VL-3B-Instruct --option max_model_len=8192"
OPTIONAL = {
    "triton": "pip install 'sensorium[gpu]'",
    "mistral-common": "pip install 'sensorium[mistral]'",
    "transformers": "pip install 'sensorium[fallback]'",
    "fastapi": "pip install 'sensorium[serve]'",
    "uvicorn": "pip install 'sensorium[serve]'",
    "python-multipart": "pip install 'sensorium[serve]'",
    "pyyaml": "pip install 'sensorium[serve]'",
    "websockets": "pip install 'sensorium[serve]'",
    "pypdfium2": "pip install 'sensorium[pdf]'",
    "rapidocr": "pip install 'sensorium[documents]'",
    "onnxruntime": "pip install 'sensorium[documents]'",
    "pillow-heif": "pip install 'sensorium[heif]'",
    "ray": "pip install 'sensorium[ray]'",
    "redis": "pip install 'sensorium[redis]'",
    "sounddevice": "pip install 'sensorium[live]'",
    "matplotlib": "pip install 'sensorium[bench]'",
    "librosa": "pip install 'sensorium[test]'",
    "prometheus-client": "pip install 'sensorium[observe]'",
    "opentelemetry-sdk": "pip install 'sensorium[observe]'",
    "opentelemetry-exporter-otlp-proto-http": "pip install 'sensorium[otlp]'",
}
"""Optional distributions with the command that installs them."""
Section = tuple[str, list[tuple[str, str]]]
CHECKPOINT_FILES = (".json", ".gguf", ".safetensors")
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
    """Return 1 if a package is missing or a shipped file is not decoded. Raise ConfigError for options without a model."""
    options = engine_options(args)
    device = str(options["device"])
    missing = [name for name in required() if version(name) is None]
    folder = args.model
    if args.model and "torch" not in missing:
        from ..engine.config import make_config
        from ..engine.model_files import load_model_files
        from ..engine.setup.hub import find_model

        config = find_model(make_config(args.model, options), weights=False)
        folder, options["revision"], options["adapter"] = config.model, config.revision, config.adapter
        if not Path(folder).is_dir() or not any(file.suffix in CHECKPOINT_FILES for file in Path(folder).iterdir()):
            load_model_files(folder)  # report a wrong path, or a folder without a checkpoint, before the long output
    sections: list[Section] = [
        ("python", [("python", platform.python_version()), ("sensorium", version("sensorium") or "not installed")]),
        ("packages", [(name, version(name) or f"MISSING: pip install {name}") for name in required()]),
        ("optional", [(name, version(name) or f"not installed: {how}") for name, how in OPTIONAL.items()]),
    ]
    broken_media: list[tuple[str, str]] = []
    problems, failures = [("package", f"{name} is missing: pip install {name}") for name in missing], list[ErrorInfo]()
    if "torch" not in missing:
        from ..engine.setup.doctor import (
            active_backends,
            describe_bodies,
            describe_device,
            find_problems,
            installation_problems,
            missing_weights,
        )

        broken_media = decoding_problems()
        problems += [*broken_media, *installation_problems(device)]
        features = ("cpu features", " ".join(cpu_flags()) or "unknown")
        sections.append(("device", [*describe_device(device).items(), features]))
        if rates := describe_bodies(device):
            sections.append(("measured rates", rates))
        for dtype, table in active_backends(device, str(options.get("kernels", ""))).items():
            sections.append((f"kernels, {dtype}", list(table.items())))
        broken = find_problems(config) if args.model else []
        try:
            if args.model and not broken:
                sections += checkpoint_sections(folder, options, config.revision, problems)
        except SensoriumError as error:
            broken = [("checkpoint", error)]
        # the report does not need weights, and those of a name on the Hub are downloaded later
        is_own_folder = args.model and folder == args.model and Path(folder).is_dir()
        if is_own_folder and (lacking := missing_weights(Path(folder))) is not None:
            broken.append(("weights", lacking))
        for part, problem in broken:
            if args.debug:
                raise problem
            failures.append(problem.info)
            problems.append((part, str(problem)))
            print_error(message_of(problem.info, args))
    print_sections([("problems", problems or [("none", "")]), *sections])
    return exit_code(failures) if failures else int(bool(missing or broken_media))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of LLM that the flags set. Raise ConfigError if two set the same one, or if --option lacks a model."""
    options = dict(map(parse_option, args.option))
    for name, flag in (("model", args.model), ("revision", args.revision), ("device", args.device)):
        if flag is not None and name in options:
            raise ConfigError(f"--{name} {flag} and --option {name}={options[name]} set the same option; give one of them")
    if args.option and not args.model:
        raise ConfigError(f"--option {args.option[0]} is for the memory plan of a checkpoint; give --model as well")
    return {"revision": args.revision, "offline": args.offline, "device": args.device or "auto"} | options


def checkpoint_sections(
    folder: str, options: dict[str, Any], revision: str | None, problems: list[tuple[str, str]]
) -> list[Section]:
    """Return the sections about a checkpoint, and add to `problems` what is wrong with it."""
    from ..engine.setup.doctor import describe_checkpoint, lacking_memory, plan_of

    sections = describe_checkpoint(folder, str(options.get("dtype", "auto")), str(options["device"]))
    if revision is not None:
        sections["revision"] = revision
    sections = {name: text.replace("dtype=", "--option dtype=") for name, text in sections.items()}
    if sections["chat template"].endswith("chat_template="):
        problems.append(("chat template", sections["chat template"]))
    plan = plan_of(folder, options)
    if lacking := lacking_memory(plan):
        problems.append(("memory", lacking))
    return [("checkpoint", list(sections.items())), ("memory", plan.rows())]


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


def print_sections(sections: list[Section]) -> None:
    for title, rows in sections:
        print(f"{title}:")
        for name, value in rows:
            print(f"  {name:<24} {value}".rstrip())
