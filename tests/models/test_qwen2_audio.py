"""Embeddings and logits of Qwen2-Audio against transformers on small random checkpoints, every tensor having its say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import audio_tokenizer, build_checkpoint, load_oracle
from safetensors.torch import save_file
from sensorium.engine.config import load_model_files
from sensorium.engine.loader import load_processing, resolve
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.mm.errors import ConfigError
from sensorium.mm.fields import merge
from sensorium.mm.registry import find
from sensorium.mm.types import AudioItem
from sensorium.models import weights
from sensorium.models.interface import ForwardBatch
from sensorium.models.qwen2_audio import Qwen2Audio

RATE = 16_000
COUNTS = {"one": [30_000], "three": [64_000, 321, 12_345], "odd": [481, 640, 641, 63_999, 63_841]}
VARIANTS = {
    "said to be tied": {"tie": True},  # transformers uses the stored head all the same
    "wide heads": {"hidden": 128, "heads": 2, "kv_heads": 1, "audio_hidden": 128, "audio_heads": 2, "mels": 80, "seconds": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("models") / "qwen2_audio", "qwen2_audio")


def load_ours(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    files = load_model_files(path)
    model = resolve(find(files.architecture).model)(files.config, dtype, torch.device("cpu"))
    weights.load(path, model)
    return model


def make_inputs(processor: Any, counts: Sequence[int], seed: int = 0) -> tuple[dict[str, Any], list[np.ndarray]]:
    """transformers' own tensors for a prompt with sounds of so many samples between words, and the sounds."""
    rng = np.random.default_rng(seed)
    sounds = [(rng.normal(0, 0.1, n) + 0.3 * np.sin(np.arange(n) * (0.05 + 0.1 * i))) for i, n in enumerate(counts)]
    sounds = [sound.astype(np.float32) for sound in sounds]
    text = "def f(x):" + " and ".join(["<|audio_bos|><|AUDIO|><|audio_eos|>"] * len(counts)) + " return it"
    return dict(processor(text=[text], audio=sounds or None, sampling_rate=RATE, return_tensors="pt")), sounds


