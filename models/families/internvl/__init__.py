"""The family internvl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "InternS1ForConditionalGeneration": ("InternVL", "InternVLProcessingInfo"),
        "InternVLChatModel": ("InternVLChat", "InternVLChatProcessingInfo"),
        "InternVLForConditionalGeneration": ("InternVL", "InternVLProcessingInfo"),
        "QianfanOCRForConditionalGeneration": ("QianfanOcr", "QianfanOcrProcessingInfo"),
        "SkyworkR1VChatModel": ("InternVLChat", "InternVLChatProcessingInfo"),
    },
    features=(
        "tiles by the best aspect ratio, thumbnail, pixel shuffle; the Hub's layout and the publisher's (InternLM2 "
        "too); Intern-S1, Skywork-R1V, Qianfan-OCR"
    ),
    limits="at most 12 tiles per image by default; no videos in the publisher's layout",
    takes_any_stack=True,
)
