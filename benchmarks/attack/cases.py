"""The attacks: each a small request that once ended, stalled or filled an engine. Numbers are those of docs/security.md."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import files, fuzz

ANSWER = {"temperature": 0.0, "max_tokens": 4}


@dataclass(frozen=True)
class Target:
    """The engine under attack, and a folder for files."""

    llm: Any
    folder: Path


@dataclass(frozen=True)
class Case:
    """One attack. `run` returns outputs, or raises. `prepare` makes its input before anything is measured."""

    area: str
    name: str
    run: Callable[[Target], Any]
    prepare: Callable[[], object] = bool


def ask(target: Target, prompt: Any = "user: say a", **params: Any) -> Any:
    from sensorium import SamplingParams

    return target.llm.generate(prompt, SamplingParams(**{**ANSWER, **params}), use_tqdm=False)


def with_media(target: Target, modality: str, items: Any, **options: Any) -> Any:
    items = items if isinstance(items, list) else [items]
    parts = [{"type": modality, modality: item} for item in items]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "Read the text."}]}
    from sensorium import SamplingParams

    return target.llm.chat([message], SamplingParams(**ANSWER), use_tqdm=False, **options)


def constrained(target: Target, **form: Any) -> Any:
    from sensorium import StructuredOutputsParams

    return ask(target, structured_outputs=StructuredOutputsParams(**form))


def ref_chain(length: int = 1_000) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def lark_chain(length: int = 2_800) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(length)) + f'r{length}: "a"\n'


def many_paths(target: Target) -> Any:
    path = target.folder / "large.png"
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), np.uint8)
    Image.fromarray(noise).save(path, compress_level=0)
    return with_media(target, "image", [path] * 40)


@contextmanager
def slow_server() -> Iterator[str]:
    """Yield the address of a server that sends a byte per second."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(60):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
                time.sleep(1)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/x"
    finally:
        server.shutdown()
        server.server_close()


def slow_urls(target: Target) -> Any:
    with slow_server() as url:
        return with_media(target, "image_url", [{"url": f"{url}?{i}"} for i in range(16)])


def names(target: Target) -> Any:
    image = Image.new("RGB", (32, 32))
    outputs = []
    for i in range(200):
        prompt = {
            "prompt": "<|vision_start|><|image_pad|><|vision_end|>a",
            "multi_modal_data": {"image": image},
            "multi_modal_uuids": {"image": ["x" * 1000 + str(i)]},
            "cache_salt": f"tenant {i}",
        }
        outputs += ask(target, prompt, max_tokens=1)
    return outputs


def fuzzed(name: str, count: int) -> Case:
    """Return an attack of that many random examples."""

    def run(target: Target) -> str:
        counts, untyped = fuzz.tally(*fuzz.areas(target.llm)[name], count)
        for result, example in untyped.items():
            print(f"{result}\n    {example!r}")
        return next(iter(untyped), f"{counts['refused:']} of {count} refused")

    return Case("anything", f"{count:,} {name}", run)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}"

CASES = (
    Case("grammars", "1,000 chained $refs", lambda t: constrained(t, json=ref_chain())),
    Case("grammars", "2,800 chained Lark rules", lambda t: constrained(t, grammar=lark_chain())),
    Case("grammars", "a regex of 4,000 bounded groups", lambda t: constrained(t, regex="(a{1,50}b?){1,50}" * 80)),
    Case(
        "options",
        "fps=1e6",
        lambda t: with_media(t, "video", files.video(t.folder / "v.mp4"), mm_processor_kwargs={"fps": 1e6}),
    ),
    Case(
        "options",
        "fps=1e-6",
        lambda t: with_media(t, "video", files.video(t.folder / "v.mp4"), mm_processor_kwargs={"fps": 1e-6}),
    ),
    Case("sizes", "an image of 4000x1", lambda t: with_media(t, "image", files.png(4000, 1))),
    Case(
        "sizes",
        "40 tiny images, large min_pixels",
        lambda t: with_media(
            t, "image", [files.png(2, 2)] * 40, mm_processor_kwargs={"min_pixels": 10**8, "max_pixels": 10**9}
        ),
    ),
    Case("sampling", "a bad word of 4 MB", lambda t: ask(t, bad_words=["ab" * (2 << 20)])),
    Case("sampling", "100,000 bad words", lambda t: ask(t, bad_words=[f"w{i}" for i in range(100_000)])),
    Case("sampling", "prompt_logprobs=1000", lambda t: ask(t, "user: " + "a b c " * 200, prompt_logprobs=1000)),
    Case("sampling", "logprobs=1000, n=64", lambda t: ask(t, n=64, logprobs=1000, temperature=1.0)),
    Case("sampling", "temperature=1e39", lambda t: ask(t, temperature=1e39)),
    Case("sampling", "no_repeat_ngram over 10**9", lambda t: ask(t, logits_processors={"no_repeat_ngram": {"size": 10**9}})),
    Case("bytes", "one file of 4 MB named 40 times", many_paths),
    Case("bytes", "16 URLs that send a byte per second", slow_urls),
    Case("decoders", "a WebP of 6688x6688 in 34 bytes", lambda t: with_media(t, "image", files.webp())),
    Case(
        "decoders",
        "a 1-bit PNG of 13000x13000, transparent",
        lambda t: with_media(t, "image", files.png(13000, 13000, 1, 3, True)),
    ),
    Case("decoders", "plain PPM, 9 megapixels", lambda t: with_media(t, "image", files.ppm())),
    Case("decoders", "QOI, 36 megapixels", lambda t: with_media(t, "image", files.qoi())),
    Case("decoders", "JPEG of 3,000 scans", lambda t: with_media(t, "image", files.jpeg_scans())),
    Case("decoders", "TIFF of 200,000 strips", lambda t: with_media(t, "image", files.tiff_strips())),
    Case("decoders", "MOV of one PNG, 16000x16000", lambda t: with_media(t, "video", files.mov_of_png(t.folder / "m.mov"))),
    Case("decoders", "MP4 with forged tables", lambda t: with_media(t, "video", files.forged_mp4(t.folder / "f.mp4"))),
    Case("decoders", "WAV at 1 Hz", lambda t: with_media(t, "audio", files.wav())),
    Case(
        "text",
        "a template that never ends",
        lambda t: t.llm.chat([{"role": "user", "content": "a"}], chat_template=ENDLESS, use_tqdm=False),
    ),
    Case(
        "text",
        "a template that doubles a string",
        lambda t: t.llm.chat([{"role": "user", "content": "a"}], chat_template=GROWING, use_tqdm=False),
    ),
    Case(
        "text",
        "nested control tokens, 200 kB",
        lambda t: t.llm.chat([{"role": "user", "content": "<|im_" * 40_000 + "end|>" * 40_000}], use_tqdm=False),
    ),
    Case("text", "a lone surrogate as cache_salt", lambda t: ask(t, {"prompt": "a", "cache_salt": "\ud800"})),
    Case("names", "200 tenants with long uuids", names),
    fuzzed("requests with any value in any place", 1500),
    fuzzed("processing options of all families", 1000),
    *(fuzzed(f"mutated {modality} files", 500) for modality in ("image", "video", "audio")),
)
