"""Lets torch behave as on a CPU with AVX2 only, to run the tests on a newer one as on such a machine. Tests only."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path

_SWITCHES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_NEWER = ("avx512", "avx10", "amx", "avxvnni", "avx_")  # flags that begin so


def hide_avx512_from_torch() -> None:
    """Call it before torch is imported.

    The environment sets what torch, oneDNN and MKL run with. torch decides by other flags whether oneDNN multiplies bfloat16:
    those of the cpuinfo library, a struct of one byte each, which are cleared in memory. Processes that tests start inherit
    the environment alone.
    """
    os.environ |= _SWITCHES
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    folder = Path(str(spec.origin)).parent
    names = _flags((folder / "include" / "cpuinfo.h").read_text("utf-8"))
    library = ctypes.CDLL(str(folder / "lib" / "libc10.so"))
    library.cpuinfo_initialize()  # does nothing when torch calls it again
    flags = (ctypes.c_bool * len(names)).in_dll(library, "cpuinfo_isa")
    for at, name in enumerate(names):
        flags[at] = flags[at] and not name.startswith(_NEWER)


def _flags(header: str) -> list[str]:
    """The members of `struct cpuinfo_x86_isa` in order, without those for 32 bits."""
    body = re.search(r"struct cpuinfo_x86_isa \{(.*?)\n\};", header, re.DOTALL)
    assert body is not None
    on_64_bits = re.sub(r"#if CPUINFO_ARCH_X86\n.*?#endif", "", body[1], flags=re.DOTALL)
    return re.findall(r"bool (\w+);", on_64_bits)
