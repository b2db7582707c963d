"""`sensorium chat`: answer a question about images, videos and audio, or hold a conversation. Text is streamed."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..callers.errors import ConfigError, ErrorInfo
from .common import add_chat_template, add_model_arguments, check_chat_template, engine_options, new_file, positive_int
from .draw import check_drawing, draw
from .output import exit_code, exit_on_signals, print_error, printable, to_json, warn_truncated
from .sources import Source, check_files, path_or_url, read_sources, read_stdin
from .wording import message_of

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.outputs import RequestOutput

EXAMPLE = 'sensorium chat --model Qwen/Qwen2.5-VL-3B-Instruct --image a.png --image b.png "What differs?"'
MEDIA = {"image": "an image", "video": "a video", "audio": "an audio file"}
Sources = Mapping[str, Sequence[Source]]
"""The files of each modality."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "the question, or - for stdin; without one, each line of stdin is a turn of a conversation"
    parser.add_argument("question", nargs="?", type=question_text, help=help_text)
    add_model_arguments(parser)
    for modality, item in MEDIA.items():
        help_text = f"{item}: a path, a folder, a pattern, a URL, or - for stdin; may be repeated"
        parser.add_argument(f"--{modality}", metavar="FILE", type=path_or_url, action="append", default=[], help=help_text)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_chat_template(parser)
    help_text = "maximum number of tokens of the answer (default: 512)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, default=512, help=help_text)
    help_text = "sampling temperature, 0 is greedy (default: the checkpoint's)"
    parser.add_argument("--temperature", metavar="T", type=float, help=help_text)
    help_text = "maximum number of tokens of prompt and answer together"
    parser.add_argument("--max-model-len", metavar="N", type=positive_int, help=help_text)
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer, one on each line")
    help_text = "also print on stderr how each answer was made: tokens, seconds, and drafted tokens by proposer and position"
    parser.add_argument("--explain", action="store_true", help=help_text)
    help_text = "write the image with the boxes and points that the answer names; needs one image and a question"
    parser.add_argument("--draw", metavar="FILE", type=new_file, help=help_text)


def question_text(text: str) -> str:
    """Parse the question."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the question is empty; give one, or leave it out for a conversation")
    return text


def run(args: argparse.Namespace) -> int:
    from ..engine.llm import LLM
    from ..engine.sampling_params import SamplingParams

    words = [args.question, *(word for modality in MEDIA for word in getattr(args, modality))]
    if words.count("-") + (args.question is None and "-" in words) > 1:
        raise ConfigError("stdin can hold one input only; give - once, and a question beside it")
    if args.question is None and sys.stdin is None:
        raise ConfigError("stdin is closed, so there are no lines of a conversation; give a question")
    question = read_stdin("question").decode("utf-8", "replace") if args.question == "-" else args.question
    sources = {modality: read_sources(getattr(args, modality), modality) for modality in MEDIA}
    check_files([source for several in sources.values() for source in several], every=True)
    check_drawing(args.draw, len(sources["image"]), question is not None)
    check_chat_template(args)
    SamplingParams(**sampling_options(args))  # a wrong value is reported before the model is loaded
    llm = LLM(**engine_options(args), max_model_len=args.max_model_len)
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    if question is None:
        return converse(llm, args, messages, sources)
    messages.append(user_message(media_parts(sources), question))
    output = answer(llm, args, messages, sources)
    if args.draw is not None and output.error is None:
        draw(sources["image"][0].item, output, args.draw)
    return exit_code([output.error])


def converse(llm: LLM, args: argparse.Namespace, messages: list[dict[str, Any]], sources: Sources) -> int:
    """Answer each line of stdin as the next turn. Turns share the prefix cache; a turn that fails is forgotten."""
    start, errors, line, media = list(messages), list[ErrorInfo | None](), "", media_parts(sources)
    if sys.stdin.isatty():
        print("Ctrl-D or /exit ends the conversation, /clear forgets it.", file=sys.stderr)
    for line in questions():
        if line == "/exit":
            break
        if line == "/clear":
            messages = list(start)
            continue
        output = answer(llm, args, [*messages, user_message(media, line)], sources)
        errors.append(output.error)
        if output.error is None:
            messages += [user_message(media, line), {"role": "assistant", "content": output.outputs[0].text}]
            media = []
    if not line and not sys.stdin.isatty():
        raise ConfigError("stdin holds no text; give a question, or a conversation with one turn on each line")
    return exit_code(errors)


def questions() -> Iterator[str]:
    """Yield the lines of stdin that are not blank; a terminal shows a prompt."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    lines: Iterator[str] = iter(sys.stdin)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # `input` has a history then
        lines = iter(lambda: input("> "), None)
    with suppress(EOFError):
        for line in lines:
            if line.strip():
                yield line.strip()


def answer(llm: LLM, args: argparse.Namespace, messages: list[dict[str, Any]], sources: Sources) -> RequestOutput:
    """Print the answer as it grows, or as JSON at its end, and return it."""
    params, printed = replace(llm.default_params, **sampling_options(args)), 0  # characters
    with exit_on_signals() if args.json else exit_on_signals(print):  # `print` ends a streamed line
        for output in llm.stream(messages, params, chat_template=args.chat_template):
            text = output.outputs[0].text
            if output.error is None and not args.json:
                sys.stdout.write(text[printed:])
                sys.stdout.flush()
                printed = len(text)
    if args.json:
        print(to_json(json_fields(output), args), flush=True)
    if output.error is not None:
        print_error(error_text(output.error, sources, args))
        return output
    if not args.json:
        print(flush=True)
    if args.explain:
        print(llm.explain(output), file=sys.stderr)
    if output.outputs[0].finish_reason == "length":
        warn_truncated(args, "the answer")
    return output


def error_text(error: ErrorInfo, sources: Sources, args: argparse.Namespace) -> str:
    """Return the error with the name of the file that it is about."""
    files = sources.get(error.modality or "", ())
    if error.index is None or error.index >= len(files):
        return message_of(error, args)
    name = printable(files[error.index].name)
    reason = message_of(error.without_item(), args)
    return reason if name in reason else f"{name}: {reason}"


def json_fields(output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "completion_tokens": len(answer.token_ids),
        **({"elements": [element.fields() for element in answer.elements]} if answer.elements else {}),
        **({"drafts": output.drafts} if output.drafts else {}),
        "error": output.error,
    }


def media_parts(sources: Sources) -> list[dict[str, Any]]:
    """Return the parts of the images, then videos, then audio."""
    from ..pipelines.message_parts import media_part

    return [media_part(modality, source.item) for modality, several in sources.items() for source in several]


def user_message(media: list[dict[str, Any]], question: str) -> dict[str, Any]:
    return {"role": "user", "content": [*media, {"type": "text", "text": question}]}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters given on the command line; the others keep the checkpoint's defaults."""
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in options.items() if value is not None}
