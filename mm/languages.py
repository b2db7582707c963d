"""Languages: their codes, their English names, and the names that they have in themselves."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from ..callers.errors import InputError

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

_TAG = re.compile(r"([a-z]{2,3})((?:-[a-z0-9]{1,8})*)")  # language, then script, region, variants (RFC 5646)
_CANTONESE = {"yue", "hk", "mo"}
_SAME_CODES = (
    "en/eng zh/zho/chi/cmn de/deu/ger es/spa ru/rus ko/kor fr/fra/fre ja/jpn pt/por tr/tur pl/pol ca/cat nl/nld/dut "
    "ar/ara/arb sv/swe it/ita id/ind/in hi/hin fi/fin vi/vie he/heb/iw uk/ukr el/ell/gre ms/msa/may/zsm cs/ces/cze "
    "ro/ron/rum/mo da/dan hu/hun ta/tam no/nor/nb/nob th/tha ur/urd hr/hrv bg/bul lt/lit la/lat mi/mri/mao ml/mal "
    "cy/cym/wel sk/slk/slo te/tel fa/fas/per/pes/prs lv/lav/lvs bn/ben sr/srp az/aze/azj sl/slv kn/kan et/est/ekk "
    "mk/mkd/mac br/bre eu/eus/baq is/isl/ice hy/hye/arm ne/nep/npi mn/mon/khk bs/bos kk/kaz sq/sqi/alb sw/swa/swh gl/glg "
    "mr/mar pa/pan si/sin km/khm sn/sna yo/yor so/som af/afr oc/oci ka/kat/geo be/bel tg/tgk sd/snd gu/guj am/amh "
    "yi/yid/ji/ydd lo/lao uz/uzb/uzn fo/fao ht/hat ps/pus/pbt tk/tuk nn/nno mt/mlt sa/san lb/ltz my/mya/bur bo/bod/tib "
    "tl/tgl/fil mg/mlg/plt as/asm tt/tat ln/lin ha/hau ba/bak jw/jv/jav su/sun ga/gle ky/kir zu/zul"
)
_MORE_NAMES = (  # the rest of ISO 639-1
    "aa=afar ab=abkhazian ae=avestan ak=akan an=aragonese av=avaric ay=aymara bi=bislama bm=bambara ce=chechen "
    "ch=chamorro co=corsican cr=cree cu=church_slavic cv=chuvash dv=divehi dz=dzongkha ee=ewe eo=esperanto ff=fulah "
    "fj=fijian fy=western_frisian ga=irish gd=scottish_gaelic gn=guarani gv=manx ho=hiri_motu hz=herero "
    "ia=interlingua ie=interlingue ig=igbo ii=sichuan_yi ik=inupiaq io=ido iu=inuktitut kg=kongo ki=kikuyu "
    "kj=kuanyama kl=kalaallisut kr=kanuri ks=kashmiri ku=kurdish kv=komi kw=cornish ky=kirghiz lg=ganda li=limburgan "
    "lu=luba-katanga mh=marshallese na=nauru nd=north_ndebele ng=ndonga nr=south_ndebele nv=navajo ny=chichewa "
    "oj=ojibwa om=oromo or=oriya os=ossetian pi=pali qu=quechua rm=romansh rn=rundi rw=kinyarwanda sc=sardinian "
    "se=northern_sami sg=sango sh=serbo-croatian sm=samoan ss=swati st=southern_sotho ti=tigrinya tn=tswana to=tonga "
    "ts=tsonga tw=twi ty=tahitian ug=uighur ve=venda vo=volapük wa=walloon wo=wolof xh=xhosa za=zhuang zu=zulu"
)
_OTHER_NAMES = (  # English names beside those of LANGUAGES, some of which Whisper's own code takes
    "my=burmese ca=valencian nl=flemish ht=haitian lb=letzeburgesch ps=pushto pa=panjabi ro=moldavian ro=moldovan si=sinhalese "
    "es=castilian zh=mandarin fa=farsi fa=dari fil=pilipino no=norwegian_bokmal nn=norwegian_nynorsk ky=kyrgyz ug=uyghur "
    "or=odia gd=gaelic fy=frisian ny=nyanja lg=luganda km=central_khmer"
)
_OWN_NAMES = (  # CLDR's
    "zh=中文 de=deutsch es=español ru=русский ko=한국어 fr=français ja=日本語 pt=português tr=türkçe pl=polski ca=català "
    "nl=nederlands ar=العربية sv=svenska it=italiano id=bahasa_indonesia hi=हिन्दी fi=suomi vi=tiếng_việt he=עברית "
    "uk=українська el=ελληνικά ms=bahasa_melayu cs=čeština ro=română da=dansk hu=magyar ta=தமிழ் no=norsk no=bokmål "
    "ur=اردو th=ไทย hr=hrvatski bg=български lt=lietuvių la=latina mi=māori ml=മലയാളം cy=cymraeg sk=slovenčina "
    "te=తెలుగు fa=فارسی lv=latviešu bn=বাংলা sr=српски az=azərbaycan sl=slovenščina kn=ಕನ್ನಡ et=eesti mk=македонски "
    "br=brezhoneg eu=euskara is=íslenska hy=հայերեն ne=नेपाली mn=монгол bs=bosanski kk=қазақ sq=shqip sw=kiswahili "
    "gl=galego mr=मराठी pa=ਪੰਜਾਬੀ si=සිංහල km=ខ្មែរ so=soomaali ka=ქართული be=беларуская tg=тоҷикӣ sd=سنڌي "
    "gu=ગુજરાતી am=አማርኛ yi=ייִדיש lo=ລາວ fo=føroyskt ps=پښتو mt=malti sa=संस्कृतम् lb=lëtzebuergesch my=မြန်မာ "
    "as=অসমীয়া tt=татар yue=粵語 zh=漢語 zh=汉语"
)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (code, name) of each entry CODE=NAME."""
    for entry in text.split():
        code, _, name = entry.partition("=")
        yield code, name.replace("_", " ")


