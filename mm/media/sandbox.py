"""Takes from a codec worker every right that decoding does not need: new descriptors, written files and most system calls."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

_CALLS = (  # name, number on x86-64, number on aarch64 (Linux: syscall_64.tbl, asm-generic/unistd.h)
    # of open descriptors: the socket to the engine and /dev/null
    "read 0 63, write 1 64, readv 19 65, writev 20 66, close 3 57, fstat 5 80, lseek 8 62, sendto 44 206, recvfrom 45 207",
    # of memory
    "mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, madvise 28 233",
    # of threads, and signals of this process
    "futex 202 98, exit 60 93, exit_group 231 94, set_robust_list 273 99, rseq 334 293, sched_yield 24 124, getcpu 309 168",
    "sched_getaffinity 204 123, membarrier 324 283, getpid 39 172, gettid 186 178, rt_sigaction 13 134",
    "rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128",
    # of time and other numbers
    "clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169",
    "setitimer 38 103, getitimer 36 102, getrandom 318 278, getrusage 98 165, getrlimit 97 163, sysinfo 99 179, uname 63 160",
)
_CLONE, _CLONE3, _TGKILL, _PRLIMIT, _SECCOMP = (56, 220), (435, 435), (234, 131), (302, 261), (317, 277)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the numbers, AUDIT_ARCH_*
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_*
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # BPF instructions
_NUMBER, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data
_THREAD, _NAMESPACES = 0x00010000, 0x7E020000  # flags of clone
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS


def cut_off() -> str:
    """Restrict this process for good, and return why the kernel refuses to filter system calls, or "" if it does not.

    Afterwards the process computes, allocates memory, starts threads, and reads and writes descriptors that are open. Other
    system calls fail with EPERM. Without the filter it still opens no file and no socket, because descriptors are limited.
    """
    limits = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3))
    real_time = ((resource.RLIMIT_RTPRIO, 0),) if hasattr(resource, "RLIMIT_RTPRIO") else ()  # no codec may raise its priority
    for limit, value in (*limits, *real_time):
        resource.setrlimit(limit, (value, value))
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return f"unknown on {sys.platform} {platform.machine()}"
    column, arch = _MACHINES[platform.machine()]
    program = ctypes.create_string_buffer(_filter(column, arch))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # no setuid program gives it more rights; the filter needs it
    head = ctypes.create_string_buffer(struct.pack("@HP", (len(program) - 1) // 8, ctypes.addressof(program)))
    mode, all_threads = ctypes.c_long(1), ctypes.c_long(1)  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC
    failed = libc.syscall(ctypes.c_long(_SECCOMP[column]), mode, all_threads, head)
    return os.strerror(ctypes.get_errno()) if failed < 0 else f"thread {failed} has other filters" if failed else ""


def _filter(column: int, arch: int) -> bytes:
    """Return the BPF program. Calls of another architecture end the process; x32 numbers are in no list."""
    allow, refuse = [(_RETURN, 0, 0, _ALLOW)], [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
    rules = {int(call.split()[1 + column]): allow for line in _CALLS for call in line.split(", ")}
    thread = [(_LOAD, 0, 0, _ARGS), (_AND, 0, 0, _THREAD | _NAMESPACES), (_IF_EQUAL, 0, 1, _THREAD)]
    rules[_CLONE[column]] = thread + allow + refuse
    rules[_CLONE3[column]] = [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]  # glibc then calls clone, whose flags can be read
    rules[_TGKILL[column]] = [(_LOAD, 0, 0, _ARGS), (_IF_EQUAL, 0, 1, os.getpid()), *allow, *refuse]
    no_new_limit = [(_LOAD, 0, 0, _ARGS + 16), (_IF_EQUAL, 0, 3, 0), (_LOAD, 0, 0, _ARGS + 20), (_IF_EQUAL, 0, 1, 0)]
    rules[_PRLIMIT[column]] = no_new_limit + allow + refuse
    program = [(_LOAD, 0, 0, _ARCH), (_IF_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number, rule in rules.items():
        program += [(_IF_EQUAL, 0, len(rule), number), *rule]
    return b"".join(struct.pack("=HBBI", *step) for step in program + refuse)
