"""Kokoro against the code of the published package, where it is installed, and against numbers that this code returned."""

from __future__ import annotations

import kokoro_files
import pytest
import torch
from kokoro_files import CONFIG
from measured import peak_bytes
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.checkpoints.weight_files import read_checkpoint, read_headers
from sensorium.models.families.kokoro.model import Kokoro
from sensorium.models.interface import SupportsSpeech
from sensorium.models.memory_formulas import SMALL

CPU = torch.device("cpu")
IDS = (0, 43, 75, 60, 16, 12, 90, 33, 61, 4, 0)
SEED, SPEED = 3, 1.25
FRAMES = [4, 4, 6, 6, 5, 4, 5, 5, 6, 6, 6]
UNVOICED = [
    -0.207482, -1.650806, -0.374351, 0.240617, 0.040196, 0.1307, -0.385896, 0.85913, 0.041197, -0.585152, 0.446409, 0.095738,
]  # fmt: skip


@pytest.fixture(scope="module")
def tensors():
    return kokoro_files.random_tensors()


@pytest.fixture(scope="module")
def model(tensors):
    made = Kokoro(CONFIG, torch.float32, CPU)
    made.load_weights(tensors.items())
    return made


@pytest.fixture(scope="module")
def hidden():
    return torch.randn(len(IDS), CONFIG["plbert"]["hidden_size"], generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def style():
    return kokoro_files.random_voice(CONFIG, 0)[len(IDS) - 3]


@pytest.fixture(scope="module")
def oracle(tensors):
    module = kokoro_files.published_classes()
    if module is None:
        pytest.skip("the package kokoro is not installed")
    return kokoro_files.make_oracle(module, CONFIG, tensors)


@torch.inference_mode()
def spoken(model, hidden, style, speed=SPEED, seed=SEED):
    return model.speak(torch.tensor(IDS), hidden, style[0], speed, seed)


def test_samples_are_those_of_the_published_code(oracle, model, hidden, style, monkeypatch):
    """The curves are compared, then theirs are taken: where pitch differs by rounding, a phase may turn by a whole circle."""
    oracle.bert.forward = lambda ids, attention_mask: hidden[None]
    their_curves, our_curves, theirs = oracle.predictor.F0Ntrain, model.predictor.curves, []

    def kept(encoded, prosody):
        theirs.extend(their_curves(encoded, prosody))
        return theirs

    def compared(frames, prosody):
        for mine, other in zip(our_curves(frames, prosody), theirs, strict=True):
            torch.testing.assert_close(mine, other[0], rtol=0, atol=1e-4)
        return theirs[0][0], theirs[1][0]

    monkeypatch.setattr(oracle.predictor, "F0Ntrain", kept)
    monkeypatch.setattr(model.predictor, "curves", compared)
    torch.manual_seed(SEED)
    samples, frames = oracle.forward_with_tokens(torch.tensor([IDS]), style, SPEED)
    assert len(set(frames.tolist())) > 2
    assert theirs[0].std() > 0.1
    durations, speech = spoken(model, hidden, style)
    assert durations.tolist() == frames.tolist()
    assert speech.shape == samples.shape == (int(frames.sum()) * 600,)
    assert samples.std() > 0.01
    torch.testing.assert_close(speech, samples, rtol=0, atol=1e-4)


def test_numbers_of_the_published_code(model, hidden, style):
    """Frames and samples equal those that the published code returned for unvoiced speech, whose source is noise."""
    frames, _ = spoken(model, hidden, style)
    assert frames.tolist() == FRAMES
    draw = torch.Generator().manual_seed(7)
    features, energy = torch.randn(6, CONFIG["hidden_dim"], generator=draw), torch.randn(12, generator=draw)
    with torch.inference_mode():
        samples = model.decoder(features, torch.zeros(12), energy, style[:, :128], torch.Generator().manual_seed(SEED))
    torch.testing.assert_close(samples[::300], torch.tensor(UNVOICED), rtol=0, atol=1e-4)


def test_speed_and_noise(model, hidden, style):
    frames, samples = spoken(model, hidden, style, speed=1.0)
    slow, _ = spoken(model, hidden, style, speed=0.5)
    assert 1.7 < int(slow.sum()) / int(frames.sum()) < 2.3
    assert spoken(model, hidden, style, speed=1.0)[1].equal(samples)
    assert not spoken(model, hidden, style, speed=1.0, seed=4)[1].equal(samples)
    with pytest.raises(InputError) as caught:
        spoken(model, hidden, style, speed=1e-3)
    assert caught.value.info.code == "over_limit"
    assert caught.value.info.limit == 3600
    with pytest.raises(InputError) as caught:
        spoken(model, hidden, style * torch.finfo().max)
    assert caught.value.info.code == "not_finite"


def test_memory_is_planned(model, hidden, style):
    """Frames of all phonemes together, and the sizes of the stages that dominate."""
    frames, _ = spoken(model, hidden, style)
    measured = peak_bytes(lambda: spoken(model, hidden, style))
    planned = model.sizes.peak_bytes(len(IDS), int(frames.sum()))
    assert measured <= planned + SMALL
    assert planned <= 1.5 * measured + SMALL


def test_a_published_checkpoint_is_read_without_unpickling(tensors, tmp_path):
    kokoro_files.write_checkpoint(tmp_path / "model", tensors)
    headers = read_headers(tmp_path / "model")
    assert {name: tensor.shape for name, tensor in headers.items()} == {
        name.replace(".", ".module.", 1): tensor.shape for name, tensor in tensors.items()
    }
    assert all(tensor.is_meta for tensor in headers.values())
    model = Kokoro(CONFIG, torch.float32, CPU)
    assert isinstance(model, SupportsSpeech)
    model.check_weights(headers)
    model.load_weights(read_checkpoint(tmp_path / "model", model.is_unused))
    assert model.decoder.F0_conv.bias.equal(tensors["decoder.F0_conv.bias"])


def test_factors_of_norms_may_be_absent(tensors, model, hidden, style):
    """They are 1 and 0 then, as in the published class."""
    stored = {name: tensor for name, tensor in tensors.items() if ".norm." not in name}
    filled = {name: torch.full(t.shape, float(name.endswith("weight"))) for name, t in tensors.items() if ".norm." in name}
    plain, same = (Kokoro(CONFIG, torch.float32, CPU) for _ in range(2))
    plain.check_weights(stored)
    plain.load_weights(stored.items())
    same.load_weights((stored | filled).items())
    assert spoken(plain, hidden, style)[1].equal(spoken(same, hidden, style)[1])


def test_broken_checkpoints_and_configs(tensors):
    model = Kokoro(CONFIG, torch.float32, torch.device("meta"))
    with pytest.raises(CheckpointError, match="lacks"):
        model.check_weights({name: t for name, t in tensors.items() if name != "decoder.F0_conv.weight_g"})
    with pytest.raises(CheckpointError, match="unknown"):
        model.check_weights(tensors | {"decoder.other.weight": torch.zeros(1)})
    even = {"resblock_kernel_sizes": [8] * len(CONFIG["istftnet"]["resblock_kernel_sizes"])}
    waves = ({"istftnet": {**CONFIG["istftnet"], **wrong}} for wrong in ({"upsample_rates": [10]}, even))
    for change in ({"hidden_dim": 511}, *waves, {"plbert": None}):
        with pytest.raises(ConfigError):
            Kokoro({**CONFIG, **change}, torch.float32, torch.device("meta"))
