"""The model registry: architecture -> the family's folder -> its classes, as strings that the engine resolves."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

from ..callers.errors import ConfigError, short_repr

_log = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_FAMILIES_PACKAGE = f"{_PACKAGE}.models.families"
TEXT_PROCESSING = f"{_FAMILIES_PACKAGE}.text_only.processing:TextProcessingInfo"
_PLUGINS = "sensorium.plugins"  # entry point group
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Architecture:
    """Import paths, `"package.module:Class"`, of the model class and the ProcessingInfo class of an architecture."""

    model: str
    processing: str

    @property
    def family(self) -> str:
        """The family's folder in models/families; "" for classes of others."""
        folder, _, name = self.model.partition(":")[0].removesuffix(".model").rpartition(".")
        return name if folder == _FAMILIES_PACKAGE else ""

    @property
    def takes_any_stack(self) -> bool:
        """True if the text config's model_type selects the decoder stack."""
        return bool(self.family) and load_family(self.family).takes_any_stack

    @property
    def is_text_stack(self) -> bool:
        """True if config.json itself is the text config, and any decoder stack can run it."""
        return bool(self.family) and load_family(self.family).is_text_stack


@dataclass(frozen=True)
class Family:
    """Describes a family: its classes, and its row of docs/models.md. The `__init__.py` of its folder has one, `FAMILY`.

    Args:
        classes: architecture -> the class in its model.py, and the ProcessingInfo class in its processing.py ("family:Class" of
            another family's). A name with `*` stands for all architectures that fit it; the first one that fits counts.
        features, limits: cells of docs/models.md.
        other_tests: tests besides the parity suite, for docs/models.md.
        use: the group in docs/models.md, "documents", "retrieval", "speech" or "tensors"; empty: that of its inputs.
        takes_any_stack: the text config's model_type selects the decoder stack.
        is_text_stack: config.json itself is the text config, and any decoder stack can run it.
    """

    classes: Mapping[str, tuple[str, str]]
    features: str
    limits: str = ""
    other_tests: str = ""
    use: str = ""
    takes_any_stack: bool = False
    is_text_stack: bool = False


@dataclass(frozen=True)
class CheckpointLayout:
    """A publisher's own checkpoint layout.

    Args:
        reader: "module:function" that converts the publisher's config, and the content of `tokenizer_file`, to
            `(kind, config in the Hub's layout)`.
        architectures: kind -> key of FAMILIES.
        tokenizer_file: the JSON file of the tokenizer, which holds a part of the settings.
    """

    reader: str
    architectures: Mapping[str, str]
    tokenizer_file: str


