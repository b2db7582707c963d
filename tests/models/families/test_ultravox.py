"""Ultravox: checkpoints that name other models, and trailing rows after the last window."""

from __future__ import annotations

import json
from pathlib import Path

import family
import numpy as np
import pytest
import torch
from fake_hub import serving
from hub_fixtures import use_hub
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError, HubError
from sensorium.engine.model_files import load_model_files
from tokenizers import AddedToken, Tokenizer

ELSEWHERE = {"audio_model_id": "a/tower", "text_model_id": "a/decoder"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return family.save(family.load_rows()["ultravox"], tmp_path / "ultravox")


def change(folder: Path, change: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))


def test_a_checkpoint_that_names_other_models_holds_all_itself(folder: Path) -> None:
    change(folder, ELSEWHERE)
    LLM(folder, max_model_len=256).close()
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "language_model" not in name}, folder / "model.safetensors")
    with pytest.raises(HubError, match="a/decoder"):
        LLM(folder, max_model_len=256, offline=True)
    change(folder, {"text_model_id": "no name"})
    with pytest.raises(CheckpointError, match=r"lacks .*text_model_id='no name', audio_model_id='a/tower'.; download it"):
        LLM(folder, max_model_len=256)
    vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    change(folder, {"text_config": None, "vocab_size": vocab, "audio_token_index": vocab})
    with pytest.raises(ConfigError, match=r"in another repository \(text_model_id='no name'\), which was not found"):
        LLM(folder, max_model_len=256)


AUDIO = np.random.default_rng(0).standard_normal(20_000).astype(np.float32) * 0.1
PROMPT = {"prompt": "def f(x): <|audio|> return x", "multi_modal_data": {"audio": [AUDIO]}}


def answer(folder: Path, **options: object) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.2)
    with LLM(folder, max_model_len=256, **options) as llm:
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


def move_part(folder: Path, place: Path, section: str, prefix: str, stored: str, extra: str) -> None:
    """Move a part of a checkpoint to another folder, and add a tensor there that is not used."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config.pop(section)))
    (folder / "config.json").write_text(json.dumps(config))
    moved = {stored + name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    unused = {extra: torch.zeros(3)} if extra else {}
    save_file(moved | unused, place / "model.safetensors")
    save_file({name: weights[name] for name in weights if not name.startswith(prefix)}, folder / "model.safetensors")


def test_parts_in_other_folders_and_on_the_hub_are_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, digest = answer(folder), load_model_files(folder).content_digest()
    move_part(folder, tmp_path / "tower", "audio_config", "audio_tower.", "model.encoder.", "model.decoder.norm.weight")
    change(folder, {"audio_model_id": "tower"})
    assert answer(folder) == expected
    digests = {digest, load_model_files(folder).content_digest()}
    tower = load_file(tmp_path / "tower" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tower.items()}, tmp_path / "tower" / "model.safetensors")
    assert len(digests | {load_model_files(folder).content_digest()}) == 3
    save_file(tower, tmp_path / "tower" / "model.safetensors")
    move_part(folder, tmp_path / "decoder", "text_config", "language_model.", "", "")
    change(folder, {"text_model_id": "org/decoder"})
    with serving("org/decoder", tmp_path / "decoder") as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        assert answer(folder) == expected
        assert hub.fetched() == {"config.json", "model.safetensors"}
    assert answer(folder, offline=True) == expected


@pytest.mark.parametrize("name", ["/tower", "../tower", "a/..", ".", "~/a/tower", "a/b/tower", "a\\tower"])
def test_a_part_is_not_read_from_any_other_path(folder: Path, name: str) -> None:
    change(folder, {"audio_model_id": name})
    with pytest.raises(CheckpointError, match=r"audio_model_id=.* beside the checkpoint's and give its name alone"):
        load_model_files(folder)


def test_a_placeholder_after_the_vocabulary(folder: Path) -> None:
    """v0.6 adds a token for the placeholder, for which the decoder has no embedding."""
    expected, words = answer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens([AddedToken("<|audio|>", special=True, normalized=False)])
    words.save(str(folder / "tokenizer.json"))
    vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    assert words.token_to_id("<|audio|>") == vocab
    change(folder, {"audio_token_index": vocab})
    assert answer(folder) == expected
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, seed=1, logit_bias={vocab: 100.0})
    with LLM(folder, max_model_len=256) as llm:
        output = llm.generate(PROMPT, params, use_tqdm=False)[0]
        assert vocab in output.prompt_token_ids
        assert vocab not in output.outputs[0].token_ids
    change(folder, {"audio_token_index": vocab + 1})
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        LLM(folder, max_model_len=256)


def test_trailing_rows_attend_and_are_not_attended_to(folder: Path) -> None:
    with LLM(folder, max_model_len=256) as llm:
        encoder = llm.engine.loop.core.executor.runner.model.audio_tower
        audio, nothing = torch.randn(12, 24), torch.zeros(9, 24)
        with torch.inference_mode():
            (alone,) = encoder(audio, [12])
            both = encoder(torch.cat((audio, nothing, audio)), [12, 12], [4, None])
            other = encoder(torch.cat((audio + 1, nothing)), [12], [4])[0]
    assert [len(rows) for rows in both] == [10, 6]
    assert torch.equal(both[0][:6], alone)
    assert torch.equal(both[1], alone)
    assert not torch.isclose(other[6:], both[0][6:]).all(1).any()
