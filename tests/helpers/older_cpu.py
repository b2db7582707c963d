"""Make torch behave as on a CPU with AVX2 only, so that a newer CPU can run the tests like such a machine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path

_SWITCHES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_NEWER = ("avx512", "avx10", "amx", "avxvnni", "avx_")  # prefixes of the flags


def hide_avx512_from_torch() -> None:
    """Hide AVX-512 from torch. Call it before torch is imported.

    Environment variables limit torch, oneDNN and MKL. Whether oneDNN multiplies bfloat16 depends on the cpuinfo library's
    flags, a struct of one byte each, which are cleared in memory. Child processes inherit the environment only.
    """
    os.environ |= _SWITCHES
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    folder = Path(str(spec.origin)).parent
    names = _flags((folder / "include" / "cpuinfo.h").read_text("utf-8"))
    library = ctypes.CDLL(str(folder / "lib" / "libc10.so"))
    library.cpuinfo_initialize()  # torch's own call does nothing afterwards
    flags = (ctypes.c_bool * len(names)).in_dll(library, "cpuinfo_isa")
    for at, name in enumerate(names):
        flags[at] = flags[at] and not name.startswith(_NEWER)


def _flags(header: str) -> list[str]:
    """Return the members of `struct cpuinfo_x86_isa` in order, without those of 32-bit CPUs."""
    body = re.search(r"struct cpuinfo_x86_isa \{(.*?)\n\};", header, re.DOTALL)
    assert body is not None
    on_64_bits = re.sub(r"#if CPUINFO_ARCH_X86\n.*?#endif", "", body[1], flags=re.DOTALL)
    return re.findall(r"bool (\w+);", on_64_bits)
