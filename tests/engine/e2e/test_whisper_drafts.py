"""Drafted tokens with cross-attention: transcripts are those without drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
from sensorium import LLM, SamplingParams

ASSETS = Path(__file__).parents[3] / "assets"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("engine_process", [False, True])
def test_transcripts_with_drafts_are_those_without(temperature: float, engine_process: bool) -> None:
    clips = [soundfile.read(path, dtype="float32")[0] for path in sorted((ASSETS / "speech").glob("*.flac"))]
    plain = SamplingParams(temperature=temperature, seed=3, max_tokens=40, logprobs=2)
    with LLM(ASSETS / "tiny-asr", max_num_seqs=2, engine_process=engine_process) as llm:
        assert llm.engine.speech is not None
        request = llm.engine.speech.transcription_request("en", "transcribe", False, "")
        prompts = [{"prompt": request.prompt, "multi_modal_data": {"audio": [clip]}} for clip in clips]
        expected = [output.outputs[0] for output in llm.generate(prompts, plain, use_tqdm=False)]
        drafts = [(*answer.token_ids[:5], 7, *answer.token_ids[5:]) for answer in expected]  # one is wrong
        params = [replace(plain, draft_text=draft) for draft in drafts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, answer in zip(outputs, expected, strict=True):
            assert output.outputs[0].token_ids == answer.token_ids
            assert output.outputs[0].logprobs == answer.logprobs
        assert not llm.stats.no_drafts
        (stats,) = llm.stats.drafts
    assert stats.proposer == "hypothesis"
    assert sum(stats.accepted) > 0
