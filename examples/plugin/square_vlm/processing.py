"""The input: every image is resized to a square."""

import torch
from sensorium.mm.fields import BatchedField, FieldElem, FlatField
from sensorium.mm.types import ItemGeometry
from sensorium.processors.bases.base import BaseProcessingInfo
from sensorium.processors.patches import PatchSpec, apply_size, patchify, read_patch_spec


class SquareProcessingInfo(BaseProcessingInfo):
    """Resizes every image to a square of `vision_config.image_size` pixels and makes one encoder row per patch."""

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "image_token_index", 32000)}  # keys of config.json, then the published id
    valid_kwargs = {"image": ("resample",)}  # what mm_processor_kwargs may hold

    def resolve_spec(self, modality):  # the checkpoint's JSON, overridden by the caller's options
        spec = read_patch_spec(self.files.image, PatchSpec(merge=1, temporal=1))
        for kwargs in self.processor_kwargs[modality]:
            spec = apply_size(spec, kwargs)
        return spec

    def geometry(self, header):  # from the header alone: plan, span and memory follow from it
        side = self.files.config["vision_config"].get("image_size", 336) // self.specs["image"].patch
        return ItemGeometry(1, side, side)

    def process(self, item, dtype):
        grid = self.geometry(item.header)
        pixels = FieldElem(patchify(item.pixels[None], grid, self.specs["image"], dtype), FlatField())
        shape = FieldElem(torch.tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True))
        return {"pixel_values": pixels, "grid": shape}, grid
