"""Weight uploads to a device that copies late: no buffer is reused before its copy is done, and all data arrives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from measured import held, peak_bytes
from sensorium.checkpoints import weight_files
from sensorium.engine.config import make_config
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.model_source import ModelSource
from sensorium.engine.setup.resolve import load_processing
from sensorium.models import weights
from sensorium.models.layers.linear import Linear
from sensorium.models.upload import Upload, copier
from torch import Tensor

SIZE = 1000  # bytes of a buffer


class Stream:
    """A fake stream that runs queued work only when an event after it is awaited; `waits` counts those waits."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.waits = self.done = 0

    def run_to(self, place: int) -> None:
        self.waits += place > self.done
        while self.done < place:
            self.queue[self.done]()
            self.done += 1


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, 0

    def record(self) -> None:
        self.place = len(self.stream.queue)

    def synchronize(self) -> None:
        self.stream.run_to(self.place)


class Late(Upload):
    def __init__(self, stream: Stream, size: int = SIZE) -> None:
        super().__init__(lambda count: torch.full((count,), 77, dtype=torch.uint8), lambda: Event(stream), size)
        self.stream, self.sizes = stream, []

    def _send(self, target: Tensor, pinned: Tensor) -> None:
        self.sizes.append(pinned.nbytes)
        self.stream.queue.append(lambda: Upload._send(self, target, pinned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (999,), (40, 60), (7, 3, 400), (1, 1, 5000), (2, 3000)])
def test_everything_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stream = Stream()
    copy, source = Late(stream), torch.randn(shape)
    target, other = torch.full(shape, -7, dtype=dtype), torch.zeros(shape)
    copy(target, source)
    copy(other, -source)
    stream.run_to(len(stream.queue))
    assert torch.equal(target, source.to(dtype))
    assert torch.equal(other, -source)
    assert max(copy.sizes) <= SIZE


def test_a_buffer_is_filled_while_the_other_is_read() -> None:
    """The host is one piece ahead: it waits only for the copy before the previous one."""
    stream = Stream()
    copy, source, target = Late(stream), torch.randn(10, 250), torch.zeros(10, 250)
    copy(target, source)
    assert copy.sizes == [SIZE] * 10
    assert (stream.waits, stream.done) == (8, 8)
    assert torch.equal(target[:8], source[:8])
    assert not target[8:].any()


def test_views_of_any_stride_are_filled() -> None:
    stream = Stream()
    copy, whole, source = Late(stream), torch.zeros(40, 90), torch.randn(30, 40).T
    copy(whole[:, 20:50], source)
    stream.run_to(len(stream.queue))
    assert torch.equal(whole[:, 20:50], source)
    assert not whole[:, :20].any()
    assert not whole[:, 50:].any()


def test_a_cpu_copies_at_once() -> None:
    assert copier(torch.device("cpu")) is Tensor.copy_


def test_what_is_on_the_device_is_copied_there() -> None:
    copy, target = Late(Stream()), torch.empty(4, device="meta")
    copy(target, torch.ones(4, device="meta"))
    assert not copy.sizes


def test_a_model_filled_by_late_copies_is_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are packed on the device after their copies; packing too early would change the result."""
    source = source_of(checkpoint)
    expected, stream, found = source.build_on_device(), Stream(), source.build_on_device()
    source.load_weights(expected)
    pack = Linear.pack

    def pack_in_order(layer: Linear) -> None:
        stream.queue.append(lambda: pack(layer))
        stream.run_to(len(stream.queue))

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "pack", pack_in_order)
        patch.setattr(weights, "copier", lambda device: Late(stream))
        source.load_weights(found)
    stream.run_to(len(stream.queue))
    rows = torch.randn(3, expected.hidden_size)
    assert torch.equal(found.compute_logits(rows), expected.compute_logits(rows))
    for name, parameter in flat(expected).items():
        assert torch.equal(flat(found)[name], parameter), name


def test_loading_on_a_cpu_holds_one_layer_twice(checkpoint: Path) -> None:
    """The peak is the loaded model plus one layer before packing and the tensor being read."""
    source = source_of(checkpoint)
    model, shapes = source.build_on_device(), {name: tensor.shape for name, tensor in weight_files.read_checkpoint(checkpoint)}
    layer = max(sum(view.nbytes for view in views.values()) for _, views in weights.named_layers(model).values())
    tensor = max(4 * shape.numel() for shape in shapes.values())
    source.load_weights(model)

    def load_zeros() -> None:
        source.build_on_device().load_weights((name, torch.zeros(shape)) for name, shape in shapes.items())

    peak = peak_bytes(load_zeros)
    assert held(model) < peak <= held(model) + layer + tensor + (64 << 10)


def source_of(folder: Path) -> ModelSource:
    files = load_model_files(folder)
    return ModelSource(make_config(folder, {}), files, load_processing(files, {}))


def flat(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
