"""Linear layers with packed weights: a row's bits do not depend on the batch, int8 stays within its error bound."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu import PRODUCTS, needs_int8, running_with
from sensorium.kernels import native
from sensorium.kernels.backends import has_triton
from sensorium.kernels.dispatch import backend, multiplies_fast
from sensorium.kernels.linear import LinearWeight, dense, fp8, grouped, grouped_linear, int8, linear, mkl, pack, panels
from sensorium.kernels.linear.dense import DenseWeight, OneDnnWeight, computed_rows, padded_rows
from sensorium.kernels.linear.eight_bit import INT8_MAX, Int8Weight
from sensorium.kernels.linear.int8 import int8_linear, pack_int8, quantize_rows, supported
from sensorium.kernels.linear.panels import Panels, layout, read_panel_rows, to_panels
from sensorium.models.memory_formulas import packed_weight_bytes
from torch.nn import functional as F

CPU = torch.device("cpu")
SHAPES = [(768, 1024), (768, 4096), (2048, 768), (512, 1536), (512, 2816), (1408, 512), (1176, 512), (33, 48)]  # (in, out)
ROWS = (1, 2, 3, 5, 7, 9, 11, 12, 15, 16, 17, 31, 33, 64, 100, 257)


@pytest.fixture(params=["best", *PRODUCTS])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with the default kernels, and with the C++ products of each instruction set that this CPU has."""
    if request.param == "best":
        yield
    else:
        with running_with(request.param):
            yield


