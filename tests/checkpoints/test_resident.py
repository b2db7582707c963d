"""Memory of a first start: what is read or freed while weights are packed leaves memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sensorium.checkpoints import weight_files
from sensorium.kernels import native

LAYERS, WIDTH, VOCAB = 32, 2048, 24576
MB = 1 << 20
LAYER, TABLE = 2 * WIDTH**2 / MB, 2 * VOCAB * WIDTH / MB  # stored megabytes: 8 and 96
LOAD = f"""
import sys
from pathlib import Path
import torch
from sensorium.kernels import native
from sensorium.models.layers.basic import EmbeddingTable
from sensorium.models.layers.linear import Linear, LmHead
from sensorium.checkpoints.weight_files import read_checkpoint
from sensorium.models.weights import fill

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

if sys.argv[3]:
    native.products = lambda: sys.argv[3]
torch.set_num_threads(1)
cpu, root = torch.device("cpu"), torch.nn.Module()
shards = [{{f"w{{i}}": {WIDTH}}} for i in range({LAYERS})]
root.layers = torch.nn.ModuleList(Linear({WIDTH}, one, False, torch.bfloat16, cpu) for one in shards)
for layer in root.layers:
    layer.quantization = "int8"
root.embed = EmbeddingTable({VOCAB}, {WIDTH}, torch.bfloat16, cpu)
root.head = LmHead({WIDTH}, {VOCAB}, root.embed, torch.bfloat16, cpu)
before = peak()
fill(root, read_checkpoint(Path(sys.argv[1])), [(sys.argv[2], "embed.weight")])
print(peak() - before)
"""


@pytest.mark.skipif(native.products() is None or sys.platform != "linux", reason="needs the C++ kernels and Linux")
@pytest.mark.parametrize("table_last", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    "instructions", ["", pytest.param("avx512_vnni", marks=pytest.mark.full)]
)  # "": those of this CPU; packing runs in torch on any CPU
def test_the_peak_of_a_first_start_is_little_more_than_the_packed_weights(
    tmp_path: Path, table_last: bool, instructions: str
) -> None:
    """Beside them: the table once more while it is packed, and up to 64 MB each of what was read and of what was freed."""
    layers = {f"layers.w{i}.weight": torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16) for i in range(LAYERS)}
    name = "z.weight" if table_last else "a.weight"  # tensors are read in the order of their names
    save_file(layers | {name: torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), name, instructions], capture_output=True, text=True, check=True
    )
    packed = LAYERS * LAYER / 2 + TABLE
    assert float(done.stdout) < packed + TABLE + 160


def test_pages_of_a_mapped_tensor_are_dropped_and_read_again(tmp_path: Path) -> None:
    stored = torch.arange(1 << 20, dtype=torch.int32)
    save_file({"a": stored, "b": stored + 1}, tmp_path / "model.safetensors")
    found = list[torch.Tensor]()
    for _, tensor in weight_files.read_file(tmp_path / "model.safetensors"):
        before = tensor.clone()
        weight_files.drop_pages(tensor)
        weight_files.drop_pages(before)  # not of a file: it keeps its values
        assert torch.equal(tensor, before)
        found.append(tensor)
    found[0].zero_()
    weight_files.drop_pages(found[0])  # its file is no longer read: what was written stays
    assert not found[0].any()
    assert torch.equal(found[1], stored + 1)
