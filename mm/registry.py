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
    return Architecture(*(f"{_PACKAGE}.{part}.{folder}.{family}:{name}" for part, name in paths))


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
    "aria", "aya_vision", "eagle2_5_vl", "funaudiochat", "gemma3", "got_ocr2", "idefics2", "idefics3", "internvl", "kimi_k25",
    "lfm2_vl", "lighton_ocr", "llava", "minicpmv", "nemotron_vl", "ovis", "paligemma", "pixtral", "step3_vl", "text_only",
    "ultravox",
})  # fmt: skip
TEXT_PROCESSING = native("text_only", "TextModel", "TextProcessingInfo").processing
_TEXT_STACKS = (
    "Arcee", "Bamba", "Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Dots1", "MiniMax", "MiniMaxM1", "MiniMaxM2",
    "MiniMaxText01", "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "ExaoneMoe", "FalconH1", "Gemma", "Gemma2", "Gemma3", "Gemma3n",
    "Gemma4", "Gemma4Unified", "Glm", "Glm4", "Glm4Moe", "GptOss", "Granite", "GraniteMoe", "GraniteMoeShared",
    "GraniteMoeHybrid", "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "InternLM3", "Lfm2", "Lfm2Moe", "Llama", "Llama4", "Mamba2",
    "Ministral3", "Mistral", "Mistral4", "Mixtral", "Nemotron", "NemotronH", "Olmo2", "Olmo3", "Olmoe", "OlmoHybrid", "Phi3",
    "Phimoe", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SeedOss", "SmolLM3", "SolarOpen",
    "StableLm", "Starcoder2", "Step3Text",
)  # fmt: skip
_PLAIN_STACKS = [stack for stack in _TEXT_STACKS if stack not in ("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified")]
"""Stacks whose name without `Text` is not that of a model with encoders."""
_ENCODER_PROCESSING = native("bert", "Bert", "BertProcessingInfo").processing
_BERTS = ("Bert", "Camembert", "DistilBert", "Gte", "MPNet", "New", "NomicBert", "Roberta", "XLMRoberta")

