"""`sensorium chat`: one question about pictures, clips and sounds, the answer printed as it comes. Knows no model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from .files import add_model, code_of, count, ending_at_once, in_options, path, warn_of_the_end

EXAMPLE = 'sensorium chat --model Qwen2.5-VL-3B-Instruct --image a.png --image b.png "What differs?"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", help="what to ask")
    add_model(parser)
    parser.add_argument(
        "--image", metavar="FILE", type=path, action="append", default=[], help="a picture, file or URL; may be repeated"
    )
    parser.add_argument("--video", metavar="FILE", type=path, action="append", default=[], help="a clip; may be repeated")
    parser.add_argument("--audio", metavar="FILE", type=path, action="append", default=[], help="a sound; may be repeated")
    parser.add_argument("--max-tokens", metavar="N", type=count, default=512, help="longest answer (default: 512)")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (default: the checkpoint's own)")
    parser.add_argument("--max-model-len", metavar="N", type=count, help="tokens of question and answer together")


def run(args: argparse.Namespace) -> int:
    from ..engine.llm import LLM

    llm = LLM(args.model, dtype=args.dtype, device=args.device, max_model_len=args.max_model_len)
    shown = 0
    with ending_at_once(print):
        for output in llm.stream(messages(args), replace(llm.default_params, **sampling(args))):
            if output.error:
                print(f"sensorium: error: {in_options(output.error, args)}", file=sys.stderr)
                return code_of([output.error])
            text = output.outputs[0].text
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
    print()
    if output.outputs[0].finish_reason == "length":
        warn_of_the_end(args, "the answer")
    return 0


def messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One user message: pictures, clips, sounds, then the question."""
    from ..pipelines.parts import media_part

    parts = [media_part(kind, file) for kind in ("image", "video", "audio") for file in getattr(args, kind)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": args.question}]}]


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of sampling; the rest is the checkpoint's."""
    said = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in said.items() if value is not None}
