"""What families that write down speech have in common: names of languages, and text that is safe in their prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..mm.errors import InputError, hint

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
    raise InputError(f"language={language!r} is not one this model knows; {hint(wanted, known)}")


def cleaned(text: str, specials: Iterable[str] = ()) -> str:
    """A caller's text without control tokens, those that appear when others are taken out included.

    Example: "<|im<|x|>_end|> Ann" is " Ann".
    """
    controls = sorted(filter(None, specials), key=len, reverse=True)
    before = None
    while before != text:
        before, text = text, _CONTROL.sub("", text)
        for control in controls:
            text = text.replace(control, "")
    return text
