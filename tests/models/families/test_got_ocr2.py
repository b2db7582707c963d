"""The config of GOT-OCR2's publisher, which has the decoder at its top level and no vision_config."""

import torch
from sensorium.models.families.got_ocr2.model import GotOcr2
from sensorium.models.families.got_ocr2.processing import GotProcessingInfo
from sensorium.processors.files import ProcessorFiles

PUBLISHED = {
    "architectures": ["GOTQwenForCausalLM"],
    "model_type": "GOT",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "im_patch_token": 151859,
    "vocab_size": 151860,
}


def test_the_publishers_config():
    meta = torch.device("meta")
    flat = GotOcr2(PUBLISHED, torch.bfloat16, meta)
    nested = GotOcr2({"model_type": "got_ocr2"}, torch.bfloat16, meta)
    assert flat.spec == nested.spec
    assert flat.sam.spec == nested.sam.spec
    assert flat.sam.spec.down == (512, 1024)
    info = GotProcessingInfo(ProcessorFiles(PUBLISHED))
    assert info.placeholder_ids == {"image": 151859}
    assert (info.specs["image"].resample, info.specs["image"].tiling.size) == ("pillow", (1024, 1024))
