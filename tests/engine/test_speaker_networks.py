"""The networks that tell speakers apart: their layers, and how their files are found and read."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.torch_file import SavedObject, read_saved, saved_tensors
from sensorium.engine.speaker_networks import load_speaker_networks
from sensorium.models.audio.pyannet import pyannet, speaker_sets
from speaker_files import save_networks
from torch.nn import functional as F


@pytest.mark.parametrize("classes", [3, 4, 7])
def test_segmentation_equals_plain_torch(tmp_path: Path, classes: int) -> None:
    plain, _ = save_networks(tmp_path, classes)
    sets = (3, 2) if classes == 7 else (None, None)
    plain.double()
    net = pyannet(plain.state(), 5.0, *sets)
    samples = torch.randn(2, 20_000, dtype=torch.float64) * 0.1
    with torch.inference_mode():
        scores = plain(samples)
    activity = net.activity(samples)
    assert activity.shape == (2, net.num_frames(20_000), net.num_speakers) == (*scores.shape[:2], net.num_speakers)
    expected = speaker_sets(3, 2)[scores.argmax(-1)] if classes == 7 else scores.sigmoid()
    torch.testing.assert_close(activity, expected, atol=1e-9, rtol=1e-9)
    assert scores.std(1).min() > 0.1
    assert classes != 7 or len(set(scores.argmax(-1).flatten().tolist())) > 1


@pytest.mark.parametrize(
    ("classes", "seconds", "speakers", "length"), [(3, 4.0, 3, 4.0), (7, None, 3, 10.0), (7, 2.5, 3, 2.5), (4, None, 4, 5.0)]
)
def test_classes_and_lengths_are_read(
    tmp_path: Path, classes: int, seconds: float | None, speakers: int, length: float
) -> None:
    save_networks(tmp_path, classes, seconds)
    net = load_speaker_networks(tmp_path).segmentation
    assert (net.num_speakers, net.seconds, net.sets is not None) == (speakers, length, classes == 7)


def test_frames_have_the_places_of_their_receptive_fields(tmp_path: Path) -> None:
    save_networks(tmp_path)
    net = load_speaker_networks(tmp_path).segmentation
    assert (net.frame_step, net.first_frame, net.num_frames(80_000), net.num_frames(100)) == (270, 495, 293, 0)
    assert net.num_frames(2 * 495 + 1) == 1
    assert net.num_frames(2 * 495) == 0


def test_sets_of_speakers() -> None:
    assert speaker_sets(3, 2).tolist() == [
        [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1],
    ]  # fmt: skip


def test_voices_equal_plain_torch(tmp_path: Path) -> None:
    _, plain = save_networks(tmp_path)
    encoder = load_speaker_networks(tmp_path).embedding
    frames = [torch.rand(400, 40), torch.rand(50, 40)]
    with torch.inference_mode():
        parts = torch.stack([frames[0][start : start + 160] for start in (0, 80, 160, 240)])
        expected = torch.stack([F.normalize(plain(parts).sum(0), dim=0), plain(frames[1][None, :48])[0]])
    torch.testing.assert_close(encoder.embed(frames), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)


def test_features_equal_librosa(tmp_path: Path) -> None:
    librosa = pytest.importorskip("librosa")
    save_networks(tmp_path)
    samples = torch.randn(16_000) * 0.1
    expected = librosa.feature.melspectrogram(y=samples.numpy(), sr=16_000, n_fft=400, hop_length=160, n_mels=40).T
    features = load_speaker_networks(tmp_path).embedding.features(samples)
    torch.testing.assert_close(features, torch.from_numpy(expected), atol=1e-5, rtol=1e-4)


def test_quiet_speech_has_the_same_voice(tmp_path: Path) -> None:
    save_networks(tmp_path)
    encoder = load_speaker_networks(tmp_path).embedding
    loud = torch.randn(32_000) * 0.02
    voices = encoder.embed([encoder.features(factor * loud) for factor in (1.0, 0.1, 0.01)])
    torch.testing.assert_close(voices[0], voices[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(voices[0], voices[2], atol=1e-4, rtol=1e-4)
    assert encoder.embed([torch.zeros(50, 40)]).isfinite().all()


def test_objects_of_other_classes_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_networks(tmp_path, seconds=4.0)
    file = tmp_path / "segmentation" / "pytorch_model.bin"
    content = read_saved(file, objects=True)
    stored = content["pyannote.audio"]["specifications"]
    assert isinstance(stored, SavedObject)
    assert (stored.name, stored.state["duration"]) == ("speaker_files Specifications", 4.0)
    assert content["callbacks"] == [{"a": (1, 2.5)}]
    with pytest.raises(CheckpointError):
        read_saved(file)
    for old in (True, False):
        torch.save({"a": _Call(), "b": torch.ones(2)}, tmp_path / "call.pt", _use_new_zipfile_serialization=not old)
        called = read_saved(tmp_path / "call.pt", objects=True)
        assert called["a"] == SavedObject("__builtin__ print", ("called",))
        assert called["b"].tolist() == [1, 1]
    assert "called" not in capsys.readouterr().out


class _Call:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("called",)


@pytest.mark.parametrize("old", [False, True])
def test_tensors_that_repeat_few_bytes_have_a_limit(tmp_path: Path, old: bool) -> None:
    value = torch.ones(1)
    for name, count, shape in (("large", 1, (1 << 40,)), ("many", 3, (1 << 25,)), ("small", 3, (1 << 20,))):
        content = {str(number): value.expand(shape) for number in range(count)}
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=not old)
    for name in ("large", "many"):
        with pytest.raises(CheckpointError):
            read_saved(tmp_path / name)
    assert [tensor.shape for tensor in read_saved(tmp_path / "small").values()] == [(1 << 20,)] * 3


def test_mappings_that_contain_themselves_or_repeat_others_are_refused(tmp_path: Path) -> None:
    loop, twice = dict[str, object](), dict[str, object]({"weight": torch.ones(2)})
    loop["again"] = {"loop": loop}
    for _ in range(40):
        twice = {"a": twice, "b": twice}
    for number, content in enumerate((loop, twice)):
        torch.save(content, tmp_path / f"{number}.pth")
        for on_meta in (True, False):
            with pytest.raises(CheckpointError):
                list(saved_tensors(tmp_path / f"{number}.pth", on_meta))
    torch.save({"a": {"b": torch.ones(2)}, "c": {"b": torch.ones(3)}}, tmp_path / "good.pth")
    assert {name: len(tensor) for name, tensor in saved_tensors(tmp_path / "good.pth")} == {"a.b": 2, "c.b": 3}


def test_keys_that_take_without_end_to_hash_are_refused(tmp_path: Path) -> None:
    key: tuple[object, ...] = (None,)
    for _ in range(20):
        key = (key, key)
    torch.save({key: 1}, tmp_path / "file")
    with pytest.raises(CheckpointError):
        read_saved(tmp_path / "file")
    torch.save({("a", 1): 2}, tmp_path / "file")
    assert read_saved(tmp_path / "file") == {("a", 1): 2}


@pytest.mark.parametrize("size", [0, 3, 100, 2_000])
def test_cut_files_are_refused(tmp_path: Path, size: int) -> None:
    save_networks(tmp_path)
    for file in (tmp_path / "segmentation" / "pytorch_model.bin", tmp_path / "embedding" / "pretrained.pt"):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(CheckpointError):
            read_saved(file, objects=True)


def test_weights_that_are_missing_or_of_another_network(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_speaker_networks(tmp_path)
    assert refused.value.info.param == "speaker_model"
    save_networks(tmp_path / "a")
    (tmp_path / "a" / "embedding" / "pretrained.pt").unlink()
    with pytest.raises(ConfigError) as refused:
        load_speaker_networks(tmp_path / "a")
    assert refused.value.info.param == "speaker_model"
    save_networks(tmp_path / "b")
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "b" / "segmentation" / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load_speaker_networks(tmp_path / "b")
    save_networks(tmp_path / "c")
    torch.save({"model_state": 3}, tmp_path / "c" / "embedding" / "pretrained.pt")
    with pytest.raises(CheckpointError):
        load_speaker_networks(tmp_path / "c")
    save_networks(tmp_path / "d", seconds=1000.0)
    with pytest.raises(CheckpointError):
        load_speaker_networks(tmp_path / "d")


@pytest.mark.skipif(bool(find_spec("whisperx") and find_spec("resemblyzer")), reason="the packages are installed")
def test_the_packages_may_be_missing() -> None:
    with pytest.raises(ConfigError) as refused:
        load_speaker_networks(None)
    assert refused.value.info.param == "speaker_model"


def test_weights_in_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_networks(tmp_path / "saved", classes=7)
    for package, inner, part, name in (
        ("whisperx", "assets", "segmentation", "pytorch_model.bin"),
        ("resemblyzer", "", "embedding", "pretrained.pt"),
    ):
        (tmp_path / package / inner).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('it is not imported')")
        (tmp_path / "saved" / part / name).rename(tmp_path / package / inner / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    networks = load_speaker_networks(None)
    assert (networks.segmentation.num_speakers, networks.embedding.dim) == (3, 10)
    assert json.dumps(networks.segmentation.seconds) == "10.0"
