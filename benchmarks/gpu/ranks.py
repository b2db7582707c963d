"""An MLP that several GPUs divide (`tensor_parallel_size`), with NCCL: the result of one GPU, and what the gathers cost."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from sensorium.models.layers.mlp import GatedMlp
from sensorium.models.layers.ranks import Ranks
from sensorium.models.weights import fill
from torch import Tensor, distributed, nn

from .exact import HALF_LIMIT, SINGLE_LIMIT, distance
from .machine import Bench
from .record import Figure, Lacks

_REPEATS, _WARM = 20, 3  # all ranks must gather equally often
_TIMEOUT = timedelta(seconds=30)  # of one rank for another
_MAX_RANKS = 8


def mlp(bench: Bench) -> Iterator[Figure]:
    """Divide the MLP of Qwen2.5-VL-7B among at most 8 GPUs. On a CPU, two processes divide a small one with gloo."""
    count = min(_MAX_RANKS, torch.cuda.device_count()) if bench.cuda else 2
    if count < 2:
        raise Lacks(f"a second GPU; there is {count}")
    size = 1 << (count.bit_length() - 1)  # it divides the widths
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (size, bench, folder), nprocs=size)
        yield from (Figure(**figure) for figure in json.loads((Path(folder) / "figures").read_text()))


def _rank(rank: int, size: int, bench: Bench, folder: str) -> None:
    """Run one process. Rank 0 compares with an MLP that is not divided, and writes the figures."""
    device = torch.device("cuda", rank) if bench.cuda else bench.device
    if bench.cuda:
        torch.cuda.set_device(device)
    store = distributed.FileStore(str(Path(folder) / "rendezvous"), size)
    backend = "nccl" if bench.cuda else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        figures = list(_figures(Bench(device, bench.tiny), Ranks(rank, size)))
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        (Path(folder) / "figures").write_text(json.dumps([asdict(figure) for figure in figures]))


@torch.inference_mode()
def _figures(bench: Bench, ranks: Ranks) -> Iterator[Figure]:
    dim, inner = bench.pick((3584, 18944), (64, 128))
    weights = {"mlp.gate_proj.weight": (inner, dim), "mlp.up_proj.weight": (inner, dim), "mlp.down_proj.weight": (dim, inner)}
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in weights.items()}
    divided, whole = (_mlp(dim, inner, stored, bench, group) for group in (ranks, None))
    wire = "NCCL" if bench.cuda else "gloo"
    for rows in bench.pick((1, 16, 2048), (3, 8)):
        x = torch.randn(rows, dim, generator=generator).to(bench.device, bench.dtype)
        here, alone = divided(x), whole(x)
        limit = SINGLE_LIMIT if bench.dtype == torch.float32 else HALF_LIMIT
        name = f"{rows} rows, {ranks.size} ranks with {wire}"
        bits = f"{(here == alone).double().mean().item():.0%} equal bits"
        yield Figure(f"distance from one device, {name}", distance(here, alone), "eps", most=limit, note=bits)
        part = x[:, ranks.part(dim)].contiguous()
        equal = torch.equal(ranks.gather(part), x)
        yield Figure(f"gathered columns, {name}", float(equal), "of equal bits", least=1.0)
        seconds, single = _seconds(bench, lambda x=x: divided(x)), _seconds(bench, lambda x=x: whole(x))
        yield Figure(f"MLP, {name}", single / seconds, "of one device's speed", note=f"{1e3 * seconds:.3g} ms")
        gathering = _seconds(bench, lambda part=part: ranks.gather(part))
        sent = part.nbytes * (ranks.size - 1)
        yield Figure(f"gather of {dim} columns, {name}", sent / gathering / 1e9, "GB/s", note=f"{1e6 * gathering:.3g} µs")


def _mlp(dim: int, inner: int, stored: dict[str, Tensor], bench: Bench, ranks: Ranks | None) -> GatedMlp:
    """Return an MLP with its part of the weights."""
    made = GatedMlp(dim, inner, False, bench.dtype, bench.device, ranks=ranks)
    fill(nn.ModuleDict({"mlp": made}), stored.items(), ())
    return made


def _seconds(bench: Bench, run: Callable[[], Tensor]) -> float:
    """Return the mean seconds of a run. All ranks call it."""
    for _ in range(_WARM):
        run()
    bench.sync()
    start = time.perf_counter()
    for _ in range(_REPEATS):
        run()
    bench.sync()
    return (time.perf_counter() - start) / _REPEATS