_TEXT_STACKS = (
    "Arcee", "Bamba", "Cohere", "Cohere2", "Cwm", "DeepseekV2", "DeepseekV3", "Dots1", "MiniMax", "MiniMaxM1", "MiniMaxM2",
    "MiniMaxText01", "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "ExaoneMoe", "Falcon", "FalconH1", "FalconMamba", "FlexOlmo",
    "Gemma", "Gemma2", "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Glm", "Glm4", "Glm4Moe", "Glm4MoeLite", "GptOss",
    "Granite", "GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid", "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "HyperCLOVAX",
    "IQuestCoder", "KimiLinear", "InternLM3", "Jais2", "Lfm2", "Lfm2Moe", "Llama", "Llama4", "Mamba", "Mamba2", "Ministral",
    "Ministral3", "Mistral", "Mistral4", "Mixtral", "Nemotron", "NemotronH", "OPT", "Olmo2", "Olmo3", "Olmoe", "OlmoHybrid",
    "Phi3", "Phimoe", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SeedOss", "SmolLM3",
    "SolarOpen", "StableLm", "Starcoder2", "Step3Text", "Step3p5", "VaultGemma", "Youtu", "DeepseekV32", "GlmMoeDsa",
)  # fmt: skip
_PLAIN_STACKS = [stack for stack in _TEXT_STACKS if stack not in ("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified")]
"""Stacks whose name without `Text` is not that of a model with encoders."""
_BERTS = (
    "Bert", "Camembert", "Deberta", "DebertaV2", "DistilBert", "Gte", "MPNet", "New", "NomicBert", "Roberta", "XLMRoberta",
)  # fmt: skip
_ENCODER_TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_OTHER_TEXT_MODELS = (
    "InternLM2ForCausalLM",
    "MistralConsolidated",
    "VoyageQwen3BidirectionalEmbedModel",
    "Qwen2ForRewardModel",
    "Qwen2ForProcessRewardModel",
)
_NAMES: dict[str, str] = {
    "andesvl": "AndesVLForConditionalGeneration",
    "aria": "AriaForConditionalGeneration",
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration MusicFlamingoForConditionalGeneration",
    "aya_vision": "AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration",
    "bagel": "Bagel BagelForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "bee": "BeeForConditionalGeneration RForConditionalGeneration",
    "blip2": "Blip2ForConditionalGeneration",
    "cohere_asr": "CanaryForConditionalGeneration CohereAsrForConditionalGeneration",
    "colpali": (
        "ColModernVBertForRetrieval ColPali ColPaliForRetrieval ColQwen2 ColQwen2ForRetrieval "
        "ColQwen2ForRetrieval/qwen2_5_vl ColQwen2ForRetrieval/qwen2_5_vl_vision ColQwen2_5 ColQwen3 OpsColQwen3Model "
        "Qwen3VLNemotronEmbedModel"
    ),
    "cosmos3": "Cosmos3ForConditionalGeneration Cosmos3OmniForConditionalGeneration",
    "cosmos3_edge": "Cosmos3EdgeForConditionalGeneration",
    "deepseek_ocr2": "DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekOcr2ForConditionalGeneration",
    "deepseek_vl2": "DeepseekVLV2ForCausalLM",
    "dots_ocr": "DotsOCRForCausalLM",
    "dual_encoder": "CLIPModel Siglip2Model SiglipModel",
    "eagle2_5_vl": "Eagle2_5_VLForConditionalGeneration",
    "ernie4_5_vl": "Ernie4_5_VLMoeForConditionalGeneration Ernie4_5_VL_MoeForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "fireredasr2": "FireRedASR2ForConditionalGeneration",
    "fun_asr_nano": "FunASRForConditionalGeneration FunAsrNanoForConditionalGeneration",
    "funaudiochat": "FunAudioChatForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "glm4v": (
        "Glm46VForConditionalGeneration Glm4vMoeForConditionalGeneration Glm4vForConditionalGeneration "
        "GlmOcrForConditionalGeneration"
    ),
    "glmasr": "GlmAsrForConditionalGeneration",
    "got_ocr2": "GOTQwenForCausalLM GotOcr2ForConditionalGeneration",
    "granite4_vision": "Granite4VisionForConditionalGeneration",
    "granite_docling": "GraniteDoclingForConditionalGeneration",
    "granite_speech": "GraniteSpeechForConditionalGeneration",
    "granite_speech_plus": "GraniteSpeechPlusForConditionalGeneration",
    "h2ovl": "H2OVLChatModel",
    "hunyuan_vl": "HunYuanVLForConditionalGeneration",
    "hyperclovax_v2": "HCXVisionV2ForCausalLM HyperCLOVAXVisionV2ForConditionalGeneration",
    "idefics2": "Idefics2ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration",
    "interns1_pro": "InternS1ProForConditionalGeneration",
    "internvl": (
        "InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration "
        "QianfanOCRForConditionalGeneration SkyworkR1VChatModel"
    ),
    "isaac": "IsaacForConditionalGeneration",
    "jina_reranker": "JinaVLForRanking JinaVLForSequenceClassification",
    "jina_v4": "JinaEmbeddingsV4Model",
    "kanana_v": "KananaVForConditionalGeneration",
    "keye": "KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration",
    "kimi_audio": "KimiAudioForConditionalGeneration MoonshotKimiaForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration KimiVLForConditionalGeneration Kimi_K25ForConditionalGeneration",
    "kokoro": "KokoroForTextToSpeech",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "lighton_ocr": "LightOnOcrForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": (
        "LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration "
        "MiniMaxVL01ForConditionalGeneration Mineru2QwenForCausalLM TarsierForConditionalGeneration"
    ),
    "llava_next_video": "LlavaNextVideoForConditionalGeneration",
    "llava_onevision2": "LlavaOnevision2ForConditionalGeneration",
    "midashenglm": "MiDashengLMModel",
    "minicpmv": (
        "MiniCPMO MiniCPMV MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration "
        "MiniCPMOcrForConditionalGeneration"
    ),
    "mllama": "MllamaForConditionalGeneration",
    "molmo": "MolmoForCausalLM OLMoForCausalLM/molmo",
    "molmo2": "Molmo2ForConditionalGeneration",
    "moondream3": "HfMoondream Moondream3ForCausalLM",
    "moonshine": "MoonshineForConditionalGeneration MoonshineStreamingForConditionalGeneration",
    "moss_transcribe": "MossTranscribeDiarizeForConditionalGeneration",
    "nemotron_asr_streaming": "NemotronAsrStreamingForRNNT",
    "nemotron_embed": "LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel",
    "nemotron_omni": ("NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3"),
    "nemotron_parse": "NemotronParseForConditionalGeneration",
    "nemotron_vl": "Llama_Nemotron_Nano_VL NemotronH_Nano_VL_V2",
    "nvlm_d": "NVLM_D",
    "opencua": "OpenCUAForConditionalGeneration",
    "openpangu_vl": "OpenPanguVLForConditionalGeneration",
    "openvla": "OpenVLAForActionPrediction",
    "ovis": "Ovis OvisForCausalLM Ovis2ForConditionalGeneration Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "parakeet": "ParakeetForCTC ParakeetForRNNT ParakeetForTDT",
    "phi3_vision": "Phi3VForCausalLM",
    "phi4_multimodal": "Phi4MMForCausalLM Phi4MultimodalForCausalLM",
    "phi4_vision": "Phi4ForCausalLMV",
    "pixtral": (
        "LlavaForConditionalGeneration/pixtral Mistral3Consolidated Mistral3ForConditionalGeneration PixtralConsolidated"
    ),
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Tarsier2ForConditionalGeneration "
        "TarsierForConditionalGeneration/qwen2_vl"
    ),
    "qwen3_asr": (
        "Qwen3ASRForConditionalGeneration Qwen3ASRForConditionalGeneration/qwen3_forced_aligner "
        "Qwen3ASRForTokenClassification Qwen3ASRForcedAlignerForTokenClassification"
    ),
    "qwen3_omni": "Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl": (
        "InternS2PreviewForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration "
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration"
    ),
    "step3_vl": (
        "Step3VL10BForCausalLM Step3VLForConditionalGeneration Step3p7ForConditionalGeneration StepVLForConditionalGeneration"
    ),
    "terratorch": "Terratorch",
    "ultravox": "UltravoxModel",
    "unlimited_ocr": "UnlimitedOCRForCausalLM UnlimitedOcrForConditionalGeneration",
    "vibevoice_asr": "VibeVoiceAsrForConditionalGeneration VibeVoiceForASRTraining",
    "video_llama_3": "VideoLlama3ForConditionalGeneration",
    "voxtral": "VoxtralConsolidated VoxtralForConditionalGeneration",
    "voxtral_realtime": "VoxtralRealtimeConsolidated VoxtralRealtimeForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}
