"""Bodies of products are chosen by measured rates, which are kept; the choice holds for any number of rows."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cpu import PRODUCTS
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import EngineConfig
from sensorium.kernels import bodies, dispatch, kept, measure, native
from sensorium.kernels.linear import groups, linear, pack
from sensorium.kernels.linear.dense import DenseWeight
from sensorium.kernels.linear.eight_bit import Int8Weight
from sensorium.kernels.linear.panels import layout
from sensorium.models.memory_formulas import amx_bytes

CPU = torch.device("cpu")
EPYC = ["base", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
XEON = ["base", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
ROWS = ("16", "1", "96")
Pretend = Callable[[list[str], dict[str, bodies.Rates]], list[int]]


def rates(**by_body: tuple[float, ...]) -> bodies.Rates:
    return {name: dict(zip(ROWS, values, strict=False)) for name, values in by_body.items()}


chooses = pytest.mark.skipif(
    native.products() is None or os.environ.get("SENSORIUM_CPU") == "avx2",
    reason="needs the C++ products with the newest instruction set of this CPU",
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices are made in the test, and forgotten after it."""
    monkeypatch.delenv("SENSORIUM_CPU", raising=False)
    library, level = native.library(), 0
    if library is not None:
        level = native._variable(library, "level").value
    bodies._choices.cache_clear()
    dispatch._choose_backend.cache_clear()
    yield
    monkeypatch.undo()
    if library is not None:
        native.set_level(library, level)
    bodies._choices.cache_clear()
    dispatch._choose_backend.cache_clear()


