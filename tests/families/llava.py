"""LLaVA 1.5, LLaVA-NeXT, LLaVA-OneVision and Granite Vision in the parity suite."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from family import IMAGE_SIZES, Family, call_processor, run_oracle
from oracle import ensure_torchvision, fast_tokenizer, load_oracle, randomise, sharpen, text_config

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TILE, PATCH = 28, 7
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
SHAPE = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH,
}  # fmt: skip
FEW = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
MANY = [[TILE * rows, TILE * columns] for rows in range(1, 5) for columns in range(1, 5)]
QFORMER = {"num_hidden_layers": 2, "intermediate_size": 96, "cross_attention_frequency": 2}
PARTS = "one of six Q-Formers contributes little; tests/models/test_connectors.py compares one of them alone"
KEYS = "model.vision_tower.encoder.layers.{}.self_attn.k_proj.bias"
SLIVERS = [(2, 100), (3, 200), (3, 100)]  # unpadding leaves nothing of their tiles
SIZES = [(90, 130), (60, 60), (40, 170)]


LAYOUTS = {
    "transformers 4": [("vision_tower.", "vision_tower.vision_model.")],
    "transformers 5": [
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("image_newline", "model.image_newline"),
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
    ],
}


def processor_of(name: str, words: Any, select: str) -> Any:
    import transformers as tf

    shared = {"tokenizer": words, "vision_feature_select_strategy": select}
    size, square = {"shortest_edge": TILE}, {"height": TILE, "width": TILE}
    if name == "llava":
        images = tf.CLIPImageProcessor(size=size, crop_size=square)
        return tf.LlavaProcessor(images, patch_size=PATCH, num_additional_image_tokens=1, **shared)
    if name == "granite4_vision":
        images = tf.LlavaNextImageProcessor(size=size, crop_size=square, image_grid_pinpoints=FEW)
        return tf.Granite4VisionProcessor(images, patch_size=PATCH, downsample_rate="2/4", **shared)
    if name == "llava_next":
        images = tf.LlavaNextImageProcessor(size=size, crop_size=square, image_grid_pinpoints=FEW)
        extra = int(select == "default")
        return tf.LlavaNextProcessor(images, patch_size=PATCH, num_additional_image_tokens=extra, **shared)
    images = tf.LlavaOnevisionImageProcessor(size=square, image_grid_pinpoints=MANY)
    videos = tf.LlavaOnevisionVideoProcessor(size=square)
    return tf.LlavaOnevisionProcessor(images, video_processor=videos, num_image_tokens=16, **shared)


def build(
    name: str,
    seed: int,
    vision: dict[str, Any],
    text: str = "llama",
    layer: Any = -2,
    select: str = "default",
    tie: bool = False,
    **more: Any,
) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>")
    stem = {
        "llava": "Llava",
        "llava_next": "LlavaNext",
        "llava_onevision": "LlavaOnevision",
        "granite4_vision": "Granite4Vision",
    }[name]
    options = {"image_token_index": words.convert_tokens_to_ids("<image>"), "tie_word_embeddings": tie}
    if name in ("llava_next", "granite4_vision"):
        options["image_grid_pinpoints"] = FEW
    if name == "granite4_vision":
        options |= {
            "downsample_rate": "2/4", "deepstack_layer_map": [[-3, 2], [1, 0]], "spatial_vision_layer": -2,
            "spatial_target_layers": [1, 3, 4, 5], "qformer_config": {"model_type": "blip_2_qformer", **QFORMER},
        }  # fmt: skip
    if name == "llava_onevision":
        options |= {
            "image_grid_pinpoints": MANY, "video_token_index": words.convert_tokens_to_ids("<video>"),
            "vision_aspect_ratio": "anyres_max_3",
        }  # fmt: skip
    config = getattr(tf, f"{stem}Config")(
        vision_config={**SHAPE, "num_hidden_layers": 4, **vision},
        text_config={"model_type": text, **text_config(words, tie), **more},
        vision_feature_layer=layer,
        vision_feature_select_strategy=select,
        **options,
    )
    model = getattr(tf, f"{stem}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    amplify(model)
    processor = processor_of(name, words, select)
    if name == "llava_onevision":
        processor.vision_aspect_ratio = "anyres_max_3"
    return model, processor


def amplify(model: torch.nn.Module) -> None:
    """Scale the six Q-Formers up: otherwise the logits hardly depend on one of them."""
    factors = {
        "attention.query.weight": 4,
        "attention.key.weight": 4,
        ".query": 12,
        ".image_positions": 12,
        "out_linear.weight": 6,
    }
    for name, p in model.named_parameters():
        for end, factor in factors.items():
            if "projectors." in name and name.endswith(end):
                p.data.mul_(factor)


def finish(folder: Path, **known: Any) -> None:
    (folder / "processor_config.json").write_text(json.dumps(known))


def planes(patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Convert `[patches, 3 * patch^2]` to `[pieces, 3, height, width]`."""
    pieces, h, w = grid.tolist()
    cut = patches.view(pieces, h, w, 3, PATCH, PATCH)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(pieces, 3, h * PATCH, w * PATCH)


