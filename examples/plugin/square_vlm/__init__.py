"""A model family in a package of its own. After `pip install examples/plugin`, `LLM(folder)` runs its checkpoints."""

from sensorium import register_model


def register() -> None:
    """Register the family. sensorium calls this for the entry point group `sensorium.plugins` (see pyproject.toml)."""
    register_model(
        "SquareForConditionalGeneration",
        model="square_vlm.model:Square",
        processing="square_vlm.processing:SquareProcessingInfo",
    )
