"""Fun-ASR-Nano's prompts and limits in both layouts."""

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.families.fun_asr_nano.config import hub_config, hub_extractor
from sensorium.models.families.fun_asr_nano.processing import FunAsrNanoProcessingInfo, StackedMelSpec, stacked_frames
from sensorium.processors.files import ProcessorFiles

ENCODER = {"output_size": 512, "attention_heads": 4, "linear_units": 2048, "num_blocks": 50, "tp_blocks": 20, "kernel_size": 11}
HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def info_of(published: bool, **frontend: Any) -> FunAsrNanoProcessingInfo:
    if not published:
        return FunAsrNanoProcessingInfo(ProcessorFiles())
    config = {"audio_encoder_conf": ENCODER, "hidden_size": 1024, "vocab_size": 151936}
    given = {"frontend_conf": {"lfr_m": 7, "lfr_n": 6, "n_mels": 80, **frontend}}
    return FunAsrNanoProcessingInfo(ProcessorFiles(config=config, audio=given, token_to_id={"<|AUDIO|>": 151646}.get))


@pytest.mark.parametrize(("published", "token"), [(False, "<|object_ref_start|>"), (True, "<|AUDIO|>")])
def test_prompts_are_the_publishers(published: bool, token: str) -> None:
    info = info_of(published)
    assert info.placeholder_ids == {"audio": 151646}
    plain = info.transcription_request(None, "transcribe", False, "")
    assert plain.prompt == f"{HEAD}语音转写：{token}{TAIL}"
    named = info.transcription_request("en", "transcribe", False, "开放时间, 周一")
    start = "请结合上下文信息，更加准确地完成语音转写任务。如果没有相关信息，我们会留空。\n\n\n**上下文信息：**\n\n\n"
    assert named.prompt == f"{HEAD}{start}热词列表：[开放时间, 周一]\n语音转写成英文：{token}{TAIL}"
    assert len(info.languages) == 31


def test_a_token_per_row_or_per_eight_rows() -> None:
    plain, published = info_of(False), info_of(True)
    assert (plain.mel_spec.sample_scale, published.mel_spec.sample_scale) == (1.0, 32768.0)
    assert [plain.num_rows(frames) for frames in (1, 6, 7, 48, 49)] == [1, 1, 2, 8, 9]
    assert [published.num_rows(frames) for frames in (1, 6, 7, 48, 49)] == [1, 1, 1, 1, 2]
    assert plain.num_item_rows(plain.mel_spec.max_samples) == 2048


def test_stacks_repeat_the_end_frames() -> None:
    frames = torch.arange(8.0)[:, None]
    stacks = stacked_frames(frames, StackedMelSpec())
    assert stacks.tolist() == [[0, 0, 0, 0, 1, 2, 3], [3, 4, 5, 6, 7, 7, 7]]


@pytest.mark.parametrize("frontend", [{"cmvn_file": "am.mvn"}, {"snip_edges": False}, {"window": "povey"}])
def test_other_front_ends_are_refused(frontend: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="feature extractor"):
        info_of(True, **frontend)


@pytest.mark.parametrize("changes", [{"sanm_shfit": 5}, {"tp_blocks": 0}, {"num_blocks": "50"}])
def test_other_encoders_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="audio_encoder_conf"):
        hub_config({"audio_encoder_conf": ENCODER | changes})
    with pytest.raises(ConfigError, match="must be an object"):
        hub_extractor({"frontend_conf": "wav"})
