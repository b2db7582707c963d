"""What PaliGemma wants to be fed: pictures as squares of one size, all of them before the text. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..mm.tiling import Fixed
from .base import slotted
from .files import ProcessorFiles
from .pictures import HALF, read_pixels, with_resample
from .tiles import TiledInfo, TileSpec, number_of, pair


class PaliGemmaProcessingInfo(TiledInfo):
    """ProcessingInfo of PaliGemma and PaliGemma 2. All of a prompt sees all of it; only the answer is causal."""

    modalities = ("image",)
    prefill = "prompt_atomic"
    slots = {"image": ("image_token_index", "image_token_id", 256000)}
    known = {"image": ("resample",)}
    published = {"vocab_size": 257152, "hidden_size": 2048, "bos_token_id": 2}

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(files, *options)
        named = [name for name in ("bos_token_id",) if files.config.get(name) is not None]
        self.bos = self.token(*named, self.text["bos_token_id"])

    def read(self, modality: str) -> TileSpec:
        vision = self.files.config.get("vision_config") or {}
        tile = pair(self.files.image.get("size") or 224)
        self.agree("vision_config", image_size=tile[0])
        spec = read_pixels(
            self.files.image, TileSpec(HALF, HALF, tiling=Fixed(tile), patch=number_of(vision, "patch_size", 14))
        )
        for layer in self.layers[modality]:
            spec = with_resample(spec, layer)
        return spec

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """A slot for each picture at the start where none is written, the start of the text behind the last, an empty line.

        A prompt that has the start of the text behind its last slot is taken as written out.
        """
        slot, bos = self.slot_ids["image"], self.bos
        whole = slotted(ids[1:] if list(ids[:1]) == [bos] else ids, slot, items.get("image", 0))
        text = len(whole) - whole[::-1].index(slot) if slot in whole else 0
        if whole[text : text + 1] == [bos]:
            return whole
        ended = [*whole, *self.encode("\n")]
        joined = self.line_joins.get((ended[-2], ended[-1])) if whole else None
        ended = ended if joined is None else [*ended[:-2], joined]
        return [*ended[:text], bos, *ended[text:]]
