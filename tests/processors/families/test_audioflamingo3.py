"""The tokens around the audio of Music Flamingo."""

import pytest
from sensorium.mm.types import ItemGeometry
from sensorium.models.families.audioflamingo3.processing import AudioFlamingo3ProcessingInfo
from sensorium.processors.files import ProcessorFiles

TEXTS = {"<|sound_bos|>": 7, "<|sound_eos|>": 8}
IDS = {"audio_bos_token_id": 11, "audio_eos_token_id": 12}


@pytest.mark.parametrize(
    ("config", "tokens", "around"),
    [
        ({"model_type": "musicflamingo", **IDS}, TEXTS, (7, 8)),
        ({"model_type": "musicflamingo", **IDS}, {}, (11, 12)),
        ({"model_type": "musicflamingo"}, {}, (151670, 151671)),
        ({"model_type": "audioflamingo3", **IDS}, TEXTS, ()),
    ],
)
def test_audio_has_tokens_around_it_in_music_flamingo_only(config, tokens, around):
    info = AudioFlamingo3ProcessingInfo(ProcessorFiles(config, token_to_id=tokens.get))
    assert info.span("audio", ItemGeometry(1, 1, 2)).token_ids == (*around[:1], 151669, 151669, *around[1:])
    assert info.max_windows(30, 750) == (40 if around else 20)