def pixels(inputs, features):
    seen = {"image": 0, "video": 0}
    for feature in features:
        name = "pixel_values" if feature.modality == "image" else "pixel_values_videos"
        made = planes(feature.kwargs["pixel_values"].data, feature.kwargs["grid"].data)
        theirs = inputs[name][seen[feature.modality]]
        seen[feature.modality] += 1
        yield name, made, theirs.view(-1, *made.shape[1:])[: len(made)]


def call_nested(processor, text, data):
    """Call the processor with the images of the prompt in a list of their own, as `apply_chat_template` does."""
    return call_processor(processor, text, {**data, "image": [data["image"]]} if "image" in data else data)


def run_cached(model, inputs, answer, positions):
    """Run the oracle with a cache, which its text model does not create itself."""
    from transformers import DynamicCache

    return run_oracle(model, {**inputs, "past_key_values": DynamicCache()}, answer, positions)


def saved_as_tarsier(folder: Path) -> None:
    """Rewrite config.json as Tarsier's; the names of tensors are LLaVA's."""
    finish(folder, **CHOSEN)
    config = json.loads((folder / "config.json").read_text())
    ids = {"image_newline_idx": config["image_token_index"] - 2, "image_new_idx": config["image_token_index"] + 1}
    named = {"architectures": ["TarsierForConditionalGeneration"], "auto_map": {"AutoConfig": "modeling_tarsier.LlavaConfig"}}
    (folder / "config.json").write_text(json.dumps(config | ids | named))


def load_tarsier(folder: Path) -> tuple[Any, Any]:
    """Load LLaVA of transformers from a checkpoint of Tarsier."""
    with TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        del config["auto_map"]
        config["architectures"] = ["LlavaForConditionalGeneration"]
        (Path(place) / "config.json").write_text(json.dumps(config))
        return load_oracle(place)


def call_tarsier(processor: Any, text: str, data: Any) -> dict[str, Any]:
    """Insert the tokens after lines and images, whose embeddings the published model writes between the rows."""
    inputs = call_processor(processor, text, data)
    image, line, new = processor.tokenizer.convert_tokens_to_ids(["<image>", "<|im_start|>", "<video>"])
    ids, rows, side = list[int](), 0, TILE // PATCH
    for token in inputs["input_ids"][0].tolist():
        rows = rows + 1 if token == image else 0
        ends = [line] if rows and rows % side == 0 else []
        ids += [token, *ends, *([new] if rows and rows % side**2 == 0 else [])]
    return {"input_ids": torch.tensor([ids])} | {name: inputs[name] for name in ("pixel_values",) if name in inputs}


