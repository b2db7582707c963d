"""The family granite_docling: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("GraniteDocling", "GraniteDoclingProcessingInfo"),
    },
    features="pages in tiles with text tags, earlier states of the tower added to layers of the decoder (DeepStack)",
    limits="the coarse path only; Granite-Docling-258M is an Idefics3 model",
    use="documents",
)
