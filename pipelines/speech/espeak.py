"""The phonemes of texts, from libespeak-ng in this process, in the alphabet of Kokoro's vocabulary."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import threading
from functools import cache

from ...callers.errors import ConfigError, InputError, short_repr

_SYNCHRONOUS, _KEEPS_PROCESS = 2, 0x8000  # how audio would be returned; do not end the process on an error
_UTF8, _IPA, _TIE = 1, 0x02, 0x80 | ord("^") << 8  # two letters of one sound are joined by "^"
_SHARED = {"a^ɪ": "I", "a^ʊ": "W", "d^ʒ": "ʤ", "e^ɪ": "A", "t^ʃ": "ʧ", "ɔ^ɪ": "Y"}
_ENGLISH = {
    "ʔˌn\u0329": "ʔn", "ʔn\u0329": "ʔn", **_SHARED, "ə^l": "ᵊl", "ʲo": "jo", "ʲə": "jə", "ʲ": "", "ɚ": "əɹ", "r": "ɹ", "x": "k",
    "ç": "k", "ɐ": "ə", "ɬ": "l", "\u0303": "", "e": "A",
}  # fmt: skip
_BRITISH = {"A^ə": "ɛː", "e^ə": "ɛː", "iə": "ɪə", "ə^ʊ": "Q"}
_AMERICAN = {"o^ʊ": "O", "ɜːɹ": "ɜɹ", "ɜː": "ɜɹ", "ɪə": "iə", "ː": ""}
_OTHERS = {**_SHARED, "d^z": "ʣ", "o^ʊ": "O", "ə^ʊ": "Q", "s^s": "S", "t^s": "ʦ"}
_LANGUAGE = re.compile(r"[A-Za-z0-9-]{1,32}")  # espeak-ng takes other names for those of files
_SYLLABIC = re.compile("(\\S)\u0329")
LANGUAGES = {
    "a": "en-us", "b": "en-gb", "e": "es", "f": "fr-fr", "h": "hi", "i": "it", "p": "pt-br",
}  # fmt: skip
"""First letter of a voice's name -> espeak-ng's language for it."""


class _EspeakVoice(ctypes.Structure):
    """espeak_VOICE of speak_lib.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("languages", ctypes.c_char_p),
        ("identifier", ctypes.c_char_p),
        ("gender", ctypes.c_ubyte),
        ("age", ctypes.c_ubyte),
        ("variant", ctypes.c_ubyte),
        ("unused", ctypes.c_ubyte),
        ("score", ctypes.c_int),
        ("spare", ctypes.c_void_p),
    )


class EspeakPhonemes:
    """Calls libespeak-ng, one text at a time. Raise OSError if it does not start."""

    def __init__(self, library: str) -> None:
        self._lock, self._library = threading.Lock(), ctypes.CDLL(library)
        if self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, _KEEPS_PROCESS) < 0:
            raise OSError(f"{library} does not start; reinstall espeak-ng with its voices")
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]

    def phonemes(self, text: str, language: str) -> str:
        """Return the phonemes of a text without marks, words separated by spaces. Raise InputError for an unknown language."""
        buffer = ctypes.create_string_buffer(text.replace("\0", " ").encode("utf-8", "replace"))
        rest, clauses = ctypes.c_void_p(ctypes.addressof(buffer)), list[str]()
        with self._lock:
            if not _LANGUAGE.fullmatch(language) or not self._set_language(language.encode()):
                reason = f"<<param=>>{short_repr(language)} is no language of espeak-ng; `espeak-ng --voices` lists them"
                raise InputError(reason, code="invalid_value", param="language")
            while rest.value:
                clause = self._library.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, _IPA | _TIE)
                clauses.append((clause or b"").decode("utf-8", "replace"))
        return _in_alphabet(" ".join(" ".join(clauses).split()), language)

    def _set_language(self, name: bytes) -> bool:
        """Choose a language. Return False if there is none of this name."""
        by_language = ctypes.byref(_EspeakVoice(languages=name))
        return not (self._library.espeak_SetVoiceByName(name) and self._library.espeak_SetVoiceByProperties(by_language))


@cache
def espeak() -> EspeakPhonemes:
    """Return the library. Raise ConfigError if it is not installed."""
    library = ctypes.util.find_library("espeak-ng")
    if library is None:
        how = "install espeak-ng (`apt-get install espeak-ng`), or give <<param>>"
        raise ConfigError(f"texts need espeak-ng, which reads them; {how}", param="phonemes")
    try:
        return EspeakPhonemes(library)
    except OSError as error:
        raise ConfigError(f"espeak-ng cannot be loaded ({error})", param="phonemes") from None


def _in_alphabet(phonemes: str, language: str) -> str:
    """Return phonemes of espeak-ng in Kokoro's alphabet: one letter for a diphthong or an affricate."""
    phonemes = re.sub(r"\([a-z^-]+\)", "", phonemes)  # marks of words in another language
    if not language.startswith("en"):
        return _replaced(phonemes, _OTHERS).replace("^", "").replace("-", "")
    phonemes = _SYLLABIC.sub("ᵊ\\1", _replaced(phonemes, _ENGLISH)).replace("\u0329", "")
    phonemes = _replaced(phonemes, _AMERICAN if language.startswith("en-us") else _BRITISH)
    return phonemes.replace("o", "ɔ").replace("ɾ", "T").replace("ʔ", "t").replace("^", "").replace("-", "")


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for old in sorted(replacements, key=len, reverse=True):
        text = text.replace(old, replacements[old])
    return text