def weights(form: str, size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> LinearWeight:
    weight, bias = (torch.randn(size[::-1]) / size[0] ** 0.5).to(dtype), torch.randn(size[1]).to(dtype)
    if form == "plain":
        return DenseWeight(weight, bias)
    if form == "onednn":
        monkeypatch.setenv("SENSORIUM_KERNELS", "linear=onednn")
    return pack(weight, bias, "int8" if form == "int8" else None)


def check_rows_do_not_see_each_other(packed: LinearWeight, inputs: int, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    """Compare all rows at once with their first rows, single rows and permuted rows."""
    x = torch.randn(max(counts), inputs).to(dtype)
    whole = linear(x, packed)
    assert [n for n in counts if not torch.equal(linear(x[:n], packed), whole[:n])] == []
    assert [i for i in range(0, len(x), 37) if not torch.equal(linear(x[i : i + 1], packed), whole[i : i + 1])] == []
    order = torch.randperm(len(x))
    assert torch.equal(linear(x[order], packed), whole[order])


@pytest.mark.parametrize("form", ["default", "onednn", "plain", pytest.param("int8", marks=needs_int8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SHAPES[1::3] + SHAPES[-1:])
@pytest.mark.usefixtures("instructions")
def test_rows_do_not_see_each_other(
    form: str, size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows_do_not_see_each_other(weights(form, size, dtype, monkeypatch), size[0], dtype, ROWS)


def test_pieces_for_intel_cpus_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mkl, dense, grouped_linear, fp8):
        monkeypatch.setattr(module, "needs_pieces", lambda: True, raising=False)
    multiplied: list[int] = []
    product = F.linear
    monkeypatch.setattr(mkl.F, "linear", lambda x, *rest: multiplied.append(len(x)) or product(x, *rest))
    weight, bias = torch.randn(70, 33), torch.randn(70)
    forms = [DenseWeight(weight, bias), fp8.pack_fp8(weight, bias), grouped_weight(weight, bias)]
    for packed in forms:
        check_rows_do_not_see_each_other(packed, 33, torch.float32, ROWS)
    assert set(multiplied) == {mkl.PIECE_ROWS}
    x = torch.randn(100, 33)
    torch.testing.assert_close(linear(x, forms[0]), product(x, weight, bias))
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=torch")
    assert computed_rows(100, CPU, torch.float32) == 4 * mkl.PIECE_ROWS  # three pieces, and the result of one


def grouped_weight(weight: torch.Tensor, bias: torch.Tensor) -> grouped.ShardedWeight:
    """Return codes of 8 bits with a scale per output."""
    codes = (weight * 16).round().clamp(-127, 127).to(torch.int8)
    scale = torch.full((len(weight), 1), 1 / 16)
    return grouped.ShardedWeight([grouped.GroupedWeight(codes, scale, weight.shape[1], weight.shape[1])], bias)


@pytest.mark.full
@pytest.mark.parametrize("form", ["default", "onednn", "plain", pytest.param("int8", marks=needs_int8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*SHAPES, (512, 32000)])
@pytest.mark.usefixtures("instructions")
def test_rows_do_not_see_each_other_at_any_count(
    form: str, size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tuple(range(1, 601)) if size[1] < 10000 else ROWS
    check_rows_do_not_see_each_other(weights(form, size, dtype, monkeypatch), size[0], dtype, counts)


@pytest.mark.parametrize("inputs", [2, 34, 1176, 4104])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_give_the_bits_of_vectors(inputs: int, dtype: torch.dtype) -> None:
    """AMX and AVX-512 agree on every bit of int8; 600 rows are several chunks, 4,104 inputs several passes over the sums."""
    weight, bias, x = torch.randn(600, inputs).to(dtype), torch.randn(600).to(dtype), torch.randn(600, inputs).to(dtype)
    results = []
    for instructions in ("amx", "avx512_vnni"):
        with running_with(instructions):
            results.append(linear(x, pack(weight, bias, "int8")))
    assert torch.equal(*results)


@pytest.mark.parametrize("inputs", [2, 34, 1176, 4104])
def test_tiles_multiply_bfloat16(inputs: int) -> None:
    """Products of bfloat16 with AMX equal those in float64, up to the rounding of the result."""
    weight, x = (torch.randn(600, inputs) / inputs**0.5).bfloat16(), torch.randn(600, inputs).bfloat16()
    with running_with("amx"):
        packed = pack(weight, None)
        torch.testing.assert_close(linear(x, packed).double(), x.double() @ weight.double().T, rtol=5e-3, atol=1e-4)
        check_rows_do_not_see_each_other(packed, inputs, torch.bfloat16, (1, 16, 17, 33, 256, 257, 600))


@pytest.mark.parametrize("level", ["avx2", "avx512", "avx512_bf16", "neon"])
def test_kernels_multiply_on_every_cpu_with_vectors(level: str) -> None:
    with running_with(level):
        assert backend("linear", CPU, torch.float32) == "native"


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("int8", [pytest.param(True, marks=needs_int8), False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(int8: bool, dtype: torch.dtype) -> None:
    packed = pack(torch.randn(75, 34).to(dtype), None, "int8" if int8 else None)
    assert linear(torch.empty(0, 34, dtype=dtype), packed).shape == (0, 75)


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("inputs", [33, 34, 130])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.usefixtures("instructions")
def test_packed_linear(
    rows: int, inputs: int, bias: bool, dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error stays below `limit` times the largest output."""
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(75, inputs).to(dtype)
    b = torch.randn(75).to(dtype) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    forms = [pack(weight, b), DenseWeight(weight, b)]
    if backend("linear", CPU, dtype) == "native":
        monkeypatch.setenv("SENSORIUM_KERNELS", "linear=onednn")
        forms.append(pack(weight, b))
        assert isinstance(forms[0], Panels) == (inputs % layout(dtype).inputs == 0)
    for packed in forms:
        out = linear(x, packed)
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [pytest.param(True, marks=needs_int8), False])
@pytest.mark.parametrize("size", [(34, 75), (64, 64), (33, 48)])
def test_bytes_of_a_packed_weight(size: tuple[int, int], int8: bool, dtype: torch.dtype) -> None:
    packed = pack(torch.randn(size[::-1]).to(dtype), None, "int8" if int8 else None)
    held = [value for value in vars(packed).values() if isinstance(value, torch.Tensor)]
    expected = packed_weight_bytes(*size, False, dtype, CPU, "int8" if int8 else None)
    assert sum(value.nbytes for value in held) == expected


def test_quantised_rows() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    rows, scale = quantize_rows(x)
    assert rows.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert scale[0].item() == pytest.approx(2 / INT8_MAX)


@needs_int8
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(768, 100), (33, 48), (1176, 512)])
@pytest.mark.usefixtures("instructions")
def test_int8_error_bound(rows: int, dtype: torch.dtype, bias: bool, size: tuple[int, int]) -> None:
    """The error of a sum of n products is at most n * (a/2 * max|w| + b/2 * max|x| + a*b/4), rounded once more.

    a and b are the quantisation steps of the row and of the output; each value is off by half a step at most.
    """
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size[0]).to(dtype), torch.randn(size[::-1]).to(dtype)
    b = torch.randn(size[1]).to(dtype) if bias else None
    packed = pack(weight, b, "int8")
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    out = linear(x, packed)
    assert out.dtype == dtype
    most_x, most_w = x.double().abs().amax(1, keepdim=True), weight.double().abs().amax(1)
    bound = size[0] * most_x * most_w * (1 / INT8_MAX + 1 / (4 * INT8_MAX**2))
    error = (out.double() - expected).abs()
    assert (error <= bound + torch.finfo(dtype).eps * expected.abs() + 1e-5).all()
    assert error.square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()  # rounding errors cancel: about 1 %


@needs_int8
@pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(3, 5), (33, 48), (768, 100), (1176, 512)])
@pytest.mark.usefixtures("instructions")
def test_the_kernel_gives_the_bits_of_the_reference(
    dtype: torch.dtype, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(size[::-1]).to(dtype), torch.randn(size[1]).to(dtype)
    fast = pack_int8(weight, bias)
    monkeypatch.setenv("SENSORIUM_KERNELS", "int8_linear=torch")
    slow = pack_int8(weight, bias)
    assert (type(fast), type(slow)) == (Panels, Int8Weight)
    for rows in (*range(1, 26), 95, 97, 200):
        x = torch.randn(rows, size[0]).to(dtype) * 3
        x[rows // 2] *= rows > 4  # a row of zeros
        assert torch.equal(int8_linear(x, fast), int8_linear(x, slow)), rows


@needs_int8
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", ["", "int8_linear=torch"])
@pytest.mark.usefixtures("instructions")
def test_int8_hides_no_broken_row(value: float, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_KERNELS", backend)
    packed, x = pack_int8(torch.randn(8, 40), None), torch.randn(3, 40)
    x[1, 7] = value
    assert int8_linear(x, packed).isfinite().all(1).tolist() == [True, False, True]


@needs_int8
@pytest.mark.usefixtures("instructions")
def test_int8_gives_integers_exactly() -> None:
    """Integers up to 127 are their own quantised form, so the product is exact."""
    x, weight = torch.randint(-127, 128, (9, 65)).float(), torch.randint(-127, 128, (17, 65)).float()
    x[:, 0], weight[:, 0] = 127, -127
    assert torch.equal(int8_linear(x, pack_int8(weight, None)), x @ weight.T)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_avx2_widens_bfloat16_and_sums_in_float32(rows: int) -> None:
    """`dtype="auto"` therefore stays bfloat16 there. The result is the exact product, rounded once."""
    with running_with("avx2"):
        assert multiplies_fast(torch.bfloat16)
        x, weight = torch.randn(rows, 4096).bfloat16(), (torch.randn(80, 4096) / 64).bfloat16()
        packed = pack(weight, None)
        assert isinstance(packed, Panels)
        assert (packed.form.kernel, packed.weight.dtype) == ("avx2", torch.bfloat16)
        exact = x.double() @ weight.double().T
        assert ((linear(x, packed).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_int8_wants_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported(torch.device("cuda")) == has_triton()
    assert not supported(torch.device("xpu"))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with running_with("avx2"):
        assert supported(CPU)
    with running_with("base"):
        assert not supported(CPU)


def test_onednn_packs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=torch")
    assert isinstance(pack(torch.randn(4, 4), None), DenseWeight)
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=onednn")
    assert isinstance(pack(torch.randn(4, 4), None), OneDnnWeight)


def test_few_numbers_of_rows_reach_onednn() -> None:
    made = [padded_rows(rows) for rows in range(1, 4097)]
    assert made[:16] == [2, *range(2, 17)]
    assert all(rows <= more <= max(2, rows * 1.125) for rows, more in enumerate(made, 1))
    assert len(set(made)) < 80


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs huge pages")
def test_weights_of_a_model_lie_together_and_beside_those_of_no_other_thread():
    weights = [torch.randn(100, 50).bfloat16() for _ in range(3)]
    first, second = (to_panels(weight) for weight in weights[:2])
    with ThreadPoolExecutor(1) as other:
        third = other.submit(to_panels, weights[2]).result()
    size = first.numel() * first.itemsize
    assert size <= second.data_ptr() - first.data_ptr() < size + 64
    assert not 0 <= third.data_ptr() - first.data_ptr() < 64 << 20
    for weight, packed in zip(weights, (first, second, third), strict=True):
        assert torch.equal(read_panel_rows(packed, torch.arange(100)), weight)
        assert packed.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize("name", sorted(panels._LAYOUTS))
def test_a_weight_in_pieces_is_packed_as_a_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Large weights are quantised and reordered piece by piece, so that no copy of them is made."""
    monkeypatch.setattr(native, "products", lambda: name)
    weight = torch.randn(300, 130)
    packed = [to_panels(weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    quantised = pack_int8(weight.bfloat16(), None)
    monkeypatch.setattr(panels, "_PIECE", 1 << 14)
    monkeypatch.setattr(int8, "_PIECE", 1 << 12)
    for whole in packed:
        assert torch.equal(to_panels(weight.to(whole.dtype)), whole)
    again = pack_int8(weight.bfloat16(), None)
    assert torch.equal(again.weight, quantised.weight)
    assert torch.equal(again.scale, quantised.scale)
