"""Speech as it is asked for and named: requests as plain data, languages, text without control tokens. Knows no family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import InputError, hint

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
"""Code -> English name, in small letters. Codes as speech models write them: ISO 639-1 where there is one."""

_CONTROL = re.compile(r"<\|[^<|>]*\|>")


@dataclass(frozen=True)
class TimestampRule:
    """Tokens that stand for times within a sound.

    Args:
        first: the token of 0 s; each one after it is `step` seconds later.
        none: the token that says no times are wanted. end: the token that ends an answer.
        latest: the first time is at most so many steps in; None: anywhere.
    """

    first: int
    none: int
    end: int
    step: float
    latest: int | None = None


@dataclass(frozen=True)
class SpeechRequest:
    """How one sound is asked for.

    Args:
        prompt: trusted text: control tokens in it count, and the sound's slot where the family has one.
        only: texts of the tokens one of which is the answer, and what it means; empty: any may be chosen.
        suppressed, suppressed_first: tokens that are never chosen, or not as the first one.
        times: the rule that timestamps of the answer obey; None: there are none.
    """

    prompt: str
    only: Mapping[str, str] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimestampRule | None = None


def code_of(language: str, known: Mapping[str, str]) -> str:
    """The code of a language given as code or English name, in any case: "EN" and "English" are "en".

    Args:
        known: code -> name of those the model writes down.

    Raises:
        InputError: another one; the message names them.
    """
    wanted = language.strip().lower() if isinstance(language, str) else ""
    for code, name in known.items():
        if wanted in (code.lower(), name.lower()):
            return code
    if len(known) == 1:
        (only,) = known.values()
        raise InputError(f"language={language!r}, but this model writes down {only.title()} only; take a multilingual one")
    raise InputError(f"language={language!r} is not one this model knows; {hint(wanted, known)}")


def cleaned(answer: str) -> str:
    """A decoded answer without control tokens such as <|en|> and <|2.40|>."""
    return _CONTROL.sub("", answer)
