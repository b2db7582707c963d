"""The model registry: architecture name -> model and ProcessingInfo classes, as strings that the engine resolves."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from .errors import ConfigError, short_repr

_log = logging.getLogger(__name__)


_PACKAGE = __name__.partition(".")[0]
_PLUGINS = "sensorium.plugins"  # entry point group
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Architecture:
    """Import paths, `"package.module:Class"`, of the model class and the ProcessingInfo class of an architecture."""

    model: str
    processing: str

    @property
    def family(self) -> str:
        return self.model.partition(":")[0].rpartition(".")[2]

    @property
    def takes_any_stack(self) -> bool:
        """True if the text config's model_type selects the decoder stack."""
        return self.family in _ANY_STACK

    @property
    def is_text_stack(self) -> bool:
        """True if config.json itself is the text config, and any decoder stack can run it."""
        return self.family == "text_only"


def native(family: str, model_class: str, info_class: str, folder: str = "families") -> Architecture:
    """Return the row of classes in `models/<folder>/<family>.py` and `processors/<folder>/<family>.py`."""
    paths = (("models", model_class), ("processors", info_class))
    return Architecture(*(f"{_PACKAGE}.{room}.{folder}.{family}:{name}" for room, name in paths))


@dataclass(frozen=True)
class FamilyNote:
    """Notes on a family for docs/models.md. `other_tests`: tests besides the parity suite."""

    features: str
    limits: str = ""
    other_tests: str = ""


@dataclass(frozen=True)
class CheckpointLayout:
    """A publisher's own checkpoint layout.

    Args:
        reader: "module:function" that converts the publisher's config to `(kind, config in the Hub's layout)`.
        architectures: kind -> key of ARCHITECTURES.
    """

    reader: str
    architectures: Mapping[str, str]


