"""Become a process inside a root folder: run as root, in namespaces that `unshare` has just made.

Reads a specification, JSON, from its one argument: see `tests.image.sandbox.Process`. Needs nothing
but Python's own library. What it mounts dies with its namespaces.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def main() -> None:
    """Mount, change root, user and folder, and become the command."""
    specification = json.loads(sys.argv[1])
    root = specification["root"]
    for source, target, mode in specification["binds"]:
        _mount("--bind", "-o", mode, source, root + target)
    _mount("-t", "proc", "proc", root + "/proc")
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root + "/dev/shm")
    _bring_loopback_up()
    os.chroot(root)
    os.chdir(specification["cwd"])
    os.umask(0o022)
    os.setgroups([])
    os.setgid(specification["gid"])
    os.setuid(specification["uid"])
    command, environment = specification["command"], specification["environment"]
    os.execvpe(command[0], command, environment)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sh14x", answer)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


if __name__ == "__main__":
    main()
