"""Input processing of Intern-S1-Pro: that of Qwen3-VL without deepstack."""

from __future__ import annotations

from ..qwen3_vl.processing import Qwen3VLProcessingInfo


class InternS1ProProcessingInfo(Qwen3VLProcessingInfo):
    """ProcessingInfo of Intern-S1-Pro."""

    element_format = ""
    deepstack_layers = ()