_SAME: Mapping[str, Sequence[str]] = {
    code: codes for codes in (group.split("/") for group in _SAME_CODES.split()) for code in codes
}
"""Code -> the codes of the same language in ISO 639-1, 639-2 and 639-3, and older ones."""
_MOST_CHANGED = 2  # letters by which a suggested name may differ


def _plain(name: str) -> str:
    """Return a name in lower case without accents, and with hyphens for spaces."""
    marked = unicodedata.normalize("NFKD", name.lower())
    return "".join(mark for mark in marked if not "\u0300" <= mark <= "\u036f").replace("_", "-").replace(" ", "-")


_ENTRIES = [*_entries(_OTHER_NAMES), *_entries(_OWN_NAMES), *_entries(_MORE_NAMES), *LANGUAGES.items()]
_CODES: Mapping[str, str] = {_plain(name): code for code, name in _ENTRIES}
"""Any name of a language -> its code."""
_ALL_CODES = {*_CODES.values(), *_SAME}


def language_code(language: str, languages: Mapping[str, str]) -> str:
    """Return the code of a language given as code, BCP-47 tag or name: "EN", "en-US" and "English" are "en", "Deutsch" is "de".

    A tag's script, region and variants do not matter, except that "zh-HK", "zh-MO" and "zh-yue" are Cantonese where the model
    knows it as a language of its own.

    Args:
        languages: code -> name of the languages that the model transcribes.

    Raises:
        InputError: the language is unknown; the message lists the known ones.
    """
    code_given = language.strip().lower().replace("_", "-") if isinstance(language, str) else ""
    for wanted in _candidates(code_given):
        for code, name in languages.items():
            if wanted in (code.lower(), _plain(name)):
                return code
    is_language = any(wanted in _ALL_CODES for wanted in _candidates(code_given))
    if len(languages) == 1 and is_language:
        (name,) = languages.values()
        raise InputError(
            f"<<param=>>{language!r}, but this model transcribes only {name.title()}; use a multilingual one",
            code="unsupported",
            param="language",
        )
    unknown = "is not a language that this model transcribes" if is_language else "is no known code or name of a language"
    near = None if is_language else _nearest(_plain(code_given), [*languages, *map(_plain, languages.values())])
    advice = f"did you mean {near}? The" if near else "the"
    raise InputError(
        f"<<param=>>{language!r} {unknown}; {advice} known ones are {', '.join(languages)}",
        code="unknown_name",
        value=code_given,
        param="language",
    )


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the most similar name, if it differs in few letters."""
    for near in difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        changes = difflib.SequenceMatcher(None, name, near, autojunk=False).get_opcodes()
        if sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal") <= _MOST_CHANGED:
            return near
    return None


def _candidates(code: str) -> Iterator[str]:
    """Yield the codes and names that a language may have, the most specific one first."""
    yield _plain(code)
    tag = _TAG.fullmatch(_CODES.get(_plain(code), code))
    if tag is None:
        return
    primary, rest = tag[1], tag[2].split("-")
    if primary == "zh" and _CANTONESE & {*rest}:
        yield "yue"
    yield from (primary, *_SAME.get(primary, ()))


def same_language_codes(language: str) -> set[str]:
    """Return all ISO 639 codes of a language given as code, BCP-47 tag or name; empty for "" and "und"."""
    tag = _plain(language.strip())
    code = _CODES.get(tag, tag.split("-")[0])
    return {code, *_SAME.get(code, ())} - {"", "und"}