"""Folder in models/families -> the architectures that it has."""

FAMILIES: Mapping[str, str] = {
    **{name: folder for folder, names in _NAMES.items() for name in names.split()},
    **{f"{stack}{task}": "bert" for stack in _BERTS for task in ("Model", "ForMaskedLM", "ForSequenceClassification")},
    **{f"{stack}ForTokenClassification": "bert" for stack in _BERTS if stack != "Gte"},
    **{f"ModernBert{task}": "modernbert" for task in _ENCODER_TASKS},
    **{f"{stack}ForCausalLM": "text_only" for stack in _TEXT_STACKS},
    **{f"{stack}Model": "text_only" for stack in (*_PLAIN_STACKS, "Gemma3Text", "Gemma4Text")},
    **{f"{stack}ForSequenceClassification": "text_only" for stack in (*_PLAIN_STACKS, "Gemma3Text")},
    **dict.fromkeys(_OTHER_TEXT_MODELS, "text_only"),
}
"""Architecture -> its folder in models/families. A name with a slash also depends on a `model_type`."""

CHECKPOINT_LAYOUTS: dict[str, CheckpointLayout] = {
    "params.json": CheckpointLayout(
        f"{_PACKAGE}.checkpoints.consolidated:hub_config",
        {
            "images": "PixtralConsolidated",
            "merged images": "Mistral3Consolidated",
            "audio": "VoxtralConsolidated",
            "causal audio": "VoxtralRealtimeConsolidated",
            "text": "MistralConsolidated",
        },
        tokenizer_file="tekken.json",
    )
}
"""Files that replace config.json in a publisher's own layout."""

