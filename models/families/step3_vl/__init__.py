"""The family step3_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Step3p7ForConditionalGeneration": ("Step37", "Step3VLProcessingInfo"),
        "Step3VL10BForCausalLM": ("StepVL", "Step3VLProcessingInfo"),
        "Step3VLForConditionalGeneration": ("Step3VL", "Step3VLProcessingInfo"),
        "StepVLForConditionalGeneration": ("StepVL", "Step3VLProcessingInfo"),
    },
    features=(
        "Step3, Step3-VL-10B and Step-3.7: square windows of an image, then the whole image (`enable_patch`); two convolutions "
        "after the encoder; Step3's decoder expands queries from a low rank to all heads, which share one key and "
        "value head, and has experts; Step-3.7's decoder has a gate per head, more heads in layers with a sliding window, and "
        "experts with clamped activations; `Step3VL10BForCausalLM` is the name of the publisher's class of Step3-VL-10B, "
        "`StepVLForConditionalGeneration` of vLLM's"
    ),
    takes_any_stack=True,
)
