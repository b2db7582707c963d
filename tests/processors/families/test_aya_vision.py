"""Options of Aya Vision's published checkpoints."""

from sensorium.mm.tiling.aspect import AspectTiles
from sensorium.mm.tiling.whole import FixedSize
from sensorium.models.families.aya_vision.processing import AyaVisionProcessingInfo, Cohere2VisionProcessingInfo
from sensorium.processors.files import ProcessorFiles


def test_aya_vision_cuts_images_against_its_preprocessors_json() -> None:
    """The published processor overrides `crop_to_patches` of the JSON for Aya Vision, but not for Cohere2-Vision."""
    files = ProcessorFiles({"text_config": {"hidden_size": 64, "vocab_size": 256000}}, {"crop_to_patches": False})
    assert isinstance(AyaVisionProcessingInfo(files).specs["image"].tiling, AspectTiles)
    uncut = AyaVisionProcessingInfo(files, {"crop_to_patches": False}), Cohere2VisionProcessingInfo(files)
    assert all(isinstance(info.specs["image"].tiling, FixedSize) for info in uncut)