MODEL_TYPES: Mapping[str, str] = {
    "bagel": "BagelForConditionalGeneration",
    "colmodernvbert": "ColModernVBertForRetrieval",
    "deepseek_vl_v2": "DeepseekVLV2ForCausalLM",
}
"""Architectures of published configs that have a `model_type` only."""

SECTIONS: Mapping[tuple[str, ...], str] = {("istftnet", "plbert"): "KokoroForTextToSpeech"}
"""Architectures of published configs that are known by these sections."""


def architectures_of(config: Mapping[str, Any]) -> list[str] | None:
    """Return the architecture of a config.json that names none: by `model_type` or by its sections; None if it is unknown."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in MODEL_TYPES:
        return [MODEL_TYPES[kind]]
    known = next((name for keys, name in SECTIONS.items() if kind is None and all(key in config for key in keys)), None)
    return None if known is None else [known]


_registered: dict[str, Architecture] = {}  # by `register_model`


@cache
def load_family(folder: str) -> Family:
    """Return what a family's folder says about itself; no class of it is imported."""
    family: Family = import_module(f"{_FAMILIES_PACKAGE}.{folder}").FAMILY
    return family


@cache
def _native(architecture: str) -> Architecture:
    """Return the classes of an architecture in FAMILIES."""
    folder = FAMILIES[architecture]
    classes = load_family(folder).classes
    model, processing = next(several for pattern, several in classes.items() if fnmatchcase(architecture, pattern))
    owner, _, name = processing.rpartition(":")
    return Architecture(
        f"{_FAMILIES_PACKAGE}.{folder}.model:{model}", f"{_FAMILIES_PACKAGE}.{owner or folder}.processing:{name}"
    )


def native_architectures() -> dict[str, Architecture]:
    """Return the classes of every architecture in FAMILIES."""
    return {name: _native(name) for name in FAMILIES}


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
            wanted = "a name" if param == "architecture" else "'package.module:Class'"
            raise ConfigError(f"register_model: <<param>> is {short_repr(value)}; give {wanted}", param=param)
    row = Architecture(model, processing)
    taken = find_architecture(architecture) if architecture in FAMILIES else _registered.setdefault(architecture, row)
    if taken != row:
        raise ConfigError(f"the architecture {architecture!r} is registered with {taken.model}", param="architecture")


def registered_models() -> dict[str, Architecture]:
    """Return the architectures of other packages."""
    return dict(_registered)


def is_registered(architecture: str) -> bool:
    """Return True if the registry has the architecture, after loading plugins if it does not have it without them."""
    if architecture not in FAMILIES and architecture not in _registered:
        _load_plugins()
    return architecture in FAMILIES or architecture in _registered


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


_SPELLINGS = {_plain(name): name for name in FAMILIES}


def architecture_key(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the key of FAMILIES: "Architecture/model type" if there is one, else the architecture.

    The model type is that of the vision tower, of the thinker or of the whole model. Publishers differ in case and underscores
    (LightOnOCR and
    LightOnOcr), which are not compared.
    """
    if architecture not in FAMILIES and architecture not in _registered:
        architecture = _SPELLINGS.get(_plain(architecture), architecture)
    sections = (config.get("vision_config"), config.get("thinker_config"), config)
    kinds = ((part or {}).get("model_type") for part in sections)
    names = (f"{architecture}/{kind}" for kind in kinds)
    return next((name for name in names if name in FAMILIES or name in _registered), architecture)


_TASK = re.compile(r"For[A-Z]\w*$")  # ending shared by many architectures


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture; ConfigError with the nearest known name if there is none."""
    if is_registered(name):
        return _registered[name] if name in _registered else _native(name)
    near = get_close_matches(
        _TASK.sub("", name), stems := {_TASK.sub("", registered): registered for registered in (*FAMILIES, *_registered)}, n=1
    )
    nearest = f"; the nearest name is {stems[near[0]]}" if near else ""
    raise ConfigError(f"no implementation of the architecture {name!r} here (docs/models.md lists the known ones{nearest})")
