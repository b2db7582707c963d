"""The family terratorch: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Terratorch", "RawTensorInfo"),
    },
    features=(
        "named tensors in, one tensor out (`encode`), without text and tokenizer: Prithvi and other models of "
        "TerraTorch; needs the package terratorch"
    ),
    limits="weights as safetensors; memory of the network is estimated",
    other_tests="tests/models/test_raw_tensors.py",
    use="tensors",
)
