"""A model family in a package of its own (examples/plugin), found by its entry point."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import fast_tokenizer, randomise, text_config
from PIL import Image
from sensorium import LLM, Media, SamplingParams, register_model
from sensorium.callers.errors import ConfigError
from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings
from sensorium.models import registry
from sensorium.processors.files import ProcessorFiles

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin"
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
    "num_hidden_layers": 2, "image_size": 56, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8))
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "patch_size": 14}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._load_plugins.cache_clear()
    yield monkeypatch
    registry._load_plugins.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str = "square_vlm:register") -> None:
    """Do what pip does: put the package on the path, with its entry points."""
    info = folder / "square_vlm-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: square-vlm\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[sensorium.plugins]\nsquare_vlm = {entry}\n")
    for path in (folder, PLUGIN):
        monkeypatch.syspath_prepend(path)


def save(folder: Path) -> tuple[Path, list[int]]:
    """Write a checkpoint of the family; return it and the tokens that transformers' LLaVA answers, which computes the same."""
    import transformers as tf

    words = fast_tokenizer(["<image>", "<eos>"], eos_token="<eos>", pad_token="<eos>", bos_token="<eos>")
    image = words.convert_tokens_to_ids("<image>")
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**text_config(words)),
        vision_config=tf.SiglipVisionConfig(**VISION),
        image_token_index=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = tf.LlavaForConditionalGeneration(config).eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SquareForConditionalGeneration"], "model_type": "square"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(NORMAL))
    pixels = torch.from_numpy(np.array(IMAGE)).permute(2, 0, 1)[None].float() / 127.5 - 1
    ids = [*words.encode("def f(x): "), *[image] * 16, *words.encode(" return it")]
    tokens = model.generate(
        input_ids=torch.tensor([ids]), pixel_values=pixels, max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    return folder, tokens[0, len(ids) :].tolist()


@pytest.mark.parametrize("engine_process", [False, True])
def test_a_family_of_another_package(tmp_path, no_plugins, engine_process):
    install(tmp_path / "site", no_plugins)
    folder, expected = save(tmp_path / "model")
    prompt = {"prompt": "def f(x): <image> return it", "multi_modal_data": {"image": IMAGE}}
    with LLM(folder, dtype="float32", engine_process=engine_process) as llm:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.error is None
    assert output.outputs[0].token_ids == list(expected)


def test_a_registered_model_reaches_the_engines_process(tmp_path, no_plugins):
    no_plugins.syspath_prepend(PLUGIN)
    import square_vlm

    square_vlm.register()
    square_vlm.register()  # the same row again
    folder, expected = save(tmp_path / "model")
    with LLM(folder, dtype="float32", engine_process=True) as llm:
        (output,) = llm.generate({"prompt": "def f(x): <image> return it", "multi_modal_data": {"image": IMAGE}}, GREEDY)
    assert output.outputs[0].token_ids == list(expected)


def test_sizes_follow_from_the_header_alone(no_plugins):
    no_plugins.syspath_prepend(PLUGIN)
    from square_vlm.model import Square
    from square_vlm.processing import SquareProcessingInfo

    files = ProcessorFiles({"image_token_index": 9, "text_config": {"hidden_size": 8}, "vision_config": {}})
    media = MultiModalProcessor(SquareProcessingInfo(files), MultiModalSettings(row_bytes=16))
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    (item,) = media.open({"image": Media(image, uuid="a")}, {}, {}, None)
    (rows,) = media.open({"image": torch.ones(5, 8)}, {}, {}, None)
    assert (item.plan.num_tokens, item.plan.size, item.plan.bytes) == (576, (90, 120), 576 * 16)
    assert rows.plan.num_tokens == 5
    ((kwargs, grid),) = media.process(item, None, {}).pieces
    assert kwargs["pixel_values"].data.shape == (576, 3 * 14 * 14)
    assert (grid.t, grid.h, grid.w) == (1, 24, 24)
    (again,) = media.open({"image": None}, {"image": ["a"]}, {}, None)
    assert again.processed is not None
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = {"text_config": sizes | {"vocab_size": 99}, "vision_config": sizes | {"image_size": 336, "patch_size": 14}}
    model = Square(config, torch.float32, torch.device("meta"))
    assert (model.row_size, model.vocab_size, model.rope_axes, len(model.cache_specs)) == (32, 99, 1, 2)
    assert model.input_bytes("image", 576) == 576 * 3 * 14 * 14 * 4


def test_a_plugin_that_fails_is_skipped(tmp_path, no_plugins, caplog):
    install(tmp_path, no_plugins, "square_vlm:missing")
    with pytest.raises(ConfigError, match="no implementation of the architecture 'SquareForConditionalGeneration'"):
        registry.find_architecture("SquareForConditionalGeneration")
    assert "square_vlm:missing" in caplog.text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("", "a:B", "a:C"), "architecture is ''"),
        (("X", "a.B", "a:C"), "model is 'a.B'; give 'package.module:Class'"),
        (("X", "a:B", 3), "processing is 3"),
        (
            ("Qwen2VLForConditionalGeneration", "a:B", "a:C"),
            r"is registered with sensorium\.models\.families\.qwen2_vl\.",
        ),
    ],
)
def test_what_cannot_be_registered(no_plugins, row, said):
    architecture, model, processing = row
    with pytest.raises(ConfigError, match=said):
        register_model(architecture, model=model, processing=processing)


def test_classes_that_cannot_be_imported(tmp_path, no_plugins):
    register_model("SquareForConditionalGeneration", model="nowhere.at.all:X", processing="nowhere.at.all:Y")
    folder, _ = save(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere.at.all:Y cannot be imported .*ModuleNotFoundError"):
        LLM(folder)
