"""ColPali, ColQwen2, ColQwen2.5, ColQwen3, Nemotron-ColEmbed-VL and ColModernVBERT in the suite of embedders.

transformers has no class of ColQwen3; its oracle is Qwen3-VL of transformers and a linear layer. The oracle of
Nemotron-ColEmbed-VL is Qwen3-VL without its last norm, with the mask and the prompts of its publisher's class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from embedder import Embedder
from family import patches_in_squares
from oracle import build_model, build_processor, ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

SIDE, PATCH = 56, 14


def paligemma(seed: int) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<bos>", "<eos>", "<pad>", "<image>"], eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")
    images = tf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = (SIDE // PATCH) ** 2
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False, **shape}
    vlm = tf.PaliGemmaConfig(
        vision_config={**vision, "projection_dim": 64},
        text_config={"model_type": "gemma", **text_config(words, head_dim=16)},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
    model = tf.ColPaliForRetrieval(tf.ColPaliConfig(vlm_config=vlm, embedding_dim=32)).eval()
    randomise(model, seed)
    sharpen(model.vlm.vision_tower)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name and "vision_tower" not in name:
            parameter.data.sub_(1)  # the weight is stored minus 1
    return model, tf.ColPaliProcessor(images, words)


def qwen(name: str, seed: int) -> tuple[Any, Any]:
    inner, processor = build_model(name, seed, layers=2, vision_depth=2, full_attention=(1,)), build_processor(name)
    import transformers as tf

    model = tf.ColQwen2ForRetrieval(tf.ColQwen2Config(vlm_config=inner.config, embedding_dim=32)).eval()
    randomise(model, seed)
    return model, tf.ColQwen2Processor(processor.image_processor, processor.tokenizer)


def modernvbert(seed: int) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    tags = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    specials = ["[CLS]", "[SEP]", "<pad>", "<|begin_of_text|>", "<image>", "<fake_token_around_image>", "<global-img>", *tags]
    words = fast_tokenizer([*specials, "<end_of_utterance>"], pad_token="<pad>")
    ids = [(name, words.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    words.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = text_config(words) | {"num_hidden_layers": 3, "local_attention": 16, "global_attn_every_n_layers": 2}
    vlm = tf.ModernVBertConfig(
        text_config=tf.ModernBertConfig(**text),
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": SIDE,
            "patch_size": PATCH,
            "vision_use_head": False,
            **shape,
        },
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=2,
    )
    model = tf.ColModernVBertForRetrieval(tf.ColModernVBertConfig(vlm_config=vlm, embedding_dim=32)).eval()
    randomise(model, seed)
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": SIDE}}
    return model, tf.ColModernVBertProcessor(tf.Idefics3ImageProcessor(**sizes), words, image_seq_len=4)


def finish(folder: Path) -> None:
    """Write the number of rows per tile, as the Hub's checkpoints do."""
    made = {"image_seq_len": 4, "processor_class": "ColModernVBertProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(made))


def vbert_inputs(processor: Any, item: Any) -> dict[str, Any]:
    return dict(processor.process_queries([item]) if isinstance(item, str) else processor.process_images([item]))


def tiles(given: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the pixels of both sides; ours are patches in squares."""
    squares = features[0].kwargs["pixel_values"].data.view(-1, 2, 2, 2, 2, 3, PATCH, PATCH).permute(0, 5, 1, 3, 6, 2, 4, 7)
    yield "pixel_values", squares.reshape(given["pixel_values"].shape), given["pixel_values"]


def inputs(processor: Any, item: Any) -> dict[str, Any]:
    return dict(processor(text=[item]) if isinstance(item, str) else processor(images=[item]))


def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    return model(**{name: value for name, value in given.items() if name != "labels"}).embeddings[0]


def run_qwen(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Run with the positions that the publisher computes. transformers' class leaves them out: its pages have a plain range."""
    ids, grid = given["input_ids"], given.get("image_grid_thw")
    kinds = (ids == model.config.vlm_config.image_token_id).int()
    place = model.vlm.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
    return model(**given, position_ids=place).embeddings[0]


def qwen3_vl(config: dict[str, Any]) -> Any:
    """Return transformers' Qwen3-VL with random weights."""
    ensure_torchvision()
    import transformers as tf

    inner = tf.Qwen3VLConfig.from_dict({**config, "model_type": "qwen3_vl"})
    return tf.Qwen3VLForConditionalGeneration._from_config(inner, attn_implementation="eager")


class ColQwen3(torch.nn.Module):
    """Qwen3-VL and a linear layer, under TomoroAI's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.vlm = config, qwen3_vl(config)
        self.embedding_proj_layer = torch.nn.Linear(64, 32, bias=False)

    def forward(self, input_ids: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        kinds = (input_ids == self.config["image_token_id"]).int()
        hidden = self.vlm.model(input_ids=input_ids, mm_token_type_ids=kinds, **given).last_hidden_state[0]
        return torch.nn.functional.normalize(self.embedding_proj_layer(hidden), dim=-1)

    def save_pretrained(self, folder: Path, max_shard_size: object = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "model.safetensors")


class NemotronColEmbed(torch.nn.Module):
    """Qwen3-VL without a last norm, whose tokens all see each other, under its publisher's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.vlm = config, qwen3_vl(config)
        self.vlm.model.language_model.norm = torch.nn.Identity()

    def forward(self, input_ids: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        kinds, count = (input_ids == self.config["image_token_id"]).int(), input_ids.shape[1]
        grid = given.get("image_grid_thw")
        positions = self.vlm.model.get_rope_index(input_ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
        mask = torch.zeros(1, 1, count, count)
        hidden = self.vlm.model(input_ids=input_ids, attention_mask=mask, position_ids=positions, **given).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden, dim=-1)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        held: dict[str, Any] = self.vlm.state_dict(*args, **kwargs)
        return held

    def save_pretrained(self, folder: Path, max_shard_size: object = None) -> None:
        """Save the weights as published, those of a norm and a head that are not used included."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(tensors | {"model.language_model.norm.weight": torch.full((64,), 3.0)}, folder / "model.safetensors")


class ColQwen3Processor(SimpleNamespace):
    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def qwen3(seed: int, kind: Any = ColQwen3, **named: Any) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    inner = build_processor("qwen2_vl")
    words, half = inner.tokenizer, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    text = text_config(words, head_dim=16, num_hidden_layers=3)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    vision = {"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    vision |= {"patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids).to_dict()
    named = named or {"architectures": ["ColQwen3"], "model_type": "colqwen3", "embed_dim": 32}
    model = kind({**config, **named}).eval()
    randomise(model, seed)
    images = tf.Qwen2VLImageProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 160 * 160}, **half)
    return model, ColQwen3Processor(tokenizer=words, image_processor=images, image_token_id=ids["image_token_id"])


def load_qwen3(folder: Path, kind: Any = ColQwen3) -> tuple[Any, Any]:
    model, tensors = kind(json.loads((folder / "config.json").read_text())), load_file(folder / "model.safetensors")
    unused = tensors.pop("model.language_model.norm.weight", None)
    (model if unused is None else model.vlm).load_state_dict(tensors)
    words, images = (part.from_pretrained(folder) for part in _qwen_parts())
    token = model.config["image_token_id"]
    return model.eval(), ColQwen3Processor(tokenizer=words, image_processor=images, image_token_id=token)


def _qwen_parts() -> tuple[Any, Any]:
    import transformers as tf

    return tf.PreTrainedTokenizerFast, tf.Qwen2VLImageProcessor


def qwen3_inputs(processor: Any, item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"input_ids": processor.tokenizer(f"Query: {item}" + "<|endoftext|>" * 10, return_tensors="pt")["input_ids"]}
    made = dict(processor.image_processor([item], return_tensors="pt"))
    rows = "<|image_pad|>" * (int(made["image_grid_thw"].prod()) // 4)
    page = f"<|im_start|>user\n<|vision_start|>{rows}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
    return {"input_ids": processor.tokenizer(page, return_tensors="pt")["input_ids"], **made}


def nemotron_inputs(processor: Any, item: Any) -> dict[str, Any]:
    made, text = dict[str, Any](), f"Query: query: {item}"
    if not isinstance(item, str):
        made = dict(processor.image_processor([item], return_tensors="pt"))
        rows = "<|image_pad|>" * (int(made["image_grid_thw"].prod()) // 4)
        text = f"<|vision_start|>{rows}<|vision_end|>passage: "
    turns = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return {"input_ids": processor.tokenizer(turns, return_tensors="pt")["input_ids"], **made}


def run_qwen3(model: Any, given: dict[str, Any]) -> torch.Tensor:
    return model(**given)


def opensearch(name: str) -> str:
    """Return OpenSearch's name of a tensor."""
    return name.replace("vlm.model.", "").replace("vlm.", "").replace("embedding_proj_layer.", "custom_text_proj.")


def opensearch_config(config: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in config.items() if key != "embed_dim"}
    return {**others, "architectures": ["OpsColQwen3Model"], "dims": 32}


def max_sim(model: Any, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    return (query @ document.T).amax(1).sum()


def publisher(architecture: str, *prefixes: tuple[str, str]) -> Any:
    """Return the publisher's layout: other prefixes of names, and the wrapped model's config as config.json."""

    def rename(name: str) -> str:
        renames = (*prefixes, ("embedding_proj_layer.", "custom_text_proj."))
        return next(new + name.removeprefix(old) for old, new in renames if name.startswith(old))

    return rename, lambda config: {**config["vlm_config"], "embedding_dim": 32, "architectures": [architecture]}


def row(name: str, build: Any, **more: Any) -> Embedder:
    return Embedder(name, build, **{"inputs": inputs, "score": max_sim, **more})


QWEN = ("vlm.language_model.", "model."), ("vlm.visual.", "visual.")
PALIGEMMA = (
    ("vlm.language_model.", "model.language_model.model."),
    ("vlm.vision_tower.", "model.vision_tower."),
    ("vlm.", "model."),
)
EMBEDDERS = [
    row(
        "colpali",
        paligemma,
        run=run,
        tensors=patches_in_squares(1, PATCH),
        layouts={"publisher": publisher("ColPali", *PALIGEMMA)},
    ),
    row("colmodernvbert", modernvbert, inputs=vbert_inputs, run=run, tensors=tiles, finish=finish),
    row("colqwen2", partial(qwen, "qwen2_vl"), run=run_qwen, layouts={"publisher": publisher("ColQwen2", *QWEN)}),
    row("colqwen2_5", partial(qwen, "qwen2_5_vl"), run=run_qwen, layouts={"publisher": publisher("ColQwen2_5", *QWEN)}),
    row(
        "colqwen3",
        qwen3,
        inputs=qwen3_inputs,
        run=run_qwen3,
        load=load_qwen3,
        layouts={"OpenSearch": (opensearch, opensearch_config)},
    ),
    row(
        "nemotron_colembed",
        partial(
            qwen3,
            kind=NemotronColEmbed,
            architectures=["Qwen3VLNemotronEmbedModel"],
            model_type="qwen3_vl_nemotron_embed",
            pooling="colbert",
        ),
        inputs=nemotron_inputs,
        run=run_qwen3,
        load=partial(load_qwen3, kind=NemotronColEmbed),
        layouts={"without an outer name": (lambda name: name.removeprefix("model."), lambda config: config)},
    ),
]
