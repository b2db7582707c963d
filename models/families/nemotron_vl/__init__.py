"""The family nemotron_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Llama_Nemotron_Nano_VL": ("LlamaNemotronVL", "LlamaNemotronVLProcessingInfo"),
        "NemotronH_Nano_VL_V2": ("NemotronVL", "NemotronVLProcessingInfo"),
    },
    features=(
        "RADIO, its learned rows before the patches of each tile; tiles or, if `vision_config.args` has "
        "`min_num_patches`, images at their own resolution; videos with the number and time of each frame as text; "
        "`video_pruning_rate` of config.json or `hf_overrides` drops the rows of videos that change least (efficient "
        "video sampling); frames joined in groups (`video_temporal_patch_size`); any text stack"
    ),
    limits="no sound; an image's patches do not depend on the other images of the prompt",
    takes_any_stack=True,
)
