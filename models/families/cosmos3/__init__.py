"""The family cosmos3: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("Cosmos3", "qwen3_vl:Qwen3VLProcessingInfo")},
    features="the reasoner of Cosmos 3: Qwen3-VL, in its own layout or in that of checkpoints that also have a generator",
    limits="text output only; weights of the generator, sound and actions are not read; all weights in one folder",
)
