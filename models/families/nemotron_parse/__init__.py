"""The family nemotron_parse: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("NemotronParse", "NemotronParseProcessingInfo"),
    },
    features=(
        "RADIO on a padded page and a convolution over its rows, read by cross-attention; `output.elements` with "
        "boxes and classes of layout elements"
    ),
    limits="one image per prompt; no prediction of several tokens at once",
    use="documents",
)
