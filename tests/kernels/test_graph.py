"""Recorded forwards: a replay gives the bits of running again; what cannot be replayed is noticed."""

from typing import Any

import pytest
import torch
from sensorium.kernels import native
from sensorium.kernels.activation import gated
from sensorium.kernels.graph import Watched, capture
from sensorium.kernels.linear import Weights, linear, pack
from sensorium.kernels.norm import rms_norm
from torch import Tensor
from torch.nn import functional as F

needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def weights(dtype: torch.dtype, layers: int) -> list[tuple[Tensor, Weights, Weights]]:
    torch.manual_seed(0)
    made = []
    for _ in range(layers):
        up, down = torch.randn(96, 32, dtype=dtype) / 6, torch.randn(32, 48, dtype=dtype) / 6
        made.append((torch.rand(32, dtype=dtype), pack(up, None), pack(down, torch.ones(32, dtype=dtype))))
    return made


def stack(ids: Tensor, table: Tensor, layers: list[tuple[Tensor, Weights, Weights]]) -> Tensor:
    """Operators of torch, views, kernels, and a residual stream that is written in place."""
    x = F.embedding(ids, table) * 2
    add = None
    for norm, up, down in layers:
        add = linear(gated("silu", linear(rms_norm(x, norm, 1e-5, add), up)), down).view(-1, 4, 8).flatten(1)
    return rms_norm(x, layers[0][0], 1e-5, add)


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_replay_gives_the_same_bits(dtype: torch.dtype, rows: int) -> None:
    layers, table, ids = weights(dtype, 5), torch.randn(11, 32, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    result, graph = capture(lambda: stack(ids, table, layers))
    assert graph is not None
    assert torch.equal(result, stack(ids, table, layers)), "recording is running"
    for turn in range(4):
        ids.copy_((torch.arange(rows) * 3 + turn) % 11)
        expected = stack(ids.clone(), table, layers)
        noise = [torch.full((rows, width), torch.nan, dtype=dtype) for width in (32, 48, 96)]  # others allocate meanwhile
        assert torch.equal(graph.replay(), expected)
        assert all(values.isnan().all() for values in noise)


@needs_library
def test_layers_share_memory() -> None:
    def held(layers: int) -> int:
        given = weights(torch.bfloat16, layers)
        _, graph = capture(lambda: stack(torch.arange(4), torch.ones(11, 32, dtype=torch.bfloat16), given))
        assert graph is not None
        weight = {id(t) for norm, up, down in given for t in (norm, *vars(up).values(), *vars(down).values())}
        kept = [memory for memory in graph._memory if id(memory) not in weight]
        return sum(memory.untyped_storage().nbytes() for memory in kept)  # type: ignore[attr-defined]

    assert held(12) == held(3)


def test_weights_live_as_long_as_their_graph() -> None:
    layers, table, ids = weights(torch.float32, 2), torch.randn(11, 32), torch.arange(3)
    expected = stack(ids, table, layers)
    _, graph = capture(lambda: stack(ids, table, layers))
    layers.clear()
    noise = [torch.full((96, 32), torch.nan) for _ in range(64)]
    assert graph is not None
    assert torch.equal(graph.replay(), expected)
    assert len(noise) == 64


X = torch.arange(6.0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda: X * X.sum().item(),
        lambda: X if (X > 3).any() else X + 1,
        lambda: X[X > 3],
        lambda: X.nonzero(),
        lambda: X + len(X.tolist()),
        lambda: X + torch.from_numpy(X.numpy()),
        lambda: X + torch.rand(6),
        lambda: F.dropout(X, 0.5),
    ],
    ids=["item", "bool", "mask", "nonzero", "tolist", "numpy", "random", "dropout"],
)
def test_what_depends_on_the_numbers_has_no_graph(forward: Any) -> None:
    torch.manual_seed(0)
    expected = forward()
    torch.manual_seed(0)
    result, graph = capture(forward)
    assert torch.equal(result, expected)
    assert graph is None


@pytest.mark.parametrize("read", [max, sum, lambda v: v[0], lambda v: torch.tensor(v)[1]], ids=["max", "sum", "item", "tensor"])
def test_watched_numbers_have_no_graph_once_they_are_read(read: Any) -> None:
    watched = Watched((3, 5))
    assert capture(lambda: X * len(watched), [watched])[1] is not None
    assert capture(lambda: X * read(watched), [watched])[1] is None


def test_an_error_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError):
        capture(lambda: X / (1 // 0))
    seen = []
    with native.recording(lambda call, tensors: seen.append(call)):
        gated("silu", torch.ones(2, 4))
    gated("silu", torch.ones(2, 4))
    assert len(seen) == (native.library() is not None)
