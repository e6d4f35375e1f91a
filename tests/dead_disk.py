"""A disk that refuses from one moment on: by the kernel itself, in all threads of this process.

A seccomp filter fails the system calls, so that what code outside of Python writes is refused too.
It cannot be taken back, and knows no paths: only a fork that ends soon may have one. Linux on
x86-64.
"""

import ctypes
import errno
import os
import platform
import stat

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}
# Numbers of system calls: write, pwrite64, writev, pwritev, pwritev2 with a descriptor first.
_WRITES = (1, 18, 20, 296, 328)
# mkdir, mkdirat, link, linkat, symlink, symlinkat, fallocate, copy_file_range, creat.
_SPACE = (83, 258, 86, 265, 88, 266, 285, 326, 85)
# rename, renameat, renameat2, unlink, unlinkat, rmdir, truncate, ftruncate, utimensat, fsync,
# fdatasync, sync_file_range.
_REST = (82, 264, 316, 87, 263, 84, 76, 77, 280, 74, 75, 277)
_OPENS = {2: 1, 257: 2}  # open and openat, and which argument has the flags
_LOAD, _EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARGUMENT = 0, 16  # offsets in seccomp_data; an argument has 8 bytes


def possible() -> bool:
    """Whether this machine has the system calls that are numbered here."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def refuse(code: int) -> None:
    """From now on fail what would change a disk, with `code`: where that is ENOSPC new names and
    bytes, else deletions, renames and fsync too. Pipes and the terminal are written to as before.
    """
    full = code == errno.ENOSPC
    fails, program = _FAIL | code, list[tuple[int, int, int, int]]()
    for number in _SPACE + (() if full else _REST):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, fails)]
    flags = os.O_CREAT if full else os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_TRUNC
    for number, argument in _OPENS.items():
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENT + 8 * argument),
            (_ANY, 0, 1, flags),
            (_RETURN, 0, 0, fails),
            (_RETURN, 0, 0, _ALLOW),
        ]
    passed = _no_files()
    for number in _WRITES:
        program += [(_EQUAL, 0, 2 + 2 * len(passed), number), (_LOAD, 0, 0, _ARGUMENT)]
        for descriptor in passed:
            program += [(_EQUAL, 0, 1, descriptor), (_RETURN, 0, 0, _ALLOW)]
        program += [(_RETURN, 0, 0, fails)]
    _install([(_LOAD, 0, 0, _NUMBER), *program, (_RETURN, 0, 0, _ALLOW)])


def _no_files() -> list[int]:
    """Return the open descriptors that are of no regular file."""
    found = []
    for name in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            mode = os.fstat(name).st_mode
        except OSError:  # another thread has closed it, or it was the listing's own
            continue
        if not stat.S_ISREG(mode):
            found.append(name)
    return found


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


def _install(program: list[tuple[int, int, int, int]]) -> None:
    instructions = (_Instruction * len(program))(*(_Instruction(*line) for line in program))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, set_filter, all_threads = 38, 317, 1, 1
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.syscall(
        seccomp, set_filter, all_threads, ctypes.byref(_Program(len(program), instructions))
    ):
        raise OSError(ctypes.get_errno(), "cannot install a seccomp filter")
