"""Promises of `llm.transcribe` for every family that transcribes: arguments, gates, batches and beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family
import pytest
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError

SHORT = SamplingParams(temperature=0.0, max_tokens=5)
ROWS = (
    "audioflamingo3", "canary", "cohere_asr", "fireredasr2", "fun_asr_nano", "funasr", "funaudiochat", "gemma3n", "gemma4",
    "glmasr", "granite_speech", "kimi_audio", "midashenglm", "minicpmo", "moonshine", "moss_transcribe", "phi4_multimodal",
    "qwen2_5_omni", "qwen2_audio", "qwen3_asr", "qwen3_omni", "vibevoice_asr", "voxtral", "voxtral_realtime", "whisper",
)  # fmt: skip
CLIPS = [(family.make_media("audio", (size,), seed), 16_000) for seed, size in enumerate((15_000, 9000, 20_000))]


def arguments(llm: LLM) -> dict[str, tuple[bool, dict[str, Any]]]:
    """Return, for each argument that a model may not honour: whether it does, and a call with it.

    A model of one language takes its name, which changes nothing, and refuses that of any other.
    """
    speech = llm.speech
    language = next((code for code in speech.languages if code != "en"), "de" if len(speech.languages) == 1 else "en")
    words = {name: (speech.takes_context, {name: "Ann"}) for name in ("context", "prompt", "hotwords")}
    return words | {
        "language": (speech.takes_language, {"language": language}),
        "timestamps": (speech.has_timestamps, {"timestamps": "segment"}),
        "sequential": (speech.has_timestamps, {"sequential": True}),
        "task": ("translate" in speech.tasks, {"task": "translate"}),
        "condition_on_previous_text": (False, {"condition_on_previous_text": True}),
    }


def asks(llm: LLM, language: str | None = None, task: str = "transcribe", timestamps: str = "none", **words: str) -> str:
    return str(llm.speech.transcription_request(language, task, timestamps != "none", " ".join(words.values())))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROWS)
def test_promises(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = family.load_rows()[name]
    with LLM(family.save(row, tmp_path / name), max_num_seqs=4, batch_invariant=True) as llm:
        if name == "qwen2_5_omni":  # the row's tokenizer has the names of Qwen3-Omni
            monkeypatch.setattr(llm.speech, "audio_text", row.placeholders["audio"])
        given = {"vad": False, "use_tqdm": False, "sampling_params": SHORT}
        for argument, (is_honoured, option) in arguments(llm).items():
            if not is_honoured:
                with pytest.raises(InputError) as caught:
                    llm.transcribe(CLIPS[0], **given, **option)
                assert caught.value.info.param == argument
            elif argument != "sequential" and len(llm.speech.languages) > 1:
                base = {} if argument == "language" else arguments(llm)["language"][1]
                assert asks(llm, **base | option) != asks(llm, **base), f"{argument} has no effect on the request"
        together = llm.transcribe(CLIPS, **given)
        if len(llm.speech.languages) == 1:
            (spoken,) = llm.speech.languages
            named = llm.transcribe(CLIPS[:1], language=spoken, **given)
            assert [(one.text, one.language) for one in named] == [(together[0].text, spoken)]
        assert [one.error for one in together] == [None] * 3
        for clip, one in zip(CLIPS, together, strict=True):
            (alone,) = llm.transcribe(clip, **given)
            assert alone.output.outputs[0].token_ids == one.output.outputs[0].token_ids
            assert alone.windows == one.windows
        gates = {"temperature": (0.0, 0.5), "log_prob_threshold": 0.0, "no_speech_threshold": None}
        (doubtful,) = llm.transcribe(CLIPS[0], **given | gates)
        (window,) = doubtful.windows
        assert [(one.temperature, one.rejected) for one in window.attempts] == [(0.0, "avg_logprob"), (0.5, "avg_logprob")]
        (beams,) = llm.transcribe(CLIPS[0], **given, beam_size=2, temperature=0.0)
        assert beams.error is None
        assert beams.output.prompt_token_ids == together[0].output.prompt_token_ids