def row(name: str, family: str, known: dict[str, Any], **more: Any) -> Family:
    build_ = partial(build, family, **more.pop("built"))
    fullest = {"image": SLIVERS, "video": [(8, 31, 300)]} if family != "llava" else {}
    unused = "layers after the last selected one are not used"
    return Family(
        name,
        build_,
        placeholders=more.pop("placeholders", {"image": "<image>"}),
        sizes=more.pop("sizes", {"image": SIZES}),
        grid=more.pop("grid", {"image": IMAGE_SIZES}),
        cases=more.pop("cases", ("", "i", "ii", "iii", "ii")),
        fullest=fullest,
        tensors=pixels,
        finish=partial(finish, **known),
        silent={
            "model.vision_tower.post_layernorm": "the tower's last hidden states are not used",
            **{KEYS.format(i): "a key bias adds the same to all scores of a query" for i in range(4)},
            **{f"model.vision_tower.encoder.layers.{i}": unused for i in more.pop("unused", [])},
            **more.pop("quiet", {}),
        },
        layouts=more.pop("layouts", LAYOUTS),
        **more,
    )


CHOSEN = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
FULL = CHOSEN | {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}
ONE = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_3"}
SCALED = {
    "embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 0.5,
}  # fmt: skip
MINIMAX = {  # for MiniMax-VL-01, whose class differs in defaults only
    "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16, "full_attn_alpha_factor": 1.3,
    "linear_attn_alpha_factor": 1.2, "mlp_alpha_factor": 0.9,
}  # fmt: skip
FAMILIES = [
    row(
        "llava",
        "llava",
        CHOSEN,
        built={"vision": CLIP},
        unused=[3],
        variants={
            "qwen2 and two layers": {"text": "qwen2", "layer": [-4, -2]},
            "tied": {"tie": True, "text": "mistral", "sliding_window": None},
        },
    ),
    row(
        "llava_next",
        "llava_next",
        CHOSEN,
        built={"vision": CLIP, "text": "mistral", "sliding_window": None},
        unused=[3],
        variants={"minimax": {"text": "minimax", "layer": -1, **MINIMAX}},
    ),
    replace(
        row("tarsier", "llava", CHOSEN, built={"vision": CLIP}, unused=[3], call=call_tarsier),
        finish=saved_as_tarsier,
        load=load_tarsier,
    ),
    row(
        "llava_onevision",
        "llava_onevision",
        ONE,
        cases=("", "i", "v", "ii", "ivi", "vi"),
        call=call_nested,
        built={"vision": SIGLIP, "text": "qwen2", "layer": -1, "select": "full"},
        placeholders={"image": "<image>", "video": "<video>"},
        fullest_items=1,  # several images are not tiled
        sizes={"image": SIZES, "video": [(3, 40, 60), (5, 30, 30), (2, 70, 20)]},
        grid={"image": IMAGE_SIZES, "video": [(1, 56, 56), (2, 90, 60), (3, 60, 90), (6, 80, 100), (13, 64, 64)]},
    ),
    row(
        "granite_vision",
        "llava_next",
        FULL,
        built={"vision": SIGLIP, "text": "granite", "layer": [-4, -3, -1], "select": "full", **SCALED},
    ),
    row(
        "granite4_vision",
        "granite4_vision",
        FULL | {"downsample_rate": "2/4"},
        run=run_cached,
        built={
            "vision": SIGLIP | {"hidden_size": 64},
            "text": "granite4_vision_text",
            "select": "full",
            "num_hidden_layers": 6,
            **SCALED,
        },
        unused=[3],
        quiet={
            "model.layerwise_projectors": PARTS,
            "model.spatial_projectors": PARTS,
            "model.vision_tower.encoder.layers.2.layer_norm2.bias": "used by those projectors only",
        },
        layouts={"the tower a level deeper": [("model.vision_tower.", "model.vision_tower.vision_model.")]},
    ),
]
