"""Well and badly behaved codecs. The tests of isolation import a copy of this file, beside the pipes `told` and `go`."""

import ctypes
import os
import resource
import signal
import socket
import threading
import time

import numpy as np
import torch
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.types import FramePlan, MediaHeader, VideoItem
from torch import Tensor

KEPT = []
TOLD, GO = (os.open(os.path.join(os.path.dirname(__file__), name), os.O_RDWR) for name in ("told", "go"))  # pipes


def pixels(value: object, policy: MediaPolicy) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)[None, :, None].expand(2, -1, 3)


def sound(value: object, rate: int, policy: MediaPolicy) -> Tensor:
    return torch.arange(rate, dtype=torch.float32)[::2] / len(value)


def header(value: object, sampling: FrameSampling, policy: MediaPolicy) -> MediaHeader:
    plan = FramePlan((0, 7), (0.0, 0.29), len(value), sampling.fps, ((6, 7),), (9,))
    return MediaHeader("video", policy.max_pixels, policy.background[2], plan, exact=False)


def clip(value: object, sampling: FrameSampling, policy: MediaPolicy) -> VideoItem:
    return VideoItem(torch.arange(36, dtype=torch.uint8).view(1, 3, 4, 3), FramePlan((3,), (0.1,), 9, 2))


def nothing(value: object, policy: MediaPolicy) -> Tensor:
    return torch.zeros(0, 5)


def pid(value: object, policy: MediaPolicy) -> int:
    return os.getpid()


def environment(value: object, policy: MediaPolicy) -> dict[str, int]:
    return {"threads": torch.get_num_threads(), "core": resource.getrlimit(resource.RLIMIT_CORE)[0]}


def secrets(value: object, policy: MediaPolicy) -> int:
    return sum("SECRET" in name for name in os.environ)


def tries(value: bytes, policy: MediaPolicy) -> dict[str, int]:
    # the errno of each call, 0 if it works
    libc = ctypes.CDLL(None, use_errno=True)

    def calls(name: str, *args: object) -> None:
        if getattr(libc, name)(*args) < 0:
            raise OSError(ctypes.get_errno(), name)

    deeds = {
        "socket": lambda: socket.socket(),
        "pair": lambda: socket.socketpair(),
        "connect": lambda: calls("connect", 0, bytes(16), 16),
        "read": lambda: open("/etc/passwd").close(),
        "itself": lambda: open("/proc/self/mem").close(),
        "write": lambda: open(value, "wb").close(),
        "creat": lambda: calls("creat", value, 0o600),
        "unlink": lambda: os.unlink(value + b"x"),
        "list": lambda: os.listdir("/"),
        "pipe": lambda: os.pipe(),
        "memory": lambda: os.memfd_create("x"),
        "fork": lambda: os.fork() or os._exit(0),
        "vfork": lambda: calls("syscall", 58),
        "namespace": lambda: calls("unshare", 0x10000000),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "ptrace": lambda: calls("ptrace", 0, 0, 0, 0),
        "kill": lambda: os.kill(os.getppid(), 0),
        "mount": lambda: calls("mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "filter": lambda: calls("prctl", 4, 1, 0, 0, 0),
        "more memory": lambda: calls("prlimit", 0, resource.RLIMIT_AS, (ctypes.c_ulong * 2)(1 << 60, 1 << 60), None),
        "x32": lambda: calls("syscall", ctypes.c_long(0x40000000 + 39)),
        "thread": lambda: threading.Thread(target=print).start(),
    }
    done = {}
    for name, deed in deeds.items():
        try:
            deed()
            done[name] = 0
        except OSError as error:
            done[name] = error.errno
    return done


def refused(value: object, policy: MediaPolicy) -> Tensor:
    raise InputError("it is no père")


def bug(value: object, policy: MediaPolicy) -> Tensor:
    return [][3]


def unknown(value: object, policy: MediaPolicy) -> object:
    return object()


def complains(value: object, policy: MediaPolicy) -> int:
    return os.write(2, value)


def sleeps(value: object, policy: MediaPolicy) -> int:
    os.write(TOLD, str(os.getpid()).encode()) if value else None
    time.sleep(600)
    return 0


def spins(value: object, policy: MediaPolicy) -> int:
    while True:
        pass


def sleeps_till_its_alarm(value: object, policy: MediaPolicy) -> int:
    os.write(TOLD, f"{os.getpid()} {signal.getitimer(signal.ITIMER_REAL)[0]}".encode())
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # sooner than it was set to
    time.sleep(600)
    return 0


def waits(value: object, policy: MediaPolicy) -> int:
    os.write(TOLD, str(os.getpid()).encode())
    return len(os.read(GO, 1))


def segfaults(value: object, policy: MediaPolicy) -> int:
    return ctypes.string_at(0)


def aborts(value: object, policy: MediaPolicy) -> int:
    os.abort()


def exits(value: object, policy: MediaPolicy) -> int:
    os._exit(7)


def babbles(value: object, policy: MediaPolicy) -> int:
    os.write(0, value)
    time.sleep(120)
    return 0


def takes(value: object, size: int, policy: MediaPolicy) -> int:
    return len(bytes(size))


def takes_numpy(value: object, size: int, policy: MediaPolicy) -> int:
    try:
        return len(np.zeros(size, np.uint8))
    except MemoryError as error:  # as a codec's boundary does
        raise InputError(f"it is broken ({error})") from None


def takes_torch(value: object, size: int, policy: MediaPolicy) -> int:
    return len(torch.zeros(size, dtype=torch.uint8))


def leaks(value: object, size: int, policy: MediaPolicy) -> int:
    KEPT.append(bytes(size))
    return os.getpid()