def our_rows(path: Path, model: Any, sounds: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Processed and encoded in one call."""
    files = load_model_files(path)
    info = load_processing(find(files.architecture), files, {})
    items = [info.process(AudioItem(torch.from_numpy(sound), RATE), torch.float32) for sound in sounds]
    with torch.inference_mode():
        rows = model.embed_multimodal("audio", merge([kwargs for kwargs, _ in items]))
    assert [len(one) for one in rows] == [geometry.num_embeds for _, geometry in items]
    return rows


def run_oracle(model: Any, made: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        return model(**made).logits[0].float()


def run_ours(path: Path, model: Any, made: dict[str, Any], sounds: Sequence[np.ndarray], block: int = 4) -> torch.Tensor:
    """One request, all rows at once, on scattered blocks."""
    ids = made["input_ids"][0]
    count = len(ids)
    blocks = -(-count // block)
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    token = torch.arange(count)
    attn = AttentionMetadata((0, count), (count,), table, table[0].long()[token // block] * block + token % block, block)
    caches = [torch.zeros(2, blocks + 1, block, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    index = (ids == audio_tokenizer().token_to_id("<|AUDIO|>")).nonzero().flatten()
    rows = torch.cat(our_rows(path, model, sounds)) if sounds else None
    batch = ForwardBatch(ids, token[None], [attn] * len(caches), caches, index if sounds else None, rows)
    with torch.inference_mode():
        return model.compute_logits(model.forward(batch))


def compare(path: Path, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    oracle, processor = load_oracle(path)
    made, sounds = make_inputs(processor, counts)
    return run_ours(path, load_ours(path), made, sounds), run_oracle(oracle, made)


def tolerance(theirs: torch.Tensor) -> float:
    return 2e-4 * max(1.0, float(theirs.std()))


@pytest.mark.parametrize("case", COUNTS)
def test_embeddings_equal(case: str, folder: Path) -> None:
    """Only rows of sound are computed here, all rows of 30 s there."""
    oracle, processor = load_oracle(folder)
    made, sounds = make_inputs(processor, COUNTS[case])
    ours = our_rows(folder, load_ours(folder), sounds)
    inner, frames = oracle.model, made["feature_attention_mask"].sum(-1)
    lengths, counts = inner.audio_tower._get_feat_extract_output_lengths(frames)
    mask = torch.where(torch.arange(200)[None] < lengths[:, None], 0.0, -torch.inf)[:, None, None].expand(-1, -1, 200, -1)
    with torch.inference_mode():
        out = inner.audio_tower(made["input_features"], attention_mask=mask).last_hidden_state
        theirs = inner.multi_modal_projector(out)
    assert [len(rows) for rows in ours] == counts.tolist()
    for mine, other, count in zip(ours, theirs, counts.tolist(), strict=True):
        torch.testing.assert_close(mine, other[:count], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [*COUNTS, "text"])
def test_logits_equal(case: str, folder: Path) -> None:
    ours, theirs = compare(folder, COUNTS.get(case, []))
    assert ours.dtype == torch.float32
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() < tolerance(theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_of_model(variant: str, tmp_path: Path) -> None:
    ours, theirs = compare(build_checkpoint(tmp_path, "qwen2_audio", seed=1, **VARIANTS[variant]), [20_000, 5000])
    assert (ours - theirs).abs().max() < tolerance(theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, folder: Path) -> None:
    oracle, processor = load_oracle(folder)
    made, sounds = make_inputs(processor, COUNTS["three"])
    theirs = run_oracle(oracle, made)
    ours = run_ours(folder, load_ours(folder, dtype), made, sounds)
    assert ours.dtype == torch.float32
    assert (ours - theirs).std() / theirs.std() < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_company_changes_nothing(folder: Path) -> None:
    _, processor = load_oracle(folder)
    _, sounds = make_inputs(processor, COUNTS["odd"])
    model = load_ours(folder)
    together = our_rows(folder, model, sounds)
    for sound, rows in zip(sounds, together, strict=True):
        torch.testing.assert_close(our_rows(folder, model, [sound])[0], rows, atol=1e-5, rtol=0)


def test_comparison_sees_every_tensor(folder: Path) -> None:
    """A tensor zeroed in the oracle alone moves its logits by far more than the tolerance."""
    oracle, processor = load_oracle(folder)
    made, sounds = make_inputs(processor, [64_000, 12_345])
    ours = run_ours(folder, load_ours(folder), made, sounds)
    parameters, unseen = dict(oracle.named_parameters()), []
    for name, parameter in parameters.items():
        kept = parameter.data.clone()
        parameter.data.zero_()
        if not (ours - run_oracle(oracle, made)).abs().max() > 100 * tolerance(ours):
            unseen.append(name)
        parameter.data.copy_(kept)
    assert unseen == []


@pytest.mark.parametrize(
    ("audio", "text"), [("model.audio_tower.", "model.language_model."), ("audio_tower.", "language_model.model.")]
)
def test_names_of_every_release(audio: str, text: str, folder: Path, tmp_path: Path) -> None:
    """As transformers keeps them in memory, and as the published checkpoint stores them."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    inner = load_oracle(folder)[0].model
    parts = {audio: inner.audio_tower, text: inner.language_model}
    stored = {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.state_dict().items()}
    around = "model." if audio.startswith("model.") else ""
    projector = inner.multi_modal_projector.state_dict()
    stored |= {f"{around}multi_modal_projector.{name}": tensor for name, tensor in projector.items()}
    head = "lm_head.weight" if around else "language_model.lm_head.weight"
    stored[head] = load_oracle(folder)[0].lm_head.weight.data
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    _, processor = load_oracle(folder)
    made, sounds = make_inputs(processor, COUNTS["one"])
    expected = run_ours(folder, load_ours(folder), made, sounds)
    assert torch.equal(run_ours(folder, load_ours(tmp_path), made, sounds), expected)


def test_the_published_config_leaves_sizes_out() -> None:
    model = Qwen2Audio({"text_config": {"vocab_size": 156_032}, "audio_config": {}}, torch.float16, torch.device("meta"))
    assert (model.vocab_size, model.hidden_size, model.rope_axes, len(model.cache_specs)) == (156_032, 4096, 1, 32)
    assert (model.audio_tower.config.width, model.audio_tower.config.mels, len(model.audio_tower.layers)) == (1280, 128, 32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"activation_function": "tanh"}, "activation_function 'tanh' is not supported"),
        ({"encoder_attention_heads": 7}, "d_model 64 is no multiple"),
        ({"encoder_layers": 0}, "encoder_layers in config.json is 0"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], text: str, folder: Path) -> None:
    config = load_model_files(folder).config
    with pytest.raises(ConfigError, match=text):
        Qwen2Audio(config | {"audio_config": config["audio_config"] | change}, torch.float32, torch.device("cpu"))
