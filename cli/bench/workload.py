"""Random prompts with exact numbers of tokens and with random images, from vLLM's flags for its random datasets."""

from __future__ import annotations

import argparse
import ast
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...callers.errors import ConfigError
from ..common import positive_int

_BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Sample:
    """A request: the token ids of its text, its images as PNG, and the number of tokens to generate."""

    token_ids: list[int]
    images: list[bytes]
    output_len: int


def count(text: str) -> int:
    """Parse an argument that is an integer of 0 or above."""
    return 0 if text == "0" else positive_int(text)


def fraction(text: str) -> float:
    """Parse an argument that is a number from 0 to 1, without 1."""
    if 0 <= (value := float(text)) < 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")


def buckets(text: str) -> Mapping[tuple[int, int], float]:
    """Parse `{(height, width, 1): probability}` as (height, width) -> probability."""
    try:
        shares = {(int(height), int(width)): float(share) for (height, width, frames), share in _pairs(text) if frames == 1}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        shares = {}
    if (
        not shares
        or len(shares) != len(_pairs(text))
        or min(min(size) for size in shares) < 1
        or not _shares(list(shares.values()))
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mapping of images, like {_BUCKETS}")
    return shares


def _pairs(text: str) -> Any:
    parsed = ast.literal_eval(text)
    return parsed.items() if isinstance(parsed, dict) else ()


def _shares(values: list[float]) -> bool:
    return all(0 <= value < math.inf for value in values) and sum(values) > 0


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests", "as in `vllm bench`")
    help_text = "random: random text; random-mm: also random images (default: random)"
    group.add_argument("--dataset-name", choices=("random", "random-mm"), default="random", help=help_text)
    group.add_argument("--num-prompts", metavar="N", type=positive_int, default=1000, help="number of requests (default: 1000)")
    group.add_argument(
        "--seed", metavar="N", type=count, default=0, help="seed of the requests and of their times (default: 0)"
    )
    lengths: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    names = ("--random-input-len", "--input-len")
    group.add_argument(*names, **lengths, default=1024, help="tokens of a prompt, without images (default: 1024)")
    names = ("--random-output-len", "--output-len")
    group.add_argument(*names, **lengths, default=128, help="tokens of an answer (default: 128)")
    help_text = "lengths vary by this fraction in both directions (default: 0)"
    group.add_argument("--random-range-ratio", metavar="R", type=fraction, default=0.0, help=help_text)
    help_text = "further tokens at the start, the same in each prompt (default: 0)"
    group.add_argument("--random-prefix-len", metavar="N", type=count, default=0, help=help_text)
    help_text = "images per request of random-mm (default: 1)"
    group.add_argument("--random-mm-base-items-per-request", metavar="N", type=count, default=1, help=help_text)
    help_text = f"sizes of images, as {{(height, width, 1): probability}} (default: {_BUCKETS})"
    name = "--random-mm-bucket-config"
    group.add_argument(name, metavar="SIZES", type=buckets, default=buckets(_BUCKETS), help=help_text)


def make_samples(args: argparse.Namespace, tokenize: Tokenize, seed: int, number: int) -> list[Sample]:
    """Return `number` requests as the arguments describe them. The same seed and tokenizer give the same requests."""
    import numpy as np

    rng = np.random.default_rng(seed)
    sizes, shares = list(args.random_mm_bucket_config), np.array(list(args.random_mm_bucket_config.values()))
    num_images = args.random_mm_base_items_per_request if args.dataset_name == "random-mm" else 0
    prefix = _tokens(rng, args.random_prefix_len, tokenize)

    def length(mean: int) -> int:
        low, high = math.floor(mean * (1 - args.random_range_ratio)), math.ceil(mean * (1 + args.random_range_ratio))
        return int(rng.integers(max(1, low), high + 1))

    samples = []
    for _ in range(number):
        token_ids = prefix + _tokens(rng, length(args.random_input_len), tokenize)
        chosen = rng.choice(len(sizes), num_images, p=shares / shares.sum())
        samples.append(Sample(token_ids, [_png(rng, *sizes[index]) for index in chosen], length(args.random_output_len)))
    return samples


def _tokens(rng: Any, number: int, tokenize: Tokenize) -> list[int]:
    """Return `number` tokens of random words. Each word has at least one token."""
    letters = rng.integers(ord("a"), ord("z") + 1, (number, 5)).tolist()
    tokens = tokenize(" ".join("".join(map(chr, word)) for word in letters))[:number] if number else []
    if len(tokens) < number:
        raise ConfigError(f"the tokenizer makes {len(tokens)} tokens of {number} words; give a smaller --random-input-len")
    return tokens


def _png(rng: Any, height: int, width: int) -> bytes:
    """Return a PNG of smooth noise, about as many bytes as a photograph."""
    import numpy as np
    from PIL import Image

    coarse = rng.integers(0, 256, (-(-height // 16), -(-width // 16), 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