_ANY_STACK = frozenset({
    "gemma3", "idefics2", "idefics3", "internvl", "kimi_k25", "lighton_ocr", "llava", "paligemma", "pixtral", "text_only",
    "ultravox",
})  # fmt: skip
TEXT_PROCESSING = native("text_only", "TextModel", "TextProcessingInfo").processing
_TEXT_STACKS = (
    "Arcee", "Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Dots1", "MiniMaxM2",
    "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "ExaoneMoe", "Gemma", "Gemma2", "Gemma3",
    "Glm", "Glm4", "Glm4Moe", "GptOss", "Granite", "GraniteMoe", "GraniteMoeShared", "Helium",
    "HunYuanDenseV1", "HunYuanMoEV1", "InternLM3", "Llama", "Ministral3", "Mistral", "Mistral4", "Mixtral",
    "Nemotron", "Olmo2", "Olmo3", "Olmoe", "Phi3", "Phimoe", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe",
    "SeedOss", "SmolLM3", "SolarOpen", "StableLm", "Starcoder2",
)  # fmt: skip
_ENCODER_PROCESSING = native("bert", "Bert", "BertProcessingInfo").processing
_BERTS = ("Bert", "Camembert", "DistilBert", "Gte", "MPNet", "New", "NomicBert", "Roberta", "XLMRoberta")

ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekOCR2ForCausalLM": native("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "DeepseekOCRForCausalLM": native("deepseek_ocr2", "DeepseekOcr", "DeepseekOcrProcessingInfo"),
    "DeepseekOcr2ForConditionalGeneration": native("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "Ernie4_5_VLMoeForConditionalGeneration": native("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Ernie4_5_VL_MoeForConditionalGeneration": native("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Gemma3ForConditionalGeneration": native("gemma3", "Gemma3", "Gemma3ProcessingInfo"),
    "Glm46VForConditionalGeneration": native("glm4v", "Glm4V", "Glm46VProcessingInfo"),
    "Glm4vMoeForConditionalGeneration": native("glm4v", "Glm4VMoe", "Glm4VProcessingInfo"),
    "Glm4vForConditionalGeneration": native("glm4v", "Glm4V", "Glm4VProcessingInfo"),
    "GlmAsrForConditionalGeneration": native("glmasr", "GlmAsr", "GlmAsrProcessingInfo"),
    "GlmOcrForConditionalGeneration": native("glm4v", "GlmOcr", "GlmOcrProcessingInfo"),
    "Idefics2ForConditionalGeneration": native("idefics2", "Idefics2", "Idefics2ProcessingInfo"),
    "Idefics3ForConditionalGeneration": native("idefics3", "Idefics3", "Idefics3ProcessingInfo"),
    "GraniteSpeechForConditionalGeneration": native("granite_speech", "GraniteSpeech", "GraniteSpeechProcessingInfo"),
    "Granite4VisionForConditionalGeneration": native("granite4_vision", "Granite4Vision", "Granite4VisionProcessingInfo"),
    "InternVLChatModel": native("internvl", "InternVLChat", "InternVLChatProcessingInfo"),
    "InternVLForConditionalGeneration": native("internvl", "InternVL", "InternVLProcessingInfo"),
    "InternLM2ForCausalLM": native("text_only", "InternLM2", "TextProcessingInfo"),
    "KimiK25ForConditionalGeneration": native("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "Kimi_K25ForConditionalGeneration": native("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "LightOnOcrForConditionalGeneration": native("lighton_ocr", "LightOnOcr", "LightOnOcrProcessingInfo"),
    "LlavaForConditionalGeneration": native("llava", "Llava", "LlavaProcessingInfo"),
    "LlavaForConditionalGeneration/pixtral": native("pixtral", "Pixtral", "PixtralProcessingInfo"),
    "LlavaNextForConditionalGeneration": native("llava", "LlavaNext", "LlavaNextProcessingInfo"),
    "LlavaOnevisionForConditionalGeneration": native("llava", "LlavaOnevision", "LlavaOnevisionProcessingInfo"),
    "Mistral3Consolidated": native("pixtral", "Mistral3Consolidated", "MistralFormatProcessingInfo"),
    "Mistral3ForConditionalGeneration": native("pixtral", "Mistral3", "Mistral3ProcessingInfo"),
    "MistralConsolidated": native("text_only", "MistralText", "TextProcessingInfo"),
    "PaddleOCRVLForConditionalGeneration": native("paddleocr_vl", "PaddleOcrVL", "PaddleOcrVLProcessingInfo"),
    "PaliGemmaForConditionalGeneration": native("paligemma", "PaliGemma", "PaliGemmaProcessingInfo"),
    "PixtralConsolidated": native("pixtral", "PixtralConsolidated", "MistralFormatProcessingInfo"),
    "Qwen2AudioForConditionalGeneration": native("qwen2_audio", "Qwen2Audio", "Qwen2AudioProcessingInfo"),
    "Qwen2VLForConditionalGeneration": native("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "Qwen2_5OmniForConditionalGeneration": native("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5OmniModel": native("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5OmniThinkerForConditionalGeneration": native("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5_VLForConditionalGeneration": native("qwen2_vl", "Qwen25VL", "Qwen25VLProcessingInfo"),
    "Qwen3ASRForConditionalGeneration": native("qwen3_asr", "Qwen3ASR", "Qwen3ASRProcessingInfo"),
    "Qwen3OmniMoeForConditionalGeneration": native("qwen3_omni", "Qwen3Omni", "Qwen3OmniProcessingInfo"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": native("qwen3_omni", "Qwen3Omni", "Qwen3OmniProcessingInfo"),
    "Qwen3VLForConditionalGeneration": native("qwen3_vl", "Qwen3VL", "Qwen3VLProcessingInfo"),
    "Qwen3VLMoeForConditionalGeneration": native("qwen3_vl", "Qwen3VLMoe", "Qwen3VLProcessingInfo"),
    "SmolVLMForConditionalGeneration": native("idefics3", "Idefics3", "SmolVLMProcessingInfo"),
    "UltravoxModel": native("ultravox", "Ultravox", "UltravoxProcessingInfo"),
    "VoxtralConsolidated": native("voxtral", "VoxtralConsolidated", "VoxtralProcessingInfo"),
    "VoxtralForConditionalGeneration": native("voxtral", "Voxtral", "VoxtralProcessingInfo"),
    "WhisperForConditionalGeneration": native("whisper", "Whisper", "WhisperProcessingInfo"),
    **{f"{stack}{task}": native("bert", "Bert", "BertProcessingInfo") for stack in _BERTS for task in ("Model", "ForMaskedLM")},
    "NewForTokenClassification": native("bert", "Bert", "BertProcessingInfo"),
    **{f"{stack}ForSequenceClassification": native("bert", "BertClassifier", "BertProcessingInfo") for stack in _BERTS},
    **{
        f"ModernBert{task}": Architecture(native("modernbert", name, "").model, _ENCODER_PROCESSING)
        for task, name in (
            ("Model", "ModernBert"),
            ("ForMaskedLM", "ModernBert"),
            ("ForSequenceClassification", "ModernBertClassifier"),
        )
    },
    **{f"{stack}ForCausalLM": native("text_only", "TextModel", "TextProcessingInfo") for stack in _TEXT_STACKS},
    **{f"{stack}Model": native("text_only", "TextModel", "TextProcessingInfo") for stack in _TEXT_STACKS if stack != "Gemma3"},
    "Qwen2ForRewardModel": native("text_only", "RewardModel", "TextProcessingInfo"),
    "Qwen2ForProcessRewardModel": native("text_only", "RewardModel", "TextProcessingInfo"),
    **{
        f"{stack}ForSequenceClassification": native("text_only", "TextClassifier", "TextProcessingInfo")
        for stack in (*(name for name in _TEXT_STACKS if name != "Gemma3"), "Gemma3Text")
    },
}

NOTES: dict[str, FamilyNote] = {
    "bert": FamilyNote(
        "text encoders for `embed` (mean or CLS pooling, as 1_Pooling/config.json says) and `classify`; `score` of pairs "
        "with cross-encoders; learned positions, rotary ones (Nomic, GTE) or a bias of scores (MPNet); the Hub's layout and "
        "the publishers'",
        "vectors and classes only; heads of other tasks are not used",
        "tests/models/families/test_bert.py, tests/models/families/test_classification.py",
    ),
    "deepseek_ocr2": FamilyNote(
        "SAM features, then CLIP (DeepSeek-OCR) or a decoder with learned queries (DeepSeek-OCR 2); tiles by the best aspect "
        "ratio, the whole image padded to a square; the Hub's layout and the publisher's own"
    ),
    "ernie4_5_vl": FamilyNote(
        "frames merged in pairs, separate experts for images and videos, timestamps drawn onto frames",
        "aspect ratio up to 200:1",
    ),
    "gemma3": FamilyNote(
        "bidirectional attention within an image, sliding windows in most layers, norms before and after each sublayer; "
        "pan and scan"
    ),
    "glm4v": FamilyNote(
        "timestamps between frames as text, rotary positions on half of each head; norms before and after each sublayer, or "
        "a mixture of experts; GLM-OCR with its own tower"
    ),
    "glmasr": FamilyNote("`transcribe`; rotary positions in the tower, rows stacked by four", "630 s per audio item"),
    "granite4_vision": FamilyNote("query transformer outputs added after several layers (DeepStack); grids of tiles"),
    "granite_speech": FamilyNote(
        "`transcribe`; conformer, query transformer over windows of rows; LoRA adapter for prompts with audio"
    ),
    "idefics2": FamilyNote("an image as four quarters and as a whole, each at its own size; perceiver resampler"),
    "idefics3": FamilyNote("rows of tiles with text tags, pixel shuffle"),
    "internvl": FamilyNote(
        "tiles by the best aspect ratio, thumbnail, pixel shuffle; the Hub's layout and the publisher's (InternLM2 too)",
        "at most 12 tiles per image by default; no videos in the publisher's layout",
    ),
    "kimi_k25": FamilyNote(
        "images and timed chunks of videos in one stream, frames of a chunk averaged, latent attention, grouped experts",
        "4 frames per chunk",
    ),
    "lighton_ocr": FamilyNote("pages at native resolution; incomplete squares of merged patches are dropped; no break tokens"),
    "llava": FamilyNote("one or several encoder layers of CLIP or SigLIP; grids of tiles with newline rows; pooled videos"),
    "modernbert": FamilyNote(
        "text encoder with rotary positions and sliding windows, for `embed`, `classify`, and `score` of pairs",
        "vectors and classes only; heads of other tasks are not used",
        "tests/models/families/test_bert.py, tests/models/families/test_classification.py",
    ),
    "paddleocr_vl": FamilyNote(
        "pages at native resolution; text config nested or at the top level", "aspect ratio up to 200:1"
    ),
    "paligemma": FamilyNote("images before the prompt, without placeholders; bidirectional attention in the prompt"),
    "pixtral": FamilyNote(
        "2-D rotary tower, a token between rows of patches, patch merger; the Hub's layout and the publisher's own"
    ),
    "qwen2_5_omni": FamilyNote(
        "images, videos and audio together; timestamps as positions; text output only", "5 minutes per audio item"
    ),
    "qwen2_audio": FamilyNote("`transcribe`; Whisper's tower, rows averaged in pairs", "30 s per audio item"),
    "qwen2_vl": FamilyNote("M-RoPE; Qwen2.5-VL: windows in the tower, seconds as positions", "aspect ratio up to 200:1"),
    "qwen3_asr": FamilyNote("`transcribe`; linear M-RoPE"),
    "qwen3_omni": FamilyNote(
        "images, videos and audio together; DeepStack, experts; text output only",
        "40 minutes per audio item",
    ),
    "qwen3_vl": FamilyNote(
        "DeepStack, interleaved M-RoPE, timestamps as text, experts; `embed` and `score`",
        "2048 frames per video; aspect ratio up to 200:1",
        "tests/pipelines/test_rank.py (vectors and scores)",
    ),
    "text_only": FamilyNote(
        "decoders without an encoder, which take text only; `model_type` selects the decoder; `embed`, `score`, `classify` "
        "and `reward`"
    ),
    "ultravox": FamilyNote("rows stacked by eight, any decoder; tower and decoder may be in other repositories"),
    "voxtral": FamilyNote(
        "`transcribe`; windows of 30 s, padded with silence; prompts as mistral-common writes them; "
        "the Hub's layout and the publisher's own"
    ),
    "whisper": FamilyNote(
        "`transcribe`; encoder-decoder: cross-attention, language and task tokens, timestamp rules",
        "30 s per audio item of a prompt",
        "tiny.en's real weights on real speech",
    ),
}


CHECKPOINT_LAYOUTS: dict[str, CheckpointLayout] = {
    "params.json": CheckpointLayout(
        f"{_PACKAGE}.models.consolidated:hub_config",
        {
            "images": "PixtralConsolidated",
            "merged images": "Mistral3Consolidated",
            "audio": "VoxtralConsolidated",
            "text": "MistralConsolidated",
        },
    )
}
"""Files that replace config.json in a publisher's own layout."""


_NATIVE = frozenset(ARCHITECTURES)


def register_model(architecture: str, *, model: str, processing: str) -> None:
    """Add an architecture of another package to the registry. Its classes are imported when a checkpoint asks for them.

    Args:
        architecture: the name in `architectures` of config.json.
        model: `"package.module:Class"` that implements `models.interface.Model`.
        processing: `"package.module:Class"` that implements `processors.interface.ProcessingInfo`.

    Raises:
        ConfigError: a path is not of that form, or the name has other classes already.
    """
    for param, value in (("architecture", architecture), ("model", model), ("processing", processing)):
        if not isinstance(value, str) or not (_PATH.fullmatch(value) if param != "architecture" else value):
            form = "a name" if param == "architecture" else "'package.module:Class'"
            raise ConfigError(f"register_model: {param} is {short_repr(value)}; give {form}", param=param)
    row = Architecture(model, processing)
    if ARCHITECTURES.setdefault(architecture, row) != row:
        taken = ARCHITECTURES[architecture]
        raise ConfigError(f"the architecture {architecture!r} is registered with {taken.model}", param="architecture")


def registered_models() -> dict[str, Architecture]:
    """Return the architectures of other packages."""
    return {name: row for name, row in ARCHITECTURES.items() if name not in _NATIVE}


def is_registered(architecture: str) -> bool:
    """Return True if the registry has the architecture, after loading plugins if it does not have it without them."""
    if architecture not in ARCHITECTURES:
        _load_plugins()
    return architecture in ARCHITECTURES


@cache
def _load_plugins() -> None:
    """Call the functions of installed packages' entry points. One that fails is logged and skipped."""
    from importlib.metadata import entry_points

    for plugin in entry_points(group=_PLUGINS):
        try:
            plugin.load()()
        except Exception:
            _log.exception("the plugin %s of the entry point group %s failed and is skipped", plugin.value, _PLUGINS)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_SPELLINGS = {_plain(name): name for name in _NATIVE}


def architecture_key(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the key of ARCHITECTURES: "Architecture/vision model type" if there is one, else the architecture.

    Publishers differ in case and underscores (LightOnOCR and LightOnOcr), which are not compared.
    """
    if architecture not in ARCHITECTURES:
        architecture = _SPELLINGS.get(_plain(architecture), architecture)
    name = f"{architecture}/{(config.get('vision_config') or {}).get('model_type')}"
    return name if name in ARCHITECTURES else architecture


_TASK = re.compile(r"For[A-Z]\w*$")  # ending shared by many architectures


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture; ConfigError with the nearest known name if there is none."""
    if is_registered(name):
        return ARCHITECTURES[name]
    near = get_close_matches(_TASK.sub("", name), stems := {_TASK.sub("", known): known for known in ARCHITECTURES}, n=1)
    nearest = f"; the nearest name is {stems[near[0]]}" if near else ""
    raise ConfigError(f"no implementation of the architecture {name!r} here (docs/models.md lists those there are{nearest})")
