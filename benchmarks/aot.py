"""Compile every Triton kernel ahead of time for absent GPUs through the real launchers; record registers and spills.

`python -m benchmarks.aot` writes benchmarks/results/aot.md; `python -m benchmarks.aot sm_90 norm rope` prints JSON of these.
With `--first` before the card, it compiles only the first launch of each kernel.
A stub driver stands for the card: each launch compiles with the same specialisation as on the card, and does not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "kernels" / "gpu"
RESULT = ROOT / "benchmarks" / "results" / "aot.md"


@dataclass(frozen=True)
class Target:
    """A card: Triton's name for it, shared memory per program in bytes, number of multiprocessors."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    processors: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024, 108),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, 132),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 304),
}


@dataclass(frozen=True)
class Use:
    """Resources of one compiled kernel: registers per thread, shared bytes per program, spilled bytes per thread."""

    op: str
    kernel: str
    variant: str
    warps: int
    registers: int
    shared: int
    spills: int
    hot: bool


def ops() -> list[str]:
    """Return the ops that have a list of launches."""
    return sorted(path.stem.removeprefix("compile_") for path in LISTS.glob("compile_*.py"))


def launches(op: str) -> ModuleType:
    """Import tests/kernels/gpu/compile_<op>.py, with `launches()` and `HOT`, the kernels that must not spill."""
    spec = importlib.util.spec_from_file_location(f"compile_{op}", LISTS / f"compile_{op}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def pretending(target: Target, first: bool = False) -> Iterator[list[tuple[str, str, Any]]]:
    """Compile every launch (`first`: of each kernel the first) for `target`, and record kernel, variant and result."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    noted: list[tuple[str, str, Any]] = []
    real = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if first and any(kernel == self.fn.__name__ for kernel, *_ in noted):
            return None
        made = real(self, *args, grid=grid, warmup=True, **kwargs)
        noted.append((self.fn.__name__, variant(args, kwargs), made))
        return made

    JITFunction.run = run
    driver.set_active(stub(target))
    try:
        yield noted
    finally:
        JITFunction.run = real


def stub(target: Target) -> Any:
    """Make the part of a driver that compilation needs."""
    import torch
    from triton.backends.compiler import GPUTarget

    class Utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": target.shared, "multiprocessor_count": target.processors, "warpSize": target.warp}

    class Driver:
        utils = Utils()

        def get_current_target(self) -> Any:
            return GPUTarget(target.backend, target.arch, target.warp)

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def map_python_to_cpp_type(self, name: str) -> str:
            return name

    return Driver()


def variant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name a variant by tensor dtypes and upper-case constants: `bfloat16 float32, BLOCK=1024`."""
    kinds = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (*args, *kwargs.values()) if hasattr(x, "data_ptr"))
    constants = [f"{name}={value}" for name, value in kwargs.items() if name.isupper()]
    return ", ".join((" ".join(kinds), *constants))


def compile_for(name: str, wanted: list[str], first: bool = False) -> list[Use]:
    """Compile every launch of these ops for the target, each kernel signature once. `first`: only the first of each kernel."""
    found: dict[str, Use] = {}
    for op in wanted:
        module = launches(op)
        with pretending(TARGETS[name], first) as noted:
            module.launches()
        for kernel, kind, made in noted:
            registers, spills = resources(made)
            meta = made.metadata
            use = Use(op, kernel, kind, meta.num_warps, registers, meta.shared, spills, kernel in module.HOT)
            found.setdefault(f"{op} {made.hash}", use)
    return list(found.values())


def resources(made: Any) -> tuple[int, int]:
    """Read registers and spilled bytes per thread."""
    if "amdgcn" in made.asm:
        number = {
            key: int(value)
            for key, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", made.asm["amdgcn"])
        }
        return number["vgpr_count"], number["private_segment_fixed_size"]
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(made.asm["cubin"])
        binary.flush()
        text = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True, check=True).stdout
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return number["REG"], number["STACK"] + number["LOCAL"]


def in_a_process(name: str, wanted: list[str]) -> list[Use]:
    """Run `compile_for` in its own process: a Triton process has one driver. Compiled kernels are cached for the next run."""
    env = {"TRITON_CACHE_DIR": str(ROOT / "out" / "triton")} | os.environ
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.aot", name, *wanted]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr[-3000:]}")
    return [Use(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def faults(name: str, uses: list[Use]) -> list[str]:
    """List kernels that this card would refuse, or that would be slow on it."""
    limit = TARGETS[name].shared
    over = [f"{use.op} {use.kernel} ({use.variant}): {use.shared} bytes of shared memory, {limit} are there"
            for use in uses if use.shared > limit]  # fmt: skip
    return over + [
        f"{use.op} {use.kernel} ({use.variant}): spills {use.spills} bytes" for use in uses if use.hot and use.spills
    ]


def summary(found: dict[str, list[Use]]) -> str:
    """Return the largest use over all variants of a kernel."""
    kernels = sorted({(use.op, use.kernel) for uses in found.values() for use in uses if use.op != "autotune"})
    head = "| op | kernel | " + " | ".join(f"{name}: registers, shared, spills" for name in found) + " |\n"
    lines = [head, "|---|---|" + "---|" * len(found) + "\n"]
    for op, kernel in kernels:
        cells = []
        for uses in found.values():
            mine = [(use.registers, use.shared, use.spills) for use in uses if (use.op, use.kernel) == (op, kernel)]
            cells.append(", ".join(str(max(each)) for each in zip(*mine, strict=True)))
        lines.append(f"| {op} | {kernel} | " + " | ".join(cells) + " |\n")
    return "".join(lines) + "\n"


def table(name: str, uses: list[Use]) -> str:
    """Format one section of the table."""
    limit = TARGETS[name].shared // 1024
    head = f"## {name}\n\n| op | kernel | variant | warps | registers | shared (of {limit} KiB) | spills | hot |\n"
    rows = [astuple(use)[:-1] + ("yes" if use.hot else "",) for use in uses]
    return head + "|---|---|---|---|---|---|---|---|\n" + "".join("| " + " | ".join(map(str, row)) + " |\n" for row in rows)


def main() -> None:
    if len(sys.argv) > 1:
        first = sys.argv[1] == "--first"
        name, *wanted = sys.argv[1 + first :]
        uses = compile_for(name, wanted or ops(), first)
        print(json.dumps([asdict(use) for use in uses]))
        sys.exit("\n".join(faults(name, uses)) or None)
    import triton

    found = {name: in_a_process(name, ops()) for name in TARGETS}
    RESULT.parent.mkdir(exist_ok=True)
    head = (
        f"# Kernels compiled ahead of time\n\n{date.today()}, Triton {triton.__version__}, no GPU: `make aot`. Registers and "
    )
    head += "spilled bytes are a thread's, shared memory in bytes a program's; first the most of any variant, then all.\n\n"
    RESULT.write_text(head + summary(found) + "\n".join(table(name, uses) for name, uses in found.items()))
    print(RESULT)
    sys.exit("\n".join(line for name, uses in found.items() for line in faults(name, uses)) or None)


if __name__ == "__main__":
    main()
