"""CLIP, SigLIP and SigLIP 2 in the suite of embedders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from embedder import Embedder
from family import patches_in_squares
from oracle import ensure_torchvision, fast_tokenizer, randomise
from tokenizers.processors import TemplateProcessing

SIDE, PATCH = 56, 14
SHAPE = {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(kind: str, seed: int) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<bos>", "<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")
    single = "<bos> $A <eos>" if kind == "clip" else "$A <eos>"
    ids = [(name, words.convert_tokens_to_ids(name)) for name in ("<bos>", "<eos>")]
    words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    words.model_input_names = ["input_ids"]
    text = {"vocab_size": len(words), "hidden_size": 64, "max_position_embeddings": 32, "eos_token_id": words.eos_token_id}
    vision = {"hidden_size": 48 if kind == "clip" else 64, "patch_size": PATCH, **SHAPE}
    fixed = {} if kind == "siglip2" else {"image_size": SIDE}
    stem = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}[kind]
    more = {"projection_dim": 40} if kind == "clip" else {}
    vision |= {"num_patches": 16} if kind == "siglip2" else {}
    config = getattr(tf, f"{stem}Config")(text_config=text | SHAPE, vision_config=vision | fixed, **more)
    model = getattr(tf, f"{stem}Model")(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if "logit_" in name:
            parameter.data.fill_(1.5 if "scale" in name else -0.5)
    sizes = {"height": SIDE, "width": SIDE}
    given = {"clip": {"size": {"shortest_edge": SIDE}, "crop_size": sizes}, "siglip": {"size": sizes}}
    options = given.get(kind, {"patch_size": PATCH, "max_num_patches": 20})
    processor = getattr(tf, f"{stem}Processor")(getattr(tf, f"{stem}ImageProcessor")(**options), words)
    return model, processor


def load(kind: str, folder: Path) -> tuple[Any, Any]:
    """Load the model; the class of the processor's tokenizer is another than the tests'."""
    model, processor = build(kind, 0)
    return type(model).from_pretrained(folder, attn_implementation="eager").eval(), processor


def inputs(processor: Any, item: Any) -> Mapping[str, Any]:
    if not isinstance(item, str):
        return dict(processor.image_processor(images=[item], return_tensors="pt"))
    padding = {} if processor.image_processor.to_dict().get("crop_size") else {"padding": "max_length", "max_length": 32}
    return dict(processor.tokenizer([item], return_tensors="pt", **padding))


def run(model: Any, given: Mapping[str, Any]) -> torch.Tensor:
    found = model.get_text_features(**given) if "input_ids" in given else model.get_image_features(**given)
    return torch.nn.functional.normalize(found.pooler_output[0], dim=-1)


def probability(model: Any, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(query @ document * model.logit_scale.exp() + model.logit_bias)


def flat_patches(given: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield patches of both sides; transformers' are padded, and their colours are side by side."""
    ours, grid = (features[0].kwargs[name].data for name in ("pixel_values", "grid"))
    assert grid.tolist() == [1, *given["spatial_shapes"][0].tolist()]
    theirs = given["pixel_values"][0, : len(ours)].view(-1, PATCH, PATCH, 3).permute(0, 3, 1, 2).flatten(1)
    yield "pixel_values", ours, theirs


TEXTS = ("def f(x)", "import os", "a house", "a")
row = partial(
    Embedder, inputs=inputs, run=run, texts=TEXTS, count=lambda processor, given: 1, has_tokens=False,
    sizes=((90, 130), (60, 60), (150, 40), (20, 300)), options={"max_model_len": None},
)  # fmt: skip
EMBEDDERS = [
    row(
        "clip",
        partial(build, "clip"),
        load=partial(load, "clip"),
        tensors=patches_in_squares(1, PATCH),
        score=lambda model, one, other: one @ other,
    ),
    row(
        "siglip",
        partial(build, "siglip"),
        load=partial(load, "siglip"),
        tensors=patches_in_squares(1, PATCH),
        score=probability,
    ),
    row("siglip2", partial(build, "siglip2"), load=partial(load, "siglip2"), tensors=flat_patches, score=probability),
]