@pytest.fixture
def pretend(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Choose as on a CPU with these instruction sets and rates. Returns the levels that are set for attention."""

    def pretend(supported: list[str], measured: dict[str, bodies.Rates]) -> list[int]:
        levels: list[int] = []

        def measured_rates(several: dict[str, list[str]]) -> dict[str, bodies.Rates]:
            even = {op: {name: dict.fromkeys(ROWS, 1.0) for name in names} for op, names in several.items()}
            return even | measured

        monkeypatch.setattr(native, "library", lambda: ctypes.CDLL(None))
        monkeypatch.setattr(native, "supported", lambda library: supported)
        monkeypatch.setattr(native, "products", lambda: supported[-1])
        monkeypatch.setattr(native, "set_level", lambda library, level: levels.append(level))
        monkeypatch.setattr(bodies, "measured_rates", measured_rates)
        return levels

    return pretend


def test_the_fastest_body_is_chosen() -> None:
    slow_pairs = rates(avx512_bf16=(80, 12, 86), avx512=(120, 12, 164), torch=(70,))
    fast_pairs = rates(avx512_bf16=(150, 12, 180), avx512=(75, 12, 90), torch=(100, 9, 140))
    assert bodies.choose(slow_pairs) == "avx512"
    assert bodies.choose(fast_pairs) == "avx512_bf16"
    assert bodies.choose(rates(avx2=(50, 10, 60), torch=(54, 10, 65))) == "avx2", "a small difference is noise"
    assert bodies.choose(rates(avx2=(50, 10, 60), torch=(90,))) == "avx2", "a body that was not measured whole is not chosen"


def test_bodies_of_other_cpus() -> None:
    epyc, xeon = measure.candidates(EPYC), measure.candidates(XEON)
    assert [name for name in epyc["linear_bfloat16"] if name not in ("onednn", "torch")] == ["avx512_bf16", "avx512", "avx2"]
    assert epyc["linear_float32"] == ["avx512", "avx2", "onednn", "torch"]
    assert epyc["linear_int8"] == ["avx512_vnni", "avx512", "avx2", "torch"]
    assert epyc["attention_bfloat16"] == ["avx512_bf16", "avx512"]
    assert xeon["linear_int8"][:2] == ["amx", "avx512_vnni"]
    assert xeon["linear_int4"] == ["amx", "avx512_bf16", "avx512_vnni"]
    assert xeon["attention_bfloat16"] == ["amx", "avx512_bf16", "avx512"]
    assert measure.candidates(["base", "neon", "neon_dot"])["linear_int8"] == ["neon_dot", "neon", "torch"]


def test_bfloat16_is_widened_where_pairs_are_slow(pretend: Pretend) -> None:
    """A CPU with AVX512_BF16 whose pairs take twice the time: products and attention widen, int8 keeps its dot products."""
    slow_pairs = rates(avx512_bf16=(80, 12, 86), avx512=(120, 12, 164), avx2=(60, 12, 80), torch=(70,))
    levels = pretend(EPYC, {"linear_bfloat16": slow_pairs, "attention_bfloat16": rates(avx512_bf16=(70,), avx512=(126,))})
    form = layout(torch.bfloat16)
    assert (form.kernel, form.inputs, form.lanes) == ("avx512", 1, 16)
    assert layout(torch.int8).kernel == "avx512_vnni"
    assert layout(torch.float16).kernel == "avx512"
    assert levels == [native.LEVELS["avx512"]] == [2], "attention in bfloat16 without pairs"
    assert not dispatch.multiplies_pairs()
    assert groups._kernel() == "avx512_bf16"
    assert "linear_bfloat16=avx512" in bodies.bodies_in_use()
    assert bodies.choices("avx512_bf16")["linear_bfloat16"].reason == (
        "avx512_bf16 80/12/86, avx512 120/12/164, avx2 60/12/80, torch 70 GFLOP/s with 16/1/96 rows"
    )


def test_pairs_and_tiles_stay_where_they_are_fast(pretend: Pretend) -> None:
    levels = pretend(XEON, {"linear_bfloat16": rates(amx=(500, 12, 900), avx512_bf16=(80, 12, 86), avx512=(120, 12, 164))})
    assert layout(torch.bfloat16).kernel == "amx"
    assert dispatch.multiplies_pairs()
    assert levels == [native.LEVELS["amx"]]
    assert amx_bytes(1, False) > 0


def test_tiles_that_no_product_uses_take_no_memory(pretend: Pretend) -> None:
    others = {"linear_bfloat16": "avx512_bf16", "linear_int8": "avx512_vnni", "linear_int4": "avx512_vnni"}
    pretend(XEON, {op: rates(amx=(1, 1, 1), **{name: (2, 2, 2)}) for op, name in others.items()})
    assert {op: bodies.body(op) for op in others} == others
    assert amx_bytes(1, True) == 0


@pytest.mark.parametrize("supported", [EPYC, XEON, XEON[:3], EPYC[:2], ["base"], ["base", "neon"]])
def test_the_bodies_in_use_are_a_setting_that_chooses_them_again(
    supported: list[str], pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(supported, {})
    before = bodies.bodies_in_use()
    monkeypatch.setenv("SENSORIUM_CPU", ",".join(before))
    monkeypatch.setattr(bodies, "measured_rates", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bodies.bodies_in_use() == before


@pytest.mark.skipif(native.products() is None, reason="needs the C++ products")
def test_torch_multiplies_where_it_is_faster(pretend: Pretend) -> None:
    """Weights are packed for torch then, and a row has the same bits in every batch."""
    name, half = str(native.products()), {"linear_int8": "torch", "linear_float32": "torch", "linear_bfloat16": "torch"}
    pretend([name], {op: {name: {"16": 1.0}, best: {"16": 2.0}} for op, best in half.items()})
    x = torch.randn(33, 64)
    for dtype, quantization, kind in (
        (torch.float32, None, DenseWeight),
        (torch.bfloat16, None, DenseWeight),
        (torch.bfloat16, "int8", Int8Weight),
    ):
        weight = pack(torch.randn(48, 64).to(dtype), None, quantization)
        assert isinstance(weight, kind)
        whole = linear(x.to(dtype), weight)
        for rows in (1, 2, 7, 16):
            assert torch.equal(linear(x[:rows].to(dtype), weight), whole[:rows])


@chooses
def test_one_op_may_be_set(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SENSORIUM_CPU", "linear_bfloat16=torch")
    assert isinstance(pack(torch.randn(64, 64).bfloat16(), None), DenseWeight)
    assert bodies.choices(str(native.products()))["linear_bfloat16"].reason == "set by SENSORIUM_CPU"
    bodies._choices.cache_clear()
    lacking = "neon" if "avx2" in native.supported(native.library()) else "avx2"
    monkeypatch.setenv("SENSORIUM_CPU", f"linear_int8={lacking}")
    with pytest.warns(RuntimeWarning, match=rf"SENSORIUM_CPU=linear_int8={lacking} is ignored: this CPU has"):
        assert bodies.body("linear_int8") != lacking


@pytest.mark.parametrize("text", ["linear=avx2", "linear_int8=avx1024", "linear_int8=avx2,", "=", "linear_int8=avx2=avx2"])
def test_a_wrong_setting_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_CPU", text)
    with pytest.raises(ConfigError) as raised:
        EngineConfig("")
    assert raised.value.info.param == "SENSORIUM_CPU"


def test_nothing_is_measured_if_a_set_is_named(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "measured_rates", lambda several: pytest.fail("measured"))
    for name in ("newest", *PRODUCTS):
        monkeypatch.setenv("SENSORIUM_CPU", name)
        assert not bodies.may_measure()
        assert set(bodies.bodies_in_use()) == {f"{op}={native.products()}" for op in bodies.OPS if native.products()}


@chooses
def test_rates_are_measured_once_and_kept(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    chosen = bodies.choices(str(native.products()))
    assert torch.get_num_threads() == threads
    several = {op for op, names in measure.candidates(native.supported(native.library())).items() if len(names) > 1}
    assert chosen.keys() == several
    for op, choice in chosen.items():
        usual = next(iter(choice.rates))
        assert list(choice.rates[usual]) == (["256"] if op.startswith("attention") else ["16", "1", "96"])
    path = bodies.rates_path()
    assert path is not None
    assert json.loads(path.read_text())["key"]["torch"] == torch.__version__
    monkeypatch.setattr(measure, "measure_rates", lambda several: pytest.fail("measured again"))
    bodies._choices.cache_clear()
    assert bodies.choices(str(native.products())) == chosen


@pytest.mark.skipif(native.products() is None, reason="needs the C++ products")
def test_rows_are_measured_and_never_cost_less(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for weights in measure.WEIGHTS:
        costs = measure.row_costs(weights)
        assert len(costs) == 16
        assert costs[0] == 1.0
        assert list(costs) == sorted(costs)


def test_costs_between_the_measured_numbers_of_rows() -> None:
    costs = measure.spread_costs([2.0, 3.0, 3.0, 5.0, 4.0])
    assert costs == (1.0, 1.5, 1.5, 1.5, 1.75, 2.0, 2.25, *(2.5,) * 9)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"key": {"cpu": 2}, "record": {"a": 1}}', b'{"key": {"cpu": 1}}', b"\xff"]
)
def test_a_file_that_is_broken_or_foreign_is_measured_anew(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key, values = {"cpu": 1}, iter(({"a": 1.0}, {"a": 2.0}, {"a": 3.0}))

    def ask() -> kept.Record:
        return kept.kept_record("rates", key, lambda: next(values), lambda record: record["a"] > 0)

    assert ask() == ask() == {"a": 1.0}
    kept.record_path("rates", key).write_bytes(content)
    assert ask() == ask() == {"a": 2.0}
    kept.record_path("rates", key).write_text(json.dumps({"key": key, "record": {"a": -1.0}}))
    assert ask() == {"a": 3.0}
    assert {file.suffix for file in kept.cache_folder().iterdir()} == {".json", ".lock"}


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept.kept_record("rates", {}, lambda: {"a": 1.0}, lambda record: True) == {"a": 1.0}


def test_a_full_disk_leaves_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    assert kept.kept_record("rates", {}, lambda: {"a": 1.0}, lambda record: True) == {"a": 1.0}
    assert [file.suffix for file in kept.cache_folder().iterdir()] == [".lock"]


def test_a_lock_that_is_not_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_PATIENCE", 0.05)
    path = kept.record_path("rates", {}).with_suffix(".lock")
    path.parent.mkdir(parents=True)
    with kept._locked(path):
        assert kept.kept_record("rates", {}, lambda: {"a": 1.0}, lambda record: True) == {"a": 1.0}
    assert not kept.record_path("rates", {}).exists()


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    """Each would measure another number; all use the one that was kept first."""
    code = (
        "import os, time, sys\nfrom sensorium.kernels.kept import kept_record\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.001)\n"
        "def measure():\n    time.sleep(0.2)\n    return {'a': os.getpid()}\n"
        "print(kept_record('rates', {}, measure, lambda record: True)['a'])\n"
    )
    env, gate = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "gate"
    command = [sys.executable, "-c", code, str(gate)]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    time.sleep(0.1)
    gate.touch()
    answers = {process.communicate(timeout=240)[0].strip() for process in running}
    assert len(answers) == 1
    assert answers < {str(process.pid) for process in running}
