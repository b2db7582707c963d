"""The family minicpmv: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "MiniCPMO": ("MiniCPMO", "MiniCPMOProcessingInfo"),
        "MiniCPMV": ("MiniCPMV", "MiniCPMVProcessingInfo"),
        "MiniCPMV4_6ForConditionalGeneration": ("MiniCPMV46", "MiniCPMV46ProcessingInfo"),
        "MiniCPMV4_7ForConditionalGeneration": ("MiniCPMV46", "MiniCPMV47ProcessingInfo"),
        "MiniCPMOcrForConditionalGeneration": ("MiniCPMV46", "MiniCPMOcrProcessingInfo"),
    },
    features=(
        "a whole image and slices of it, each at its own size; rows merged in squares within the tower (4.6, 4.7), "
        "or a resampler (2.6, 4 and 4.5, in their publisher's layout); times of frames, several of which make one "
        "(4.5); MiniCPM-o 2.6 and 4.5 with audio, `transcribe` (English, Chinese), text output only; MiniCPM-OCR, whose "
        "sizes of images and slices may follow their letters (`small_image_upsize`); a canvas of positions (4.7)"
    ),
    limits=(
        "2.6 to 4.5: views up to 1.25 times the patches of a square one; 30 minutes per audio item; MiniCPM-OCR: "
        "with `adaptive` sizes, rows are an upper bound until an image is decoded; 4.7: no precomputed embeddings"
    ),
    takes_any_stack=True,
)
