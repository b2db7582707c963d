"""The C++ kernel of low-rank adapters against torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from sensorium.kernels import native
from sensorium.kernels.linear.panels import pad_outputs
from sensorium.kernels.low_rank import PANEL, LowRankWeights, pack_up
from sensorium.kernels.low_rank.native import AdapterTable, StepTable
from torch import Tensor

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the C++ kernels")
Rows = Tensor | None


def weights(
    seed: int, inputs: int, shards: Sequence[tuple[int, int]], dtype: torch.dtype, gained: bool = False
) -> LowRankWeights:
    """Return random weights. `shards`: rank and outputs of each."""
    made, ups, at, out = torch.Generator().manual_seed(seed), [], 0, 0
    for rank, outputs in shards:
        up = torch.randn(outputs, rank, generator=made).to(dtype)
        ups.append((slice(at, at := at + rank), slice(out, out := out + outputs), pack_up(up)))
    gains = (
        {0: tuple(pad_outputs(torch.rand(shards[0][1], generator=made).to(dtype), PANEL) for _ in range(2))} if gained else {}
    )
    return LowRankWeights((torch.randn(at, inputs, generator=made) / inputs**0.5).to(dtype), ups, gains)


def table_of(products: Mapping[int, LowRankWeights], num_layers: int) -> AdapterTable:
    table = AdapterTable(num_layers, 1 << 20)
    for number, some in sorted(products.items()):
        table.add(number, some)
    return table


def run(out: Tensor, x: Tensor, groups: Sequence[tuple[Rows, LowRankWeights]]) -> Tensor:
    """Return what the kernel makes of `out`, as layer 1 of 3."""
    table, changed = StepTable(), out.clone()
    table.write([(rows, table_of({1: some}, 3)) for rows, some in groups])
    table.add_(changed, x, 1)
    before = changed.clone()
    table.add_(changed, x, 0)  # which no adapter changes
    table.write([])
    assert table.is_empty
    table.add_(changed, x, 1)
    assert torch.equal(changed, before)
    return changed


def oracle(out: Tensor, x: Tensor, groups: Sequence[tuple[Rows, LowRankWeights]]) -> Tensor:
    expected = out.double()
    for rows, some in groups:
        rows = torch.arange(len(x)) if rows is None else rows
        low = x[rows].double() @ some.down.double().T
        for shard, (ranks, outputs, up) in enumerate(some.ups):
            part = expected[rows, outputs]
            if shard in some.gains:
                gain, shift = some.gains[shard]
                part = part * gain[: part.shape[1]].double() + shift[: part.shape[1]].double()
            matrix = up.double().transpose(1, 2).flatten(0, 1)[: outputs.stop - outputs.start]
            expected[rows, outputs] = part + low[:, ranks] @ matrix.T
    return expected


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["base", "avx2", "avx512", "avx512_bf16"])
def level(request: pytest.FixtureRequest) -> object:
    library = native.library()
    assert library is not None
    if request.param not in native.supported(library):
        pytest.skip(f"this CPU has no {request.param}")
    before = native.set_level(library, native.LEVELS[request.param])
    yield
    native.set_level(library, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("inputs", "shards"), [(64, [(4, 48), (7, 33)]), (37, [(1, 5)]), (768, [(16, 768), (16, 128)]), (16, [(3, 1025)])]
)
def test_rows_get_their_own_adapter(level: object, dtype: torch.dtype, inputs: int, shards: list[tuple[int, int]]) -> None:
    made, outputs = torch.Generator().manual_seed(0), sum(outputs for _, outputs in shards) + 3
    x = torch.randn(23, inputs, generator=made).to(dtype)
    out = torch.randn(23, outputs, generator=made).to(dtype)
    first, second = (weights(seed, inputs, shards, dtype, gained=seed == 2) for seed in (1, 2))
    order = torch.randperm(23, generator=made)
    mixed = [(order[:9].clone(), first), (order[9:11].clone(), second), (order[11:12].clone(), first)]
    for groups in (mixed, [(None, second)], [(order[:4].clone(), first), (order[:0].clone(), second)]):
        got, expected = run(out, x, groups), oracle(out, x, groups)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
        untouched = torch.ones(23, dtype=torch.bool)
        for rows, _ in groups:
            untouched[slice(None) if rows is None else rows] = False
        assert torch.equal(got[untouched], out[untouched])
        assert torch.equal(got[:, -3:], out[:, -3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_other_rows(level: object, dtype: torch.dtype) -> None:
    made, shards = torch.Generator().manual_seed(0), [(5, 40), (8, 600)]
    x, out = (torch.randn(70, width, generator=made).to(dtype) for width in (100, 640))
    some, other = weights(1, 100, shards, dtype), weights(2, 100, [(2, 640)], dtype)
    whole = run(out, x, [(None, some)])
    for count in (1, 2, 4, 5, 69):
        rows = torch.randperm(70, generator=made)
        part = run(out, x, [(rows[:count].clone(), some), (rows[count:].clone(), other)])
        assert torch.equal(part[rows[:count]], whole[rows[:count]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 8, 40])
def test_bits_do_not_depend_on_the_number_of_threads(
    level: object, dtype: torch.dtype, count: int, threads: Callable[[int], None]
) -> None:
    """Few rows are divided among threads by ranks and outputs, many by rows."""
    shards = [(19, 1100), (4, 37)]
    x, out = torch.randn(count, 70).to(dtype), torch.randn(count, 1137).to(dtype)
    groups = [(torch.arange(count)[part::2].clone(), weights(part, 70, shards, dtype)) for part in (0, 1)]
    threads(1)
    alone = run(out, x, groups)
    for number in (2, 3, 16):
        threads(number)
        for _ in range(20):
            assert torch.equal(run(out, x, groups), alone)


def test_an_adapter_lies_in_one_piece_of_memory() -> None:
    """Its layers are in order, so that a step reads it from the beginning to the end."""
    products = {number: weights(number, 64, [(4, 48), (8, 32)], torch.bfloat16, gained=True) for number in (2, 0, 1)}
    table = table_of(products, 3)
    downs = table.layers[:, 0].tolist()
    bytes_of_layer = 2 * (12 * 64 + 4 * 48 + 8 * 32 + 2 * 48)
    assert [down - downs[0] for down in downs] == [0, bytes_of_layer, 2 * bytes_of_layer]


def test_strided_rows(level: object) -> None:
    wide_x, wide_out = torch.randn(6, 200), torch.randn(6, 300)
    some = weights(1, 64, [(4, 100)], torch.float32)
    got = run(wide_out[:, 50:170], wide_x[:, 10:74], [(None, some)])
    assert torch.equal(got, run(wide_out[:, 50:170].contiguous(), wide_x[:, 10:74].contiguous(), [(None, some)]))


def test_inputs_may_be_columns(level: object) -> None:
    x, out, some = torch.randn(64, 6), torch.randn(6, 100), weights(1, 64, [(4, 100)], torch.float32)
    assert torch.equal(run(out, x.T, [(None, some)]), run(out, x.T.contiguous(), [(None, some)]))


def test_a_table_grows_with_the_adapters_of_a_step(level: object) -> None:
    """Its address is the same until then, so that recorded calls find it."""
    x, out, table = torch.randn(150, 32), torch.randn(150, 48), StepTable()
    adapters = [table_of({0: weights(seed, 32, [(2, 48)], torch.float32)}, 1) for seed in range(150)]
    address = table.address
    table.write([(torch.tensor([row]), adapters[row]) for row in range(60)])
    assert table.address == address
    table.write([(torch.tensor([row]), adapters[row]) for row in range(150)])
    assert table.address != address
    got = out.clone()
    table.add_(got, x, 0)
    for row in (0, 77, 149):
        some = weights(row, 32, [(2, 48)], torch.float32)
        assert torch.equal(got[row], run(out, x, [(None, some)])[row])
