"""System call allow-list of a computing interpreter, as a classic BPF program for seccomp(2).

Other calls fail with ENOSYS, which C libraries take for an older kernel: no process or thread can be created, no
socket, no signal sent, nothing traced, mounted or waited for. Numbers: arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h of Linux.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_AT, _SECOND_AT, _THIRD_AT, _THIRD_HIGH_AT = 0, 4, 16, 24, 32, 36
"""Offsets in `struct seccomp_data`; for arguments, of the low halves on little-endian machines."""

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW: Final = 0x7FFF0000
NO_SUCH_CALL: Final = 0x00050000 | 38
KILL: Final = 0x80000000

X86_64: Final = 0xC000003E
AARCH64: Final = 0xC00000B7
ARCHITECTURES: Final = MappingProxyType({"x86_64": X86_64, "aarch64": AARCH64})
"""By `platform.machine()`."""

LEAST_SIGNAL_STATUS = 128
"""bubblewrap reports death by signal n as exit status 128 + n; programs cannot exit with such a status."""

_FIOCLEX = 0x5451
"""The only allowed ioctl (close on exec), which the interpreter uses to open files."""

_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Others lock, lease and watch files shared with the host."""

_FUTEX_WAKES = (1, 1 | 128)
"""FUTEX_WAKE, also private. Waiting is forbidden: a single thread never needs it, and a waiting program would look like
one that gets no processor time.
"""

# fmt: off
_EXIT: Final[Mapping[int, int]] = {X86_64: 60, AARCH64: 93}
_EXIT_GROUP: Final[Mapping[int, int]] = {X86_64: 231, AARCH64: 94}
_IOCTL: Final[Mapping[int, int]] = {X86_64: 16, AARCH64: 29}
_FCNTL: Final[Mapping[int, int]] = {X86_64: 72, AARCH64: 25}
_FUTEX: Final[Mapping[int, int]] = {X86_64: 202, AARCH64: 98}
_PRLIMIT: Final[Mapping[int, int]] = {X86_64: 302, AARCH64: 261}
_ALLOWED: Final[Mapping[int, Mapping[str, int]]] = {
    X86_64: {
        "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "mprotect": 10,
        "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17,
        "access": 21, "mremap": 25, "dup": 32, "dup2": 33, "getpid": 39, "execve": 59, "getcwd": 79,
        "readlink": 89, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "sigaltstack": 131,
        "arch_prctl": 158, "gettid": 186, "getdents64": 217, "set_tid_address": 218, "clock_gettime": 228,
        "openat": 257, "newfstatat": 262, "readlinkat": 267, "set_robust_list": 273, "dup3": 292, "rseq": 334,
    },
    AARCH64: {
        "getcwd": 17, "dup": 23, "dup3": 24, "faccessat": 48, "openat": 56, "close": 57, "getdents64": 61, "lseek": 62,
        "read": 63, "write": 64, "pread64": 67, "readlinkat": 78, "newfstatat": 79, "fstat": 80,
        "set_tid_address": 96, "set_robust_list": 99, "clock_gettime": 113, "sigaltstack": 132, "rt_sigaction": 134,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "getpid": 172, "getuid": 174, "geteuid": 175, "getgid": 176,
        "getegid": 177, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "execve": 221, "mmap": 222,
        "mprotect": 226, "rseq": 293,
    },
}
# fmt: on


def allowed(architecture: int) -> frozenset[int]:
    """Return the numbers of the unconditionally allowed calls.

    Conditionally allowed: exits with a status below 128, one ioctl, some of fcntl, futex wakes, and reading limits.
    """
    return frozenset(_ALLOWED[architecture].values())


def program(architecture: int) -> bytes:
    """Build the filter as an array of `struct sock_filter`, as `bwrap --seccomp` reads it."""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in _instructions(architecture))


def _instructions(architecture: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (operation, instructions to skip if true, if false, operand)."""
    yield _LOAD, 0, 0, _ARCHITECTURE_AT
    yield _IF_EQUAL, 1, 0, architecture
    # Another architecture's numbers mean other calls, e.g. 32-bit code on a 64-bit kernel.
    yield _RETURN, 0, 0, KILL
    yield _LOAD, 0, 0, _NUMBER_AT
    for number in sorted(_ALLOWED[architecture].values()):
        yield _IF_EQUAL, 0, 1, number
        yield _RETURN, 0, 0, ALLOW
    for number in (_EXIT[architecture], _EXIT_GROUP[architecture]):
        yield _IF_EQUAL, 0, 4, number
        yield _LOAD, 0, 0, _FIRST_AT
        yield _IF_AT_LEAST, 1, 0, LEAST_SIGNAL_STATUS
        yield _RETURN, 0, 0, ALLOW
        yield _RETURN, 0, 0, NO_SUCH_CALL
    yield from _with_second(_IOCTL[architecture], (_FIOCLEX,))
    yield from _with_second(_FCNTL[architecture], _FCNTL_COMMANDS)
    yield from _with_second(_FUTEX[architecture], _FUTEX_WAKES)
    # Limits may only be read: lowering them would let a program have itself killed as if from outside.
    yield _IF_EQUAL, 0, 5, _PRLIMIT[architecture]
    yield _LOAD, 0, 0, _THIRD_AT
    yield _IF_EQUAL, 0, 3, 0
    yield _LOAD, 0, 0, _THIRD_HIGH_AT
    yield _IF_EQUAL, 0, 1, 0
    yield _RETURN, 0, 0, ALLOW
    # x32 calls end here too: their numbers have bit 30 set, and are not listed.
    yield _RETURN, 0, 0, NO_SUCH_CALL


def _with_second(number: int, values: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Allow a call if its second argument is one of `values`."""
    yield _IF_EQUAL, 0, 2 + 2 * len(values), number
    yield _LOAD, 0, 0, _SECOND_AT
    for value in values:
        yield _IF_EQUAL, 0, 1, value
        yield _RETURN, 0, 0, ALLOW
    yield _RETURN, 0, 0, NO_SUCH_CALL