ARCHITECTURES: dict[str, Architecture] = {
    "AriaForConditionalGeneration": native("aria", "Aria", "AriaProcessingInfo"),
    "AyaVisionForConditionalGeneration": native("aya_vision", "AyaVision", "AyaVisionProcessingInfo"),
    "AudioFlamingo3ForConditionalGeneration": native("audioflamingo3", "AudioFlamingo3", "AudioFlamingo3ProcessingInfo"),
    "Bagel": native("bagel", "Bagel", "BagelProcessingInfo"),
    "BagelForConditionalGeneration": native("bagel", "Bagel", "BagelProcessingInfo"),
    "CanaryForConditionalGeneration": native("cohere_asr", "Canary", "CanaryProcessingInfo"),
    "CLIPModel": native("dual_encoder", "Clip", "ClipProcessingInfo"),
    "CohereAsrForConditionalGeneration": native("cohere_asr", "CohereAsr", "CohereAsrProcessingInfo"),
    "Cohere2VisionForConditionalGeneration": native("aya_vision", "Cohere2Vision", "Cohere2VisionProcessingInfo"),
    "ColModernVBertForRetrieval": native("colpali", "ColModernVBert", "ColModernVBertProcessingInfo"),
    "ColPali": native("colpali", "ColPali", "ColPaliProcessingInfo"),
    "ColPaliForRetrieval": native("colpali", "ColPali", "ColPaliProcessingInfo"),
    "ColQwen2": native("colpali", "ColQwen2", "ColQwenProcessingInfo"),
    "ColQwen2ForRetrieval": native("colpali", "ColQwen2", "ColQwenProcessingInfo"),
    "ColQwen2ForRetrieval/qwen2_5_vl": native("colpali", "ColQwen25", "ColQwenProcessingInfo"),
    "ColQwen2ForRetrieval/qwen2_5_vl_vision": native("colpali", "ColQwen25", "ColQwenProcessingInfo"),
    "ColQwen2_5": native("colpali", "ColQwen25", "ColQwenProcessingInfo"),
    "DeepseekOCR2ForCausalLM": native("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "DeepseekOCRForCausalLM": native("deepseek_ocr2", "DeepseekOcr", "DeepseekOcrProcessingInfo"),
    "DeepseekVLV2ForCausalLM": native("deepseek_vl2", "DeepseekVL2", "DeepseekVL2ProcessingInfo"),
    "DeepseekOcr2ForConditionalGeneration": native("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "DotsOCRForCausalLM": native("dots_ocr", "DotsOcr", "DotsOcrProcessingInfo"),
    "Eagle2_5_VLForConditionalGeneration": native("eagle2_5_vl", "EagleVL", "EagleVLProcessingInfo"),
    "Ernie4_5_VLMoeForConditionalGeneration": native("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Ernie4_5_VL_MoeForConditionalGeneration": native("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Gemma3ForConditionalGeneration": native("gemma3", "Gemma3", "Gemma3ProcessingInfo"),
    "Gemma3nForConditionalGeneration": native("gemma3n", "Gemma3n", "Gemma3nProcessingInfo"),
    "Gemma4ForConditionalGeneration": native("gemma4", "Gemma4", "Gemma4ProcessingInfo"),
    "Gemma4UnifiedForConditionalGeneration": native("gemma4_unified", "Gemma4Unified", "Gemma4UnifiedProcessingInfo"),
    "Glm46VForConditionalGeneration": native("glm4v", "Glm4V", "Glm46VProcessingInfo"),
    "Glm4vMoeForConditionalGeneration": native("glm4v", "Glm4VMoe", "Glm4VProcessingInfo"),
    "Glm4vForConditionalGeneration": native("glm4v", "Glm4V", "Glm4VProcessingInfo"),
    "GlmAsrForConditionalGeneration": native("glmasr", "GlmAsr", "GlmAsrProcessingInfo"),
    "GlmOcrForConditionalGeneration": native("glm4v", "GlmOcr", "GlmOcrProcessingInfo"),
    "HunYuanVLForConditionalGeneration": native("hunyuan_vl", "HunYuanVL", "HunYuanVLProcessingInfo"),
    "Idefics2ForConditionalGeneration": native("idefics2", "Idefics2", "Idefics2ProcessingInfo"),
    "Idefics3ForConditionalGeneration": native("idefics3", "Idefics3", "Idefics3ProcessingInfo"),
    "FunASRForConditionalGeneration": native("fun_asr_nano", "FunAsrNano", "FunAsrNanoProcessingInfo"),
    "FunAsrNanoForConditionalGeneration": native("fun_asr_nano", "FunAsrNano", "FunAsrNanoProcessingInfo"),
    "FunAudioChatForConditionalGeneration": native("funaudiochat", "FunAudioChat", "FunAudioChatProcessingInfo"),
    "GOTQwenForCausalLM": native("got_ocr2", "GotOcr2", "GotProcessingInfo"),
    "GotOcr2ForConditionalGeneration": native("got_ocr2", "GotOcr2", "GotOcr2ProcessingInfo"),
    "GraniteDoclingForConditionalGeneration": native("granite_docling", "GraniteDocling", "GraniteDoclingProcessingInfo"),
    "GraniteSpeechForConditionalGeneration": native("granite_speech", "GraniteSpeech", "GraniteSpeechProcessingInfo"),
    "Granite4VisionForConditionalGeneration": native("granite4_vision", "Granite4Vision", "Granite4VisionProcessingInfo"),
    "InternS1ForConditionalGeneration": native("internvl", "InternVL", "InternVLProcessingInfo"),
    "InternVLChatModel": native("internvl", "InternVLChat", "InternVLChatProcessingInfo"),
    "InternVLForConditionalGeneration": native("internvl", "InternVL", "InternVLProcessingInfo"),
    "InternLM2ForCausalLM": native("text_only", "InternLM2", "TextProcessingInfo"),
    "JinaEmbeddingsV4Model": native("jina_v4", "JinaEmbeddingsV4", "JinaEmbeddingsV4ProcessingInfo"),
    "JinaVLForRanking": native("jina_reranker", "JinaReranker", "JinaRerankerProcessingInfo"),
    "JinaVLForSequenceClassification": native("jina_reranker", "JinaReranker", "JinaRerankerProcessingInfo"),
    "IsaacForConditionalGeneration": native("isaac", "Isaac", "IsaacProcessingInfo"),
    "KeyeForConditionalGeneration": native("keye", "KeyeVL", "KeyeProcessingInfo"),
    "KeyeVL1_5ForConditionalGeneration": native("keye", "KeyeVL15", "Keye15ProcessingInfo"),
    "KimiK25ForConditionalGeneration": native("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "KimiAudioForConditionalGeneration": native("kimi_audio", "KimiAudio", "KimiAudioProcessingInfo"),
    "KimiVLForConditionalGeneration": native("kimi_k25", "KimiVL", "KimiVLProcessingInfo"),
    "Kimi_K25ForConditionalGeneration": native("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "LightOnOcrForConditionalGeneration": native("lighton_ocr", "LightOnOcr", "LightOnOcrProcessingInfo"),
    "Lfm2VlForConditionalGeneration": native("lfm2_vl", "Lfm2VL", "Lfm2VLProcessingInfo"),
    "Llama4ForConditionalGeneration": native("llama4", "Llama4", "Llama4ProcessingInfo"),
    "Llama_Nemotron_Nano_VL": native("nemotron_vl", "LlamaNemotronVL", "LlamaNemotronVLProcessingInfo"),
    "LlavaForConditionalGeneration": native("llava", "Llava", "LlavaProcessingInfo"),
    "LlavaForConditionalGeneration/pixtral": native("pixtral", "Pixtral", "PixtralProcessingInfo"),
    "LlavaNextForConditionalGeneration": native("llava", "LlavaNext", "LlavaNextProcessingInfo"),
    "LlavaOnevisionForConditionalGeneration": native("llava", "LlavaOnevision", "LlavaOnevisionProcessingInfo"),
    "MiDashengLMModel": native("midashenglm", "MiDashengLM", "MiDashengLMProcessingInfo"),
    "MiniCPMO": native("minicpmv", "MiniCPMO", "MiniCPMOProcessingInfo"),
    "MiniCPMV": native("minicpmv", "MiniCPMV", "MiniCPMVProcessingInfo"),
    "MiniMaxVL01ForConditionalGeneration": native("llava", "MiniMaxVL", "MiniMaxVLProcessingInfo"),
    "Mineru2QwenForCausalLM": native("llava", "Mineru2", "Mineru2ProcessingInfo"),
    "MiniCPMV4_6ForConditionalGeneration": native("minicpmv", "MiniCPMV46", "MiniCPMV46ProcessingInfo"),
    "MiniCPMV4_7ForConditionalGeneration": native("minicpmv", "MiniCPMV46", "MiniCPMV47ProcessingInfo"),
    "MiniCPMOcrForConditionalGeneration": native("minicpmv", "MiniCPMV46", "MiniCPMOcrProcessingInfo"),
    "Mistral3Consolidated": native("pixtral", "Mistral3Consolidated", "MistralFormatProcessingInfo"),
    "Mistral3ForConditionalGeneration": native("pixtral", "Mistral3", "Mistral3ProcessingInfo"),
    "MistralConsolidated": native("text_only", "MistralText", "TextProcessingInfo"),
    "MoonshotKimiaForCausalLM": native("kimi_audio", "KimiAudio", "KimiAudioProcessingInfo"),
    "MllamaForConditionalGeneration": native("mllama", "Mllama", "MllamaProcessingInfo"),
    "Molmo2ForConditionalGeneration": native("molmo2", "Molmo2", "Molmo2ProcessingInfo"),
    "MolmoForCausalLM": native("molmo", "Molmo", "MolmoProcessingInfo"),
    "MoonshineForConditionalGeneration": native("moonshine", "Moonshine", "MoonshineProcessingInfo"),
    "MoonshineStreamingForConditionalGeneration": native("moonshine", "MoonshineStreaming", "MoonshineStreamingProcessingInfo"),
    "MusicFlamingoForConditionalGeneration": native("audioflamingo3", "MusicFlamingo", "AudioFlamingo3ProcessingInfo"),
    "NemotronH_Nano_VL_V2": native("nemotron_vl", "NemotronVL", "NemotronVLProcessingInfo"),
    "NemotronParseForConditionalGeneration": native("nemotron_parse", "NemotronParse", "NemotronParseProcessingInfo"),
    "OLMoForCausalLM/molmo": native("molmo", "Molmo", "MolmoProcessingInfo"),
    "Ovis": native("ovis", "Ovis", "OvisProcessingInfo"),
    "OvisForCausalLM": native("ovis", "Ovis", "OvisProcessingInfo"),
    "Ovis2ForConditionalGeneration": native("ovis", "Ovis2", "Ovis2ProcessingInfo"),
    "Ovis2_5": native("ovis", "Ovis25", "Ovis25ProcessingInfo"),
    "PaddleOCRVLForConditionalGeneration": native("paddleocr_vl", "PaddleOcrVL", "PaddleOcrVLProcessingInfo"),
    "ParakeetForCTC": native("parakeet", "ParakeetCtc", "ParakeetProcessingInfo"),
    "ParakeetForRNNT": native("parakeet", "ParakeetTransducer", "ParakeetTransducerProcessingInfo"),
    "ParakeetForTDT": native("parakeet", "ParakeetTdt", "ParakeetTransducerProcessingInfo"),
    "Phi3VForCausalLM": native("phi3_vision", "Phi3V", "Phi3VProcessingInfo"),
    "Phi4MMForCausalLM": native("phi4_multimodal", "Phi4Multimodal", "Phi4MMProcessingInfo"),
    "Phi4MultimodalForCausalLM": native("phi4_multimodal", "Phi4Multimodal", "Phi4MultimodalProcessingInfo"),
    "PaliGemmaForConditionalGeneration": native("paligemma", "PaliGemma", "PaliGemmaProcessingInfo"),
    "PixtralConsolidated": native("pixtral", "PixtralConsolidated", "MistralFormatProcessingInfo"),
    "QianfanOCRForConditionalGeneration": native("internvl", "QianfanOcr", "QianfanOcrProcessingInfo"),
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
    "Qwen3_5ForConditionalGeneration": native("qwen3_vl", "Qwen35", "Qwen35ProcessingInfo"),
    "Qwen3_5MoeForConditionalGeneration": native("qwen3_vl", "Qwen35Moe", "Qwen35ProcessingInfo"),
    "Siglip2Model": native("dual_encoder", "SiglipNaflex", "SiglipProcessingInfo"),
    "SiglipModel": native("dual_encoder", "Siglip", "SiglipProcessingInfo"),
    "SkyworkR1VChatModel": native("internvl", "InternVLChat", "InternVLChatProcessingInfo"),
    "SmolVLMForConditionalGeneration": native("idefics3", "Idefics3", "SmolVLMProcessingInfo"),
    "Step3VL10BForCausalLM": native("step3_vl", "StepVL", "Step3VLProcessingInfo"),
    "Step3VLForConditionalGeneration": native("step3_vl", "Step3VL", "Step3VLProcessingInfo"),
    "StepVLForConditionalGeneration": native("step3_vl", "StepVL", "Step3VLProcessingInfo"),
    "Terratorch": native("terratorch", "Terratorch", "RawTensorInfo"),
    "Tarsier2ForConditionalGeneration": native("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "TarsierForConditionalGeneration": native("llava", "Llava", "TarsierProcessingInfo"),
    "TarsierForConditionalGeneration/qwen2_vl": native("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "UltravoxModel": native("ultravox", "Ultravox", "UltravoxProcessingInfo"),
    "VoxtralConsolidated": native("voxtral", "VoxtralConsolidated", "VoxtralProcessingInfo"),
    "VoxtralForConditionalGeneration": native("voxtral", "Voxtral", "VoxtralProcessingInfo"),
    "VoxtralRealtimeForConditionalGeneration": native("voxtral_realtime", "VoxtralRealtime", "VoxtralRealtimeProcessingInfo"),
    "WhisperForConditionalGeneration": native("whisper", "Whisper", "WhisperProcessingInfo"),
    **{f"{stack}{task}": native("bert", "Bert", "BertProcessingInfo") for stack in _BERTS for task in ("Model", "ForMaskedLM")},
    "NewForTokenClassification": native("bert", "Bert", "BertProcessingInfo"),
    **{f"{stack}ForSequenceClassification": native("bert", "BertClassifier", "BertProcessingInfo") for stack in _BERTS},
    **{
        f"{stack}ForTokenClassification": native("bert", "BertTokenClassifier", "BertProcessingInfo")
        for stack in _BERTS
        if stack not in ("Gte", "New")
    },
    **{
        f"ModernBert{task}": Architecture(native("modernbert", name, "").model, _ENCODER_PROCESSING)
        for task, name in (
            ("Model", "ModernBert"),
            ("ForMaskedLM", "ModernBert"),
            ("ForSequenceClassification", "ModernBertClassifier"),
            ("ForTokenClassification", "ModernBertClassifier"),
        )
    },
    **{f"{stack}ForCausalLM": native("text_only", "TextModel", "TextProcessingInfo") for stack in _TEXT_STACKS},
    **{f"{stack}Model": native("text_only", "TextModel", "TextProcessingInfo") for stack in _PLAIN_STACKS},
    "VoyageQwen3BidirectionalEmbedModel": Architecture(native("text_only", "Voyage", "").model, _ENCODER_PROCESSING),
    "Qwen2ForRewardModel": native("text_only", "RewardModel", "TextProcessingInfo"),
    "Qwen2ForProcessRewardModel": native("text_only", "RewardModel", "TextProcessingInfo"),
    **{
        f"{stack}ForSequenceClassification": native("text_only", "TextClassifier", "TextProcessingInfo")
        for stack in (*_PLAIN_STACKS, "Gemma3Text")
    },
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

MODEL_TYPES: Mapping[str, str] = {
    "bagel": "BagelForConditionalGeneration",
    "colmodernvbert": "ColModernVBertForRetrieval",
    "deepseek_vl_v2": "DeepseekVLV2ForCausalLM",
}
"""Architectures of published configs that have a `model_type` only."""


def architectures_of(config: Mapping[str, Any]) -> list[str] | None:
    """Return the architecture of a config.json that has a `model_type` only; None if it is not in MODEL_TYPES."""
    kind = config.get("model_type")
    return [MODEL_TYPES[kind]] if isinstance(kind, str) and kind in MODEL_TYPES else None


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
    """Return the key of ARCHITECTURES: "Architecture/model type" if there is one, else the architecture.

    The model type is that of the vision tower or of the whole model. Publishers differ in case and underscores (LightOnOCR and
    LightOnOcr), which are not compared.
    """
    if architecture not in ARCHITECTURES:
        architecture = _SPELLINGS.get(_plain(architecture), architecture)
    kinds = ((part or {}).get("model_type") for part in (config.get("vision_config"), config))
    names = (f"{architecture}/{kind}" for kind in kinds)
    return next((name for name in names if name in ARCHITECTURES), architecture)


_TASK = re.compile(r"For[A-Z]\w*$")  # ending shared by many architectures


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture; ConfigError with the nearest known name if there is none."""
    if is_registered(name):
        return ARCHITECTURES[name]
    near = get_close_matches(_TASK.sub("", name), stems := {_TASK.sub("", known): known for known in ARCHITECTURES}, n=1)
    nearest = f"; the nearest name is {stems[near[0]]}" if near else ""
    raise ConfigError(f"no implementation of the architecture {name!r} here (docs/models.md lists the known ones{nearest})")
