"""The family ovis: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Ovis": ("Ovis", "OvisProcessingInfo"),
        "OvisForCausalLM": ("Ovis", "OvisProcessingInfo"),
        "Ovis2ForConditionalGeneration": ("Ovis2", "Ovis2ProcessingInfo"),
        "Ovis2_*": ("Ovis25", "Ovis25ProcessingInfo"),
    },
    features=(
        "the tower's rows as probabilities of visual words, whose embeddings are averaged; Ovis 1.6 and 2: the "
        "fewest tiles that cover an image, in the Hub's layout and the publisher's; Ovis2.5 and 2.6: images and "
        "videos at native resolution, 2.6 also with experts"
    ),
    limits=(
        "Ovis2.5, 2.6: images, or one video, per prompt; without `max_pixels` in the preprocessor's JSON, images and "
        "frames have at most 1344 x 1792 pixels if the decoder's `hidden_size` is at most 2048 (2B), else 1792 x "
        "1792 (9B)"
    ),
    takes_any_stack=True,
)
