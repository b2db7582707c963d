"""Prompts and outputs of families that transcribe speech, and languages by name."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.languages import LANGUAGES, language_code
from sensorium.mm.speech import strip_control_tokens
from sensorium.mm.types import MediaHeader
from sensorium.models.families.audioflamingo3.processing import AudioFlamingo3ProcessingInfo
from sensorium.models.families.qwen2_audio.processing import Qwen2AudioProcessingInfo
from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
from sensorium.models.families.qwen3_asr.processing import Qwen3ASRProcessingInfo
from sensorium.models.families.whisper.processing import WhisperProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.interface import SupportsTranscription

RATE = 16_000
ENGLISH = {"is_multilingual": False, "no_timestamps_token_id": 50362, "eos_token_id": 50256}
MANY = {"lang_to_id": {"<|en|>": 50259, "<|de|>": 50261}, "suppress_tokens": [1, 2], "begin_suppress_tokens": [220]}


def whisper(**generation: object) -> WhisperProcessingInfo:
    return WhisperProcessingInfo(ProcessorFiles(audio={"feature_size": 80}, generation=generation))


def test_whisper_always_has_a_full_window() -> None:
    """Audio of any length up to 30 s gives 1500 rows."""
    info = whisper(**ENGLISH)
    for samples in (1, 400, RATE, 30 * RATE):
        assert info.geometry(MediaHeader("audio", samples=samples)).num_embeds == 1500
    with pytest.raises(InputError, match=r"it lasts 30\.00 s, the model takes at most 30 s"):
        info.geometry(MediaHeader("audio", samples=30 * RATE + 1))
    assert info.geometry(MediaHeader("audio", samples=99 * RATE, exact=False)).num_embeds == 1500


def test_config_must_agree_with_the_window() -> None:
    with pytest.raises(ConfigError, match=r"max_source_positions is 1000 in config\.json"):
        WhisperProcessingInfo(ProcessorFiles(config={"max_source_positions": 1000}, audio={"feature_size": 80}))


def test_prompts_of_whisper() -> None:
    english, many = whisper(**ENGLISH), whisper(**MANY)
    assert english.language_detection_request() is None
    assert english.transcription_request(None, "transcribe", False, "").prompt == "<|startoftranscript|><|notimestamps|>"
    timed = english.transcription_request(None, "transcribe", True, " Ann ")
    assert timed.prompt == "<|startofprev|> Ann<|startoftranscript|>"
    assert (timed.times.first, timed.times.none, timed.times.end, timed.times.step) == (50363, 50362, 50256, 0.02)
    assert many.language_detection_request().allowed_tokens == {"<|en|>": "en", "<|de|>": "de"}
    asked = many.transcription_request("de", "translate", False, "")
    assert asked.prompt == "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    assert (asked.suppressed, asked.suppressed_first, asked.times) == ((1, 2), (220,), None)
    assert (english.tasks, many.tasks) == (("transcribe",), ("transcribe", "translate"))
    assert not many.has_timestamps


def test_lengths_of_qwen3_asr() -> None:
    """Audio shorter than half a second is padded; 20 minutes is the limit."""
    info = Qwen3ASRProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    counts = {1: 7, 8000: 7, RATE: 13, RATE + 159: 13, RATE + 160: 14, 3 * RATE: 39, 1200 * RATE: 15_600}
    for samples, rows in counts.items():
        assert info.geometry(MediaHeader("audio", samples=samples)).num_embeds == rows
    with pytest.raises(InputError, match="at most 1200 s"):
        info.geometry(MediaHeader("audio", samples=1200 * RATE + 1))


def test_prompts_and_answers_of_qwen3_asr() -> None:
    info = Qwen3ASRProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    turns = "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    assert info.transcription_request(None, "transcribe", False, "").prompt == f"<|im_start|>system\n<|im_end|>\n{turns}"
    told = info.transcription_request("yue", "transcribe", False, "Ann").prompt
    assert told == f"<|im_start|>system\nAnn<|im_end|>\n{turns}language Cantonese<asr_text>"
    assert info.parse_transcript("language English<asr_text> Hello.<|im_end|>", None) == ("Hello.", "en")
    assert info.parse_transcript("language None<asr_text>", None) == ("", None)
    assert info.parse_transcript("Guten Tag.<|im_end|>", "de") == ("Guten Tag.", "de")
    assert info.mel_spec.max_samples == 1200 * RATE


def test_prompts_and_answers_of_qwen2_audio() -> None:
    info = Qwen2AudioProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    asked = info.transcription_request("de", "transcribe", False, "").prompt
    assert asked == "<|audio_bos|><|AUDIO|><|audio_eos|>Detect the language and recognize the speech: <|de|>"
    assert info.transcription_request(None, "transcribe", False, "").prompt.endswith("the speech:")
    assert info.parse_transcript("<|zh|>你好。<|endoftext|>", None) == ("你好。", "zh")
    assert info.parse_transcript(" Hello.", "en") == ("Hello.", "en")
    assert info.parse_transcript("Hello.", None) == ("Hello.", None)


def test_prompts_and_answers_of_audio_flamingo() -> None:
    info = AudioFlamingo3ProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    prompt = info.transcription_request(None, "transcribe", False, "").prompt
    assert prompt.endswith("<|im_start|>user\n<sound>Transcribe the input speech.<|im_end|>\n<|im_start|>assistant\n")
    for answer in (
        'The spoken content of the audio is "It is 5.30."<|im_end|>',
        "The content of the input audio is 'It is 5.30.'.",
    ):
        assert info.parse_transcript(answer, None) == ("It is 5.30.", None)
    for answer in ('She said "no".', "It is 5.30.", "", '"'):
        assert info.parse_transcript(answer, None) == (answer, None)
    assert info.mel_spec.max_samples == 600 * RATE


@pytest.mark.parametrize("info", [WhisperProcessingInfo, Qwen3ASRProcessingInfo, Qwen2AudioProcessingInfo])
def test_families_that_support_transcription(info: type) -> None:
    assert isinstance(info(ProcessorFiles()), SupportsTranscription)
    assert not isinstance(Qwen2VLProcessingInfo(ProcessorFiles()), SupportsTranscription)


def test_languages_by_code_and_name() -> None:
    assert language_code(" DE ", LANGUAGES) == language_code("German", LANGUAGES) == "de"
    assert language_code("haitian creole", LANGUAGES) == "ht"
    with pytest.raises(InputError, match="no known code") as caught:
        language_code("xx", LANGUAGES)
    info = caught.value.info
    assert (info.code, info.param, info.value) == ("unknown_name", "language", "xx")
    with pytest.raises(InputError, match="language=3"):
        language_code(3, LANGUAGES)  # type: ignore[arg-type]
    assert strip_control_tokens("<|en|> a <|0.00|>b<|endoftext|>") == " a b"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        *((spelling, "en") for spelling in ("en-US", "EN", "en_GB", "eng", "english", "ENGLISH", "en-Latn-US", " en-001 ")),
        *((spelling, "zh") for spelling in ("zh-Hans", "zh-CN", "zh-Hant-TW", "zho", "cmn-Hans-CN", "chi", "Mandarin")),
        *((spelling, "yue") for spelling in ("yue-Hant-HK", "zh-HK", "zh-Hant-MO", "zh-yue", "Cantonese")),
        *(("nb-NO", "no"), ("nn-NO", "nn"), ("pt-BR", "pt"), ("deu", "de"), ("ger", "de"), ("iw", "he"), ("in-ID", "id")),
        *(
            ("sr-Cyrl-RS", "sr"),
            ("haitian_creole", "ht"),
            ("haitian-creole", "ht"),
            ("fil-PH", "fil"),
            ("tgl", "tl"),
            ("jv", "jw"),
        ),
        *(("Deutsch", "de"), ("español", "es"), ("Espanol", "es"), ("Français", "fr"), ("日本語", "ja"), ("Русский", "ru")),
        *(("Farsi", "fa"), ("Filipino", "fil"), ("bokmål", "no"), ("Māori", "mi"), ("हिन्दी", "hi"), ("العربية", "ar")),
        *(("Castilian", "es"), ("es-419", "es"), ("de-CH-1996", "de"), ("haw", "haw"), ("mo", "ro")),
    ],
)
def test_spellings_of_languages(given: str, code: str) -> None:
    assert language_code(given, LANGUAGES) == code


def test_a_region_never_names_another_language() -> None:
    some = {code: LANGUAGES[code] for code in ("en", "zh", "pt")}
    assert language_code("zh-HK", some) == "zh"  # this model has no Cantonese of its own
    for given in ("xx-en", "e", "", "en-", "-en", "en--US", "english-us", "en US", None, b"en"):
        for known in (some, {"en": "english"}):
            with pytest.raises(InputError, match="no known code") as caught:
                language_code(given, known)  # type: ignore[arg-type]
            assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "language")
    for given in ("yue", "de-EN", "German", "ga", "zu-ZA"):
        with pytest.raises(InputError, match="this model transcribes") as caught:
            language_code(given, some)
        assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "language")
    with pytest.raises(InputError, match="transcribes only English"):
        language_code("de-DE", {"en": "english"})
    assert language_code("en-AU", {"en": "english"}) == "en"


def test_all_of_iso_639_1_are_languages() -> None:
    some = {code: LANGUAGES[code] for code in ("en", "zh", "ne", "nl", "fo", "tl")}
    for given in ("gd", "ku", "or", "eo", "xh", "Kurdish", "Odia", "Irish", "Deutsch", "español", "Farsi", "ig-NG"):
        with pytest.raises(InputError, match="known ones are en, zh") as caught:
            language_code(given, some)
        assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "language")
    for given in ("Filipino", "fil-PH", "Pilipino", "tgl"):
        assert language_code(given, some) == "tl"
    pycountry = pytest.importorskip("pycountry", reason="needs the list of pycountry")
    for language in pycountry.languages:
        if code := getattr(language, "alpha_2", None):
            with pytest.raises(InputError, match="is not a language that"):
                language_code(code, {"xx": "one", "yy": "two"})


def test_a_suggested_name_differs_in_few_letters() -> None:
    for given, is_near in (("Englsh", True), ("Frensh", True), ("Klingon", False), ("Sindarin", False), ("Dutsch", True)):
        with pytest.raises(InputError) as raised:
            language_code(given, LANGUAGES)
        assert ("did you mean" in str(raised.value)) == is_near, given
