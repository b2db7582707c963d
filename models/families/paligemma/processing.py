"""Input processing of PaliGemma: images as squares of one size, all of them before the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....mm.tiling.whole import FixedSize
from ....processors.bases.attention_rules import PREFIX_LM
from ....processors.bases.base import end_of_word
from ....processors.bases.tiles import TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec


class PaliGemmaProcessingInfo(TiledInfo):
    """ProcessingInfo of PaliGemma and PaliGemma 2. Attention is bidirectional within the prompt and causal in the answer."""

    rewrites_prompts = True
    plain_tokens = ("<image>",)
    element_format = "loc_tokens"
    modalities = ("image",)
    prompt_attention = PREFIX_LM
    placeholders = {"image": ("image_token_index", "image_token_id", 256000)}
    valid_kwargs = {"image": ("resample",)}
    text_config_defaults = {"vocab_size": 257152, "hidden_size": 2048, "bos_token_id": 2}

    def resolve_token_ids(self) -> None:
        keys = [key for key in ("bos_token_id",) if self.files.config.get(key) is not None]
        self.bos = self.config_token_id(*keys, self.text_config["bos_token_id"])
        names = self.files.read_json("tokenizer_config.json")
        text = names.get("bos_token")
        self.bos_text = str(text.get("content", "") if isinstance(text, Mapping) else text or "")

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
        started = [*prompt[:text], bos, *self._after_bos(prompt[text:])]
        ended = [*started, *self._newline_after(started[-1])]
        merged = self.newline_merges.get((ended[-2], ended[-1]))
        return ended if merged is None else [*ended[:-2], merged]

    def _after_bos(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens without the whitespace at the start that BOS absorbs, if it is such an added token."""
        encode, recognise, decode, rest = self.files.encode, self.files.encode_trusted, self.files.decode, list(ids)
        while rest and encode and recognise and decode and self.bos_text:
            end = end_of_word(rest, 0, decode)
            word = decode(rest[:end])
            space = word[: len(word) - len(word.lstrip())]
            if not space or list(recognise(self.bos_text + space)) != [self.bos]:
                break
            rest = [*encode(word.lstrip()), *rest[end:]]
        return rest

    def _newline_after(self, token: int) -> Sequence[int]:
        """Return the tokens of a newline after this token: none if it is an added token that absorbs whitespace."""
        recognise, decode = self.files.encode_trusted, self.files.decode
        text = self.bos_text if token == self.bos else decode([token]) if decode else ""
        if text and recognise and list(recognise(text)) == list(recognise(f"{text}\n")) == [token]:
            return ()
        newline: Sequence[int] = self.encode("\n")
        return newline
