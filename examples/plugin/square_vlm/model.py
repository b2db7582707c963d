"""The computation: a SigLIP tower, a two-layer projector, and a Llama decoder."""

from sensorium.checkpoints.config import require
from sensorium.models.layers.connectors import ProjectorSpec
from sensorium.models.text.decoder_config import decoder_spec
from sensorium.models.text.stacks import stack_of
from sensorium.models.tower_model import TOWER_PREFIXES, TowerModel
from sensorium.models.vision.encoders import encoder_spec


class Square(TowerModel):
    """Images of one size; each patch makes a row."""

    prefixes = TOWER_PREFIXES  # (prefix of stored names, our prefix); the first match is replaced

    def __init__(self, config, dtype, device):
        text = decoder_spec(config, stack_of(config, "llama"))  # or a Stack of what config.json does not state
        tower = encoder_spec(require(config, "vision_config"), "siglip_vision_model")  # or a TowerSpec
        projector = ProjectorSpec(tower.width, text.hidden_size, ("linear_1", "linear_2"), inner=text.hidden_size)
        super().__init__(text, tower, projector, dtype, device)
