"""The phonemes of English texts from the package misaki, which Kokoro's publisher uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ...callers.errors import ConfigError
from .espeak import espeak

_TAGGER = "en_core_web_sm"
_RATING = 3  # misaki's rating of phonemes from espeak-ng


@cache
def misaki(language: str) -> Callable[[str], str]:
    """Return a function that maps words without punctuation to phonemes. espeak-ng reads the words that misaki does not know.

    Args:
        language: "en-us" or "en-gb".

    Raises:
        ConfigError: misaki or its tagger is not installed, or espeak-ng is not.
    """
    for package, command in (("misaki", 'pip install "misaki[en]"'), (_TAGGER, f"python -m spacy download {_TAGGER}")):
        if find_spec(package) is None:  # without its tagger, misaki would download it
            raise ConfigError(f"<<param>> misaki needs the package {package}; install it: {command}", param="phonemizer")
    make = import_module("misaki.en").G2P
    read = make(british=language == "en-gb", fallback=partial(_unknown_word, language=language), unk="")
    espeak()
    return lambda words: str(read(words, preprocess=False)[0])


def _unknown_word(token: Any, language: str) -> tuple[str, int]:
    return espeak().phonemes(token.text, language), _RATING
