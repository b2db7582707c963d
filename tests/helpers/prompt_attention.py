"""The prompt attention of families, by name."""

from sensorium.mm.rules import CAUSAL
from sensorium.models.families.bagel.processing import BagelProcessingInfo
from sensorium.models.families.gemma3.processing import Gemma3ProcessingInfo
from sensorium.models.families.gemma4.processing import BIDIRECTIONAL_WINDOWS
from sensorium.models.families.molmo2.processing import Molmo2ProcessingInfo
from sensorium.models.families.moondream3.processing import Moondream3ProcessingInfo
from sensorium.processors.bases.attention_rules import PREFIX_LM, PROMPT_WINDOWS

_FAMILIES = (BagelProcessingInfo, Gemma3ProcessingInfo, Molmo2ProcessingInfo, Moondream3ProcessingInfo)
ATTENTIONS = {
    one.name: one
    for one in (CAUSAL, PREFIX_LM, PROMPT_WINDOWS, BIDIRECTIONAL_WINDOWS, *(info.prompt_attention for info in _FAMILIES))
}
