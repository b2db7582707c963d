"""Speech requests as plain data, names of languages, and the removal of control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import InputError, hint
from .types import MultiModalKwargsItem

_NAMES = (
    "en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese pt=portuguese tr=turkish pl=polish "
    "ca=catalan nl=dutch ar=arabic sv=swedish it=italian id=indonesian hi=hindi fi=finnish vi=vietnamese he=hebrew "
    "uk=ukrainian el=greek ms=malay cs=czech ro=romanian da=danish hu=hungarian ta=tamil no=norwegian th=thai ur=urdu "
    "hr=croatian bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu fa=persian "
    "lv=latvian bn=bengali sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian br=breton eu=basque "
    "is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili gl=galician mr=marathi "
    "pa=punjabi si=sinhala km=khmer sn=shona yo=yoruba so=somali af=afrikaans oc=occitan ka=georgian be=belarusian tg=tajik "
    "sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek fo=faroese ht=haitian_creole ps=pashto tk=turkmen "
    "nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish my=myanmar bo=tibetan tl=tagalog mg=malagasy as=assamese tt=tatar "
    "haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese yue=cantonese fil=filipino"
)
LANGUAGES: Mapping[str, str] = {code: name.replace("_", " ") for code, name in (entry.split("=") for entry in _NAMES.split())}
"""Language code -> English name in lower case. Codes are those of speech models: ISO 639-1 if there is one."""

_CONTROL = re.compile(r"<\|[^<|>]*\|>")


@dataclass(frozen=True)
class TimestampRule:
    """Timestamp tokens of a speech model.

    Args:
        first: token of 0 s; each following token is `step` seconds later.
        none: token that requests no timestamps. end: token that ends the output.
        latest: limit of the first timestamp, in steps; None: no limit.
    """

    first: int
    none: int
    end: int
    step: float
    latest: int | None = None


@dataclass(frozen=True)
class AlignmentRule:
    """How cross-attention gives the times of words.

    Args:
        heads: (layer, head) pairs whose weights follow the audio.
        step: seconds per encoder row.
        sizes: number of layers with cross-attention, and of heads per layer.
    """

    heads: tuple[tuple[int, int], ...]
    step: float
    sizes: tuple[int, int]


@dataclass(frozen=True)
class FrameRule:
    """How the rows of a model without a decoder become text.

    With connectionist temporal classification (CTC), each row names a token. Equal tokens in a row are one token, unless a
    blank is between them; blanks are none. The rows of a transducer are decoded by the model.

    Args:
        blank: token without text.
        step: seconds per row.
        is_decoded: the model returns tokens with their rows and durations (`SupportsRowDecoding`).
    """

    blank: int
    step: float
    is_decoded: bool = False


@dataclass(frozen=True)
class StreamRule:
    """How a model transcribes a stream: encoder row i is added to token i, and each row gives a token.

    Args:
        prompt: tokens of the first rows.
        silent: token of rows that complete no text.
        row_samples: samples per row. overlap: further samples that the last row of a chunk reads.
        before, after: samples of silence before and after the stream.
        delay: rows between a sound and its text.
        max_rows: most rows of a chunk. max_tokens: most tokens of a sequence.
        item: makes the tensors of a chunk: `(samples, stream, first row, dtype of the encoder's input)`.
    """

    prompt: tuple[int, ...]
    silent: int
    row_samples: int
    overlap: int
    before: int
    after: int
    delay: int
    max_rows: int
    max_tokens: int
    item: Callable[[Tensor, int, int, torch.dtype], MultiModalKwargsItem]


@dataclass(frozen=True)
class SpeechRequest:
    """The prompt and the token rules of a transcription.

    Args:
        prompt: trusted text, in which control tokens are recognised. It contains the audio placeholder if the model has one.
        allowed_tokens: text of a token -> its meaning (a language code); the output is one of these tokens. Empty: any token.
        suppressed, suppressed_first: tokens that are never sampled, or not as the first token.
        times: rule for timestamps in the output; None: no timestamps.
    """

    prompt: str
    allowed_tokens: Mapping[str, str] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimestampRule | None = None


def language_code(language: str, known: Mapping[str, str]) -> str:
    """Return the code of a language given as code or English name, in any case: "EN" and "English" are "en".

    Args:
        known: code -> name of the languages that the model transcribes.

    Raises:
        InputError: the language is unknown; the message lists the known ones.
    """
    wanted = language.strip().lower() if isinstance(language, str) else ""
    for code, name in known.items():
        if wanted in (code.lower(), name.lower()):
            return code
    if len(known) == 1:
        (name,) = known.values()
        raise InputError(
            f"language={language!r}, but this model transcribes only {name.title()}; use a multilingual one", param="language"
        )
    raise InputError(f"language={language!r} is unknown to this model; {hint(wanted, known, known.values())}", param="language")


def strip_control_tokens(answer: str) -> str:
    """Remove control tokens such as <|en|> and <|2.40|> from a decoded output."""
    return _CONTROL.sub("", answer)
