"""The family mllama: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Mllama", "MllamaProcessingInfo"),
    },
    features=("tiles of the best canvas, which some layers of the decoder cross-attend to; prompts without an image skip them"),
    limits=(
        "every image takes the rows of as many tiles as config.json allows; a prompt takes as many images as have "
        "`max_model_len` rows, or as `limit_mm_per_prompt` says"
    ),
)
