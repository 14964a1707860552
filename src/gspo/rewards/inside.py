"""The inner side of the sandbox: gives up every right, then runs a program that nobody trusts.

In: on stdin, eight bytes of length and a job in JSON; what follows is the program's own stdin. Out: what the program prints,
and, if it has run to its end, the job's `done` on a pipe of its own. `sandbox.py` starts this file by its path with
`python -I -S`: it imports the standard library alone, and nothing of gspo.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

# ------------------------------------------------------------------------------ seccomp

# Numbers of system calls: x86_64, aarch64; None where there is no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # talking to anybody
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "sendto": (44, 206),
    "sendmsg": (46, 211), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setsid": (112, 157), "setpgid": (109, 154),
    "setpriority": (141, 140), "setrlimit": (160, 164), "personality": (135, 92),
    # the file system, where Landlock says nothing
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "chroot": (161, 51),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # the kernel
    "setns": (308, 268), "unshare": (272, 97), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "syslog": (103, 116),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
_CLONE_THREAD = 0x10000
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _filter() -> bytes:
    """A BPF program: what is on the list fails with EPERM, threads may be made and processes not."""
    column, machine = _MACHINES[platform.machine()]
    refuse = (_RET, 0, 0, _ERRNO | errno.EPERM)
    program = [(_LD, 0, 0, 4), (_JEQ, 1, 0, machine), (_RET, 0, 0, _KILL), (_LD, 0, 0, 0)]
    if column == 0:  # the x32 calls of x86_64 have numbers of their own
        program += [(_JGE, 0, 1, 0x40000000), refuse]
    for numbers in _DENIED.values():
        number = numbers[column]
        program += [] if number is None else [(_JEQ, 0, 1, number), refuse]
    # glibc falls back to clone, whose flags can be seen
    program += [(_JEQ, 0, 1, _CLONE3), (_RET, 0, 0, _ERRNO | errno.ENOSYS)]
    program += [
        (_JEQ, 0, 4, _CLONE[column]),
        (_LD, 0, 0, 16),
        (_JSET, 1, 0, _CLONE_THREAD),
        refuse,
        (_RET, 0, 0, _ALLOW),
    ]
    program += [(_JEQ, 0, 3, _PRLIMIT[column]), (_LD, 0, 0, 16), (_JEQ, 1, 0, 0), refuse, (_RET, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *each) for each in program)


def _seccomp(libc: Any) -> None:
    program = _filter()
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _require(libc.prctl(22, 2, ctypes.c_char_p(described), 0, 0), "seccomp")


# ------------------------------------------------------------------------------ Landlock

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ = 0b1101  # execute, read a file, read a folder
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many rights on files a version knows


def _landlock(libc: Any, readable: list[str]) -> None:
    """Nothing can be read but `readable`, nothing written, and no TCP port, abstract socket or signal is in reach."""
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    _require(version, "Landlock")
    files = (1 << _RIGHTS_OF_ABI.get(version, 16)) - 1
    attributes = struct.pack("QQQ", files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(_CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    _require(rules, "Landlock")
    for path in readable:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ if os.path.isdir(path) else 0b101, folder)
        _require(libc.syscall(_ADD, rules, 1, ctypes.c_char_p(rule), 0), f"Landlock on {path}")
        os.close(folder)
    _require(libc.syscall(_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


# ------------------------------------------------------------------------------ all of it


def _require(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _confine(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if not job["walled"]:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _require(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    if job["landlock"]:
        _landlock(libc, job["readable"])
    # root keeps its files, but none of its powers
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _require(libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(nothing)), "capabilities")
    _seccomp(libc)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def main() -> None:
    job = json.loads(_read_exactly(struct.unpack("!Q", _read_exactly(8))[0]))
    done = int(sys.argv[1])
    sys.argv = ["program.py"]
    _confine(job)
    os.write(done, b"walled\n")
    names: dict[str, Any] = {"__name__": "__main__"}
    for part in job["program"]:
        exec(compile(part, "program.py", "exec"), names)
    # Written by this file, which the program does not return to if it leaves early.
    os.write(done, job["done"].encode())


if __name__ == "__main__":
    main()
