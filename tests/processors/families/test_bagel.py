"""BAGEL's processor and model beyond the parity suite: the published configs and folder, prompts, options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from family import load_rows, save
from oracle import small_tokenizer
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.mm.rules import Rule
from sensorium.mm.tiling.plan import Resize
from sensorium.mm.types import MediaHeader
from sensorium.models.families.bagel.model import Bagel
from sensorium.models.families.bagel.processing import BagelProcessingInfo
from sensorium.models.families.bagel.rules import one_position
from sensorium.models.registry import architectures_of, native_architectures
from sensorium.models.weights import named_layers
from sensorium.processors.files import ProcessorFiles

ARCHITECTURES = native_architectures()

LLM_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
VIT_CONFIG = {
    "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "num_attention_heads": 16, "num_channels": 3,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
CONFIG: dict[str, Any] = {"model_type": "bagel", "llm_config": LLM_CONFIG, "vit_config": VIT_CONFIG}
WORDS = small_tokenizer(("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"))
FILES = ProcessorFiles(CONFIG, encode=lambda text: WORDS.encode(text).ids, token_to_id=WORDS.token_to_id)
SPLIT = ("llm_config", "vit_config")


def info_of(**options: object) -> BagelProcessingInfo:
    return BagelProcessingInfo(FILES, options)


def test_the_published_config_builds() -> None:
    model = Bagel(CONFIG, torch.bfloat16, torch.device("meta"))
    shapes = {name: view.shape for _, views in named_layers(model).values() for name, view in views.items()}
    assert model.tower.spec.depth == 26
    assert shapes["tower.embeddings.patch_embedding.weight"] == (1152, 588)
    assert shapes["tower.embeddings.position_embedding.weight"] == (4900, 1152)
    assert shapes["projector.fc1.weight"] == (3584, 1152)
    assert shapes["projector.fc2.weight"] == (3584, 3584)
    assert shapes["positions"] == (4900, 3584)
    assert shapes["language_model.layers.27.self_attn.q_norm.weight"] == (128,)
    assert shapes["head.lm_head.weight"] == (152064, 3584)
    attention = model.spec.attentions[0]
    assert (attention.bias, attention.out_bias, attention.qk_norm, attention.window) == (True, False, "head", None)
    for name in ("language_model.model.layers.0.mlp_moe_gen.up_proj.weight", "time_embedder.mlp.0.bias", "vae2llm.bias"):
        assert model.is_unused(name)
    assert not model.is_unused("language_model.model.layers.0.mlp.up_proj.weight")
    assert architectures_of(CONFIG) == ["BagelForConditionalGeneration"]
    assert ARCHITECTURES["Bagel"] == ARCHITECTURES["BagelForConditionalGeneration"]


@pytest.mark.parametrize("change", [{"interpolate_pos": True}, {"vit_max_num_patch_per_side": 64}])
def test_other_positions_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="patches a side"):
        Bagel({**CONFIG, **change}, torch.bfloat16, torch.device("meta"))


def test_the_published_folder_loads(tmp_path: Path) -> None:
    """Sections of the config are files of their own, and the weights are in ema.safetensors, beside an autoencoder's."""
    row = load_rows()["bagel"]
    hub, own = save(row, tmp_path / "hub"), save(row, tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    for name in SPLIT:
        (own / f"{name}.json").write_text(json.dumps(config.pop(name)))
    del config["architectures"]
    (own / "config.json").write_text(json.dumps(config))
    weights = load_file(own / "model.safetensors")
    (own / "model.safetensors").unlink()
    save_file(weights, own / "ema.safetensors")
    save_file({"decoder.conv_in.bias": torch.zeros(4)}, own / "ae.safetensors")
    image = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
    content = [{"type": "text", "text": "def"}, {"type": "image", "image": image}, {"type": "text", "text": "return"}]
    answers = []
    for folder in (hub, own):
        llm = LLM(str(folder), max_model_len=512, max_num_seqs=1)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        assert output.error is None
        answers.append((output.prompt_token_ids, output.outputs[0].token_ids))
    assert answers[0] == answers[1]
    tokens, marks = answers[0][0], config["own"]
    start, end = marks["<|im_start|>"], marks["<|im_end|>"]
    assert (tokens[0], tokens[-1]) == (start, start)
    assert [tokens.count(marks[name]) for name in ("<|vision_start|>", "<|vision_end|>")] == [1, 1]
    assert (tokens.count(start), tokens.count(end)) == (3, 2)
    middle = tokens.index(marks["<|vision_start|>"])
    assert tokens[middle - 1] == end
    assert tokens[middle + 1] == marks["<|image_pad|>"]


def test_start_and_end_tokens_are_part_of_the_range() -> None:
    info = info_of()
    grid = info.geometry(MediaHeader("image", 100, 140))
    assert (grid.h, grid.w, grid.num_embeds, grid.positions) == (
        37,
        51,
        1887,
        Rule.of(one_position),
    )  # 512 x 720 pixels, then 518 x 714
    span, pad = info.span("image", grid), info.placeholder_ids["image"]
    assert span.token_ids == (info.start, *[pad] * 1887, info.end)
    assert (span.num_tokens, span.num_embeds) == (1889, 1887)
    ids = [5, info.start, pad, info.end, pad, info.start, 6, info.end]
    assert info.preprocess_prompt(ids, {"image": 2}) == [5, pad, pad, info.start, 6, info.end]
    expanded = [5, *span.token_ids]
    assert info.preprocess_prompt(expanded, {"image": 1}) == expanded


def test_thinking_starts_with_the_published_prompt() -> None:
    template = jinja2.Template(BagelProcessingInfo.chat_template)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    plain = template.render(messages=messages, add_generation_prompt=True)
    assert plain == "<|image_pad|><|im_start|>Why?<|im_end|><|im_start|>"
    assert template.render(messages=messages, add_generation_prompt=True, enable_thinking=True) == (
        "<|im_start|>You should first think about the reasoning process in the mind and then provide the user with the answer. "
        "\nThe reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning process here </think> answer "
        f"here<|im_end|>{plain}"
    )


def test_bounds_on_sides() -> None:
    sized = MediaHeader("image", 1000, 500)
    grid = info_of(size={"longest_edge": 500}).geometry(sized)
    assert (grid.h, grid.w) == (35, 18)  # 490 x 245 pixels; half a patch is rounded to the even number
    small = info_of(size={"longest_edge": 100, "shortest_edge": 20}).geometry(sized)
    assert (small.h, small.w) == (7, 4)
    assert max(info_of(detail="low").geometry(sized).merged) == 36
    limited = info_of(max_pixels=100_000).geometry(MediaHeader("image", 980, 980))
    assert (limited.h, limited.w) == (7, 7)
    squares = replace(FILES, image={"size": {"height": 980, "width": 980}})
    assert BagelProcessingInfo(squares).geometry(sized) == info_of().geometry(sized)


def test_images_are_resized_for_the_autoencoder_first() -> None:
    """The publisher's inferencer does so in answers in text, too, so that small images have as many rows as larger ones."""
    for size, steps in {
        (200, 300): (Resize(512, 768), Resize(518, 770)),
        (1080, 1920): (Resize(576, 1024), Resize(546, 980)),
        (980, 980): (Resize(976, 976), Resize(980, 980)),
    }.items():
        (view,) = info_of().plan(MediaHeader("image", *size)).views
        assert view.steps == steps


@pytest.mark.parametrize("rows", [1, 10, 100, 352])
def test_images_shrink_to_a_number_of_rows(rows: int) -> None:
    for size in ((100, 140), (500, 1000), (30, 2000), (980, 980)):
        info, header = info_of(), MediaHeader("image", *size)
        grid = info.geometry(header)
        options = info.shrink_kwargs("image", (1, grid.h, grid.w), rows)
        assert options is not None
        assert 1 <= info.with_kwargs(options).geometry(header).num_embeds <= rows


@pytest.mark.parametrize(
    "options",
    [{"size": 448}, {"size": {"height": 448, "width": 448}}, {"size": {"longest_edge": 1960}}, {"size": {"longest_edge": 7}}],
)
def test_other_sizes_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="edge"):
        info_of(**options)
