"""Input processing of PaliGemma: images as squares of one size, all of them before the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...mm.tiling.whole import FixedSize
from ..bases.tiles import TiledInfo, TileSpec, height_width, positive_int_or
from ..images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec


class PaliGemmaProcessingInfo(TiledInfo):
    """ProcessingInfo of PaliGemma and PaliGemma 2. Attention is bidirectional within the prompt and causal in the answer."""

    element_format = "loc_tokens"
    modalities = ("image",)
    prompt_attention = "bidirectional_prompt"
    placeholders = {"image": ("image_token_index", "image_token_id", 256000)}
    valid_kwargs = {"image": ("resample",)}
    text_config_defaults = {"vocab_size": 257152, "hidden_size": 2048, "bos_token_id": 2}

    def resolve_token_ids(self) -> None:
        keys = [key for key in ("bos_token_id",) if self.files.config.get(key) is not None]
        self.bos = self.config_token_id(*keys, self.text_config["bos_token_id"])

    def resolve_spec(self, modality: str) -> TileSpec:
        vision = self.files.config.get("vision_config") or {"patch_size": 14}
        tile = height_width(self.files.image.get("size") or 224)
        self.check_config("vision_config", image_size=tile[0])
        patch = positive_int_or(vision, "patch_size", 16)
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, tiling=FixedSize(tile), patch=patch)
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Add missing tokens: a placeholder per image at the start, BOS after the last placeholder, and a newline at the end.

        A prompt that has BOS right after its last placeholder is complete.
        """
        placeholder, bos = self.placeholder_ids["image"], self.bos
        prompt = list(ids[1:] if list(ids[:1]) == [bos] else ids)
        if placeholder not in prompt:
            prompt = [placeholder] * items.get("image", 0) + prompt
        text = len(prompt) - prompt[::-1].index(placeholder) if placeholder in prompt else 0  # where the text begins
        if prompt[text : text + 1] == [bos]:
            return prompt
        ended = [*prompt, *self.encode("\n")]
        merged = self.newline_merges.get((ended[-2], ended[-1])) if prompt else None
        ended = ended if merged is None else [*ended[:-2], merged]
        return [*ended[:text], bos, *ended[text:]]
