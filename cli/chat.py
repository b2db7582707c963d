"""`sensorium chat`: one question about pictures, clips and sounds, the answer printed as it comes. Knows no model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

EXAMPLE = 'sensorium chat --model Qwen2.5-VL-3B-Instruct --image a.png --image b.png "What differs?"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", help="what to ask")
    parser.add_argument("--model", metavar="DIR", required=True, help="folder of a checkpoint as the Hub ships it")
    parser.add_argument(
        "--image", metavar="FILE", type=_media, action="append", default=[], help="a picture, file or URL; may be repeated"
    )
    parser.add_argument("--video", metavar="FILE", type=_media, action="append", default=[], help="a clip; may be repeated")
    parser.add_argument("--audio", metavar="FILE", type=_media, action="append", default=[], help="a sound; may be repeated")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=512, help="longest answer (default: 512)")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (default: the checkpoint's own)")
    parser.add_argument("--max-model-len", metavar="N", type=int, help="tokens of question and answer together")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def run(args: argparse.Namespace) -> int:
    from ..engine.llm import LLM
    from ..mm.errors import SensoriumError

    llm = LLM(args.model, dtype=args.dtype, device=args.device, max_model_len=args.max_model_len)
    shown = 0
    for output in llm.stream(messages(args), replace(llm.default_params, **sampling(args))):
        if output.error:
            raise SensoriumError(output.error)
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    print()
    return 0


def _media(text: str) -> str | Path:
    """A path, which is the caller's own, or a URL, which obeys the media policy."""
    return text if "://" in text[:16] else Path(text)


def messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One user message: pictures, clips, sounds, then the question."""
    media = [(kind, path) for kind in ("image", "video", "audio") for path in getattr(args, kind)]
    parts = [{"type": kind, kind: path} for kind, path in media]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": args.question}]}]


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of sampling; the rest is the checkpoint's."""
    said = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in said.items() if value is not None}
