"""BaseProcessingInfo: option layers, token ids, precomputed embeddings, spans, prompts without placeholders."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.types import EmbeddingItem, ItemGeometry
from sensorium.processors.bases.base import BaseProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import build_span


@dataclass(frozen=True)
class Spec:
    size: int


class Info(BaseProcessingInfo):
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "image_token_index", 9)}
    valid_kwargs = {"image": ("size",)}
    text_config_defaults = {"hidden_size": 4, "vocab_size": 20}

    def resolve_spec(self, modality):
        return Spec(self.merged_kwargs[modality].get("size", 1))

    def geometry(self, header):
        return ItemGeometry(1, 1, 1)

    def process(self, item, dtype):
        return {}, self.geometry(item.header)


def test_abstract_methods_of_a_family():
    class Silent(BaseProcessingInfo):
        modalities = ("image",)

    with pytest.raises(TypeError, match=r"abstract methods.*geometry.*process.*resolve_spec"):
        Silent(ProcessorFiles())


def made(*options, encode=None, **config):
    return Info(ProcessorFiles(config=config, encode=encode), *options)


@pytest.mark.parametrize(
    ("config", "token"),
    [({}, 9), ({"image_token_index": 7}, 7), ({"image_token_index": 7, "image_token_id": 5}, 5)],
)
def test_ids_of_placeholders(config, token):
    info = made(**config)
    assert info.placeholder_ids == {"image": token}


@pytest.mark.parametrize("token", [20, -1, True, "9"])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ConfigError, match=r"image_token_id .* in config.json is outside the vocabulary of 20"):
        made(image_token_id=token)


def test_later_options_override_earlier_ones():
    info = made({"size": 2})
    assert info.specs["image"].size == 2
    assert info.with_kwargs({"images_kwargs": {"size": 3}}).specs["image"].size == 3
    assert info.with_kwargs({}).options_key("image") == info.options_key("image") != made().options_key("image")
    with pytest.raises(ConfigError, match="unknown processing option 'sice'"):
        info.with_kwargs({"sice": 3})


def test_specs_of_two_classes_have_two_keys():
    @dataclass(frozen=True)
    class OtherSpec(Spec):
        """A spec with the same fields."""

    class Other(Info):
        def resolve_spec(self, modality):
            return OtherSpec(**vars(super().resolve_spec(modality)))

    info = made()
    other = Other(info.files)
    assert vars(other.specs["image"]) == vars(info.specs["image"])
    assert other.options_key("image") != info.options_key("image")


def test_config_and_preprocessor_must_agree():
    info = made(vision_config={"patch_size": 14})
    info.check_config("vision_config", patch_size=14, merge_size=2)
    said = "patch_size is 14 in vision_config of config.json, but "
    for files, means in (
        (info.files, "preprocessor_config.json is missing"),
        (ProcessorFiles(image={"a": 1}), "the .* JSON sets"),
    ):
        info.files = replace(info.files, image=files.image)
        with pytest.raises(ConfigError, match=f"{said}{means}.* 16"):
            info.check_config("vision_config", patch_size=16)


def test_precomputed_embeddings():
    info, rows = made(), torch.ones(3, 4)
    assert info.parser().embeddings["image"].width == 4
    assert info.embeds_geometry(EmbeddingItem("image", {ROWS: rows})).merged == (3, 1, 1)

    class Refusing(Info):
        embeds_layout = None

    refusing = Refusing(ProcessorFiles())
    assert refusing.parser().embeddings == {}
    with pytest.raises(InputError, match="takes no precomputed embeddings"):
        refusing.embeds_geometry(EmbeddingItem("image", {ROWS: rows}))


def test_a_family_with_text_needs_the_tokenizer():
    assert made(encode=lambda text: [ord(letter) for letter in text]).encode("ab") == (97, 98)
    with pytest.raises(ConfigError, match="download the checkpoint's tokenizer"):
        made().encode  # noqa: B018


def test_spans_of_text_and_rows():
    span = build_span([(7,), 3, (8, 9)], 5)
    assert span.token_ids == (7, 5, 5, 5, 8, 9)
    assert span.is_embed.tolist() == [False, True, True, True, False, False]
    assert build_span([2], 5).is_embed is None


def test_prompts_without_placeholders():
    assert made().preprocess_prompt([1, 2], {"image": 2}) == [1, 2]
