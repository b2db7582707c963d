"""Attacks by the size and number of arguments: messages, parts, tools, templates, sampling, sessions and media in memory."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from contextlib import closing
from typing import Any

import numpy as np
from PIL import Image

from . import files
from .cases import ANSWER, Case, Target, ask, constrained, with_media

_USER = {"role": "user", "content": "a"}
_TOKENS = [*range(300), *range(10**6, 2 * 10**6 - 300)]  # a million, of which 300 are in the vocabulary


def chat(target: Target, messages: Any, **options: Any) -> Any:
    from sensorium import SamplingParams

    return target.llm.chat(messages, SamplingParams(**ANSWER), use_tqdm=False, **options)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def sessions(target: Target) -> list[Any]:
    """Open 80 live sessions and answer in 60 of them before any is closed."""
    from sensorium import SamplingParams

    opened, outputs = [], []
    try:
        for number in range(80):
            opened.append(target.llm.live(f"user: say {number}", SamplingParams(**ANSWER)))
            if number < 60:
                outputs.append(opened[-1].answer())
    finally:
        for session in opened:
            session.close()
    return outputs


def appends(target: Target) -> list[Any]:
    """Append 200 times to a live session, answer, and truncate it to its first token."""
    from sensorium import SamplingParams

    with target.llm.live("user: a", SamplingParams(**ANSWER)) as session:
        outputs = [session.answer()]
        for _ in range(200):
            session.append("b")
        outputs.append(session.answer())
        session.truncate(1)
        return outputs


def score(target: Target) -> list[Any]:
    return [one.output for one in target.llm.score("a " * 2_000_000, ["b"] * 50, use_tqdm=False)]


def png_with(kind: bytes, content: bytes, count: int) -> bytes:
    """Return a PNG with `count` chunks of this kind after its header."""
    data = files.png(64, 64)
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + chunk * count + data[33:]


def embed_in_part(target: Target) -> list[Any]:
    """Queue 20,000 inputs of `embed` and stop after the first result."""
    from sensorium.pipelines.embed import EmbedOptions, embed_tasks
    from sensorium.pipelines.run import as_completed

    with closing(
        as_completed(target.llm.engine, embed_tasks(target.llm.engine, ["a"] * 20_000, EmbedOptions()), use_tqdm=False)
    ) as results:
        return [next(results)[1]]


def bad_words(target: Target) -> Any:
    from sensorium import SamplingParams

    params = SamplingParams(**ANSWER, bad_words=[f"word {number}" for number in range(1000)])
    return target.llm.generate(["user: say a"] * 500, params, use_tqdm=False)


def gif(frames: int = 2000) -> bytes:
    found = io.BytesIO()
    first, *others = (Image.new("L", (8, 8), number % 255) for number in range(frames))
    first.save(found, "GIF", save_all=True, append_images=others)
    return found.getvalue()


@functools.cache
def long_url() -> str:
    """Return a data: URL of 200 MB."""
    return "data:image/png;base64," + "A" * 200_000_000


def zeros(*shape: int) -> Any:
    """Return an array that takes no memory."""
    return np.broadcast_to(np.uint8(0), shape)


API_CASES = (
    Case("messages", "1,000,000 empty messages", lambda t: chat(t, [{"role": "user", "content": ""}] * 10**6)),
    Case(
        "messages",
        "300,000 empty parts",
        lambda t: chat(t, [{"role": "user", "content": [{"type": "text", "text": ""}] * 300_000}]),
    ),
    Case("messages", "100,000 tools", lambda t: chat(t, [_USER], tools=[tool("f")] * 100_000)),
    Case("messages", "200,000 variables", lambda t: chat(t, [_USER], chat_template_kwargs={"x": [{"a": 1}] * 200_000})),
    Case("messages", "2,500 tags and quotes", lambda t: chat(t, [{"role": "user", "content": '"<b>' * 2500}])),
    Case("messages", "a template of 640 kB", lambda t: chat(t, [_USER], chat_template="{{a}}" * (1 << 17))),
    Case(
        "messages",
        "a template that replaces 3,000,000 spaces",
        lambda t: chat(t, [_USER], chat_template="{{ ('a ' * 3000000).replace(' ', 'b') | length }}"),
    ),
    Case("messages", "a template that is the name of a file", lambda t: chat(t, [_USER], chat_template="/etc/passwd")),
    Case(
        "sampling",
        "1,000,000 allowed_tokens, n=64",
        lambda t: ask(t, n=64, temperature=1.0, logits_processors={"allowed_tokens": {"tokens": _TOKENS}}),
    ),
    Case(
        "sampling",
        "1,000,000 allowed_token_ids, n=64",
        lambda t: ask(t, n=64, temperature=1.0, allowed_token_ids=_TOKENS),
    ),
    Case(
        "sampling",
        "300 biases, n=64",
        lambda t: ask(t, n=64, temperature=1.0, logit_bias=dict.fromkeys(_TOKENS[:300], 1.0)),
    ),
    Case("grammars", "40,000 choices", lambda t: constrained(t, choice=[str(number) for number in range(40_000)])),
    Case(
        "grammars",
        "300 patterns with long repeats",
        lambda t: constrained(
            t,
            json={
                "type": "object",
                "properties": {f"p{i}": {"type": "string", "pattern": "^(a|b)*c{1,900}$"} for i in range(300)},
            },
        ),
    ),
    Case(
        "options",
        "50,000 nested options",
        lambda t: with_media(
            t,
            "image",
            files.png(32, 32),
            mm_processor_kwargs=functools.reduce(lambda inner, _: {"size": inner}, range(50_000), {}),
        ),
    ),
    Case("sampling", "500 prompts with 1,000 bad words", bad_words),
    Case("tasks", "embed of 20,000 texts", embed_in_part),
    Case("names", "a cache_salt of 50 MB", lambda t: ask(t, {"prompt": "a", "cache_salt": "x" * 50_000_000})),
    Case(
        "bytes",
        "1,000,000 images",
        lambda t: ask(t, {"prompt": "a", "multi_modal_data": {"image": [files.png(2, 2)] * 10**6}}),
    ),
    Case("bytes", "20,000,000 token ids", lambda t: ask(t, {"prompt_token_ids": [5] * 20_000_000})),
    Case(
        "bytes",
        "a data: URL of 200 MB",
        lambda t: with_media(t, "image_url", {"url": long_url()}),
        long_url,
    ),
    Case("bytes", "8 arrays of 165 megapixels", lambda t: with_media(t, "image", [zeros(12850, 12850, 3)] * 8)),
    Case("bytes", "a video of 100,000 frames", lambda t: with_media(t, "video", zeros(100_000, 64, 64, 3))),
    Case("decoders", "GIF of 2,000 frames", lambda t: with_media(t, "image", gif())),
    Case(
        "decoders",
        "PNG with a color profile of 60 MB",
        lambda t: with_media(t, "image", png_with(b"iCCP", b"a\0\0" + zlib.compress(bytes(60 << 20), 9), 1)),
    ),
    Case(
        "decoders",
        "PNG with 60 texts of 60 MB",
        lambda t: with_media(t, "image", png_with(b"zTXt", b"a\0\0" + zlib.compress(bytes(60 << 20), 9), 60)),
    ),
    Case("sampling", "a regex of nested repeats", lambda t: constrained(t, regex="(" * 5 + "a" + "{0,100})" * 5)),
    Case("sampling", "stop of 10 MB", lambda t: ask(t, stop="ab" * 5_000_000)),
    Case("sampling", "1,000,000 biases", lambda t: ask(t, logit_bias=dict.fromkeys(range(10**6), 1.0))),
    Case("text", "600,000 placeholders", lambda t: ask(t, "<|image_pad|>" * 600_000)),
    Case("sessions", "80 live sessions", sessions),
    Case("sessions", "200 parts before an answer", appends),
    Case("tasks", "score of 4,000,000 characters", score),
    Case("tasks", "transcribe garbage", lambda t: t.llm.transcribe([b"RIFF" * 100], use_tqdm=False)),
)
