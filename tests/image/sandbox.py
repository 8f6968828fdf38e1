"""Root folders that stand for containers, on this machine's own programs.

A root is a fresh folder. This machine's /usr, read-only, and the Python that runs the tests, as
/usr/local, stand for the base image; the rest is the root's own. Processes get mount, process and
network namespaces of their own, so that the first has number 1, and reach no network. Needs root on
Linux.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.image.dockerfile import Copy, Run, Stage

BASE_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}

_ENTER = Path(__file__).with_name("enter.py")
_NAMESPACES = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
_ETC = ["group", "ld.so.conf", "ld.so.conf.d", "login.defs", "nsswitch.conf", "passwd", "ssl"]
_DEVICES = ["null", "zero", "random", "urandom"]

Binds = Mapping[str, tuple[Path, str]]
"""By path inside: the folder outside, and `ro` or `rw`."""


def why_not() -> str | None:
    """Return why no sandbox can be had here; None if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


class Sandbox:
    """One root folder, and processes in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._base_binds: list[tuple[str, str, str]] = []
        root.mkdir(parents=True)
        for name in ("dev/shm", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp"):
            (root / name).mkdir(parents=True)
        for name in ("tmp", "var/tmp"):
            (root / name).chmod(0o1777)
        self._bind_base(Path("/usr"), "/usr")
        for name in ("bin", "lib", "lib64", "sbin"):
            path = Path("/", name)
            if path.is_symlink():
                (root / name).symlink_to(path.readlink())
            elif path.exists():
                (root / name).mkdir()
                self._bind_base(path, f"/{name}")
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            self._bind_base(Path(sys.base_prefix), "/usr/local")
        for name in _DEVICES:
            (root / "dev" / name).touch()
            self._base_binds.append((f"/dev/{name}", f"/dev/{name}", "rw"))
        self._bind_base(Path("/sys"), "/sys")
        for name in _ETC:
            if Path("/etc", name).exists():
                _copy_into(Path("/etc", name), root / "etc" / name)
        # As in the base image, the Python under /usr/local finds its library by this list.
        self.run(["ldconfig"], environment=BASE_ENVIRONMENT)

    def _bind_base(self, source: Path, target: str) -> None:
        self._base_binds.append((str(source), target, "ro"))

    def command(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: str = "/",
        user: str = "0:0",
        binds: Binds | None = None,
    ) -> list[str]:
        """Return the command that runs one inside; user is `uid:gid`."""
        extra = [(str(path), target, mode) for target, (path, mode) in (binds or {}).items()]
        for _, target, _ in extra:
            (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        uid, gid = (int(part) for part in user.split(":"))
        specification = {
            "root": str(self.root),
            "binds": [*self._base_binds, *extra],
            "command": list(command),
            "environment": dict(environment),
            "cwd": cwd,
            "uid": uid,
            "gid": gid,
        }
        return [*_NAMESPACES, sys.executable, "-I", "-S", str(_ENTER), json.dumps(specification)]

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: str = "/",
        user: str = "0:0",
        binds: Binds | None = None,
    ) -> None:
        """Run one inside to its end; a failure's output is in the error."""
        whole = self.command(command, environment=environment, cwd=cwd, user=user, binds=binds)
        result = subprocess.run(
            whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(f"{command} ended with {result.returncode}:\n{result.stdout}")


def build(
    stages: Sequence[Stage],
    context: Path,
    folder: Path,
    *,
    environment: Mapping[str, str],
    binds: Binds,
) -> Sandbox:
    """Execute all steps of all stages; returns the last one's root.

    Args:
        stages: of the Dockerfile.
        context: the build context, ignored files left out.
        folder: where the roots go.
        environment: what RUN steps get beside the Dockerfile's.
        binds: what RUN steps see beside the root.
    """
    roots: dict[str, Sandbox] = {}
    for number, stage in enumerate(stages):
        name = stage.name or str(number)
        sandbox = roots[name] = Sandbox(folder / name)
        for step in stage.steps:
            if isinstance(step, Run):
                (sandbox.root / step.cwd.lstrip("/")).mkdir(parents=True, exist_ok=True)
                sandbox.run(
                    ["/bin/sh", "-c", step.command],
                    environment={**environment, **step.environment},
                    cwd=step.cwd,
                    user=step.user,
                    binds=binds,
                )
            else:
                _copy(step, roots[step.stage].root if step.stage else context, sandbox.root)
        (sandbox.root / stage.cwd.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return sandbox


def _copy(step: Copy, origin: Path, root: Path) -> None:
    target = root / step.target.lstrip("/")
    for name in step.sources:
        source = origin / name.lstrip("/")
        # Of a folder the content is copied, of a file the file.
        into = source.is_file() and step.target.endswith("/")
        # A finished stage is written no more, so that another may share its files.
        _copy_into(source, target / source.name if into else target, share=step.stage is not None)


def _copy_into(source: Path, target: Path, *, share: bool = False) -> None:
    copy = _link if share else shutil.copy
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=copy)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    os.link(source, target, follow_symlinks=False)


class Container:
    """A stage's process, started as a container engine would."""

    def __init__(
        self,
        stage: Stage,
        sandbox: Sandbox,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str],
        binds: Binds,
    ) -> None:
        self._stage = stage
        self.log_file = log
        self.environment = {**stage.environment, **environment}
        whole = sandbox.command(
            [*(stage.entrypoint or []), *command],
            environment=self.environment,
            cwd=stage.cwd,
            user=stage.user,
            binds=binds,
        )
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                whole, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    @property
    def pid(self) -> int:
        """The number, outside, of the container's first process."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run one more process inside, as `docker exec` does and health checks do."""
        uid, gid = self._stage.user.split(":")
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--ipc"]
        enter += ["--root", "--wd", f"--setuid={uid}", f"--setgid={gid}", "--"]
        return subprocess.run(
            [*enter, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def stop(self) -> None:
        """Kill what still runs, and wait."""
        if self.process.poll() is None:
            self.process.kill()  # takes all of the container with it
        self.process.wait()


@contextmanager
def started(container: Container) -> Iterator[Container]:
    """Leave no process behind."""
    try:
        yield container
    finally:
        container.stop()
