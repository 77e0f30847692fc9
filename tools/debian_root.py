"""Runs the steps of a Dockerfile in plain Debian roots, where no container engine is.

    python -m tools.debian_root examples/deploy/cpu.Dockerfile

debootstrap makes the root of every stage, in build/debian_root. The instructions act there as in a container, but
without layers: a second run begins anew. The last step is CMD. It needs the rights of root, debootstrap and unshare.
Variables PIP_* are passed on. Every root gets copies of the folders of --copy at the same places.

The steps run as root. Scripts of packages write to what they find, so no folder of the host is mounted in a root. A
chroot is no prison all the same: run Dockerfiles that you trust.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOTS = ROOT / "build/debian_root"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Step(NamedTuple):
    instruction: str  # in capitals, for example RUN
    words: str


class Stage:
    """A root, with the variables and the working folder that the next step gets.

    Args:
      root: Folder of the root. A folder of an earlier run is replaced.
      image: "debian:<release>", or "debian:<release>-slim".
      copies: Folders of the host that are copied to the same places inside.
    """

    def __init__(self, root: pathlib.Path, image: str, copies: list[pathlib.Path]):
        release = re.fullmatch(r"debian:([a-z]+?)(-slim)?", image)
        if release is None:
            raise ValueError(f"FROM must name a release of Debian, for example debian:bookworm-slim, got {image!r}.")
        self.root, self.folder, self.variables = root, "/", {"PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"}
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        subprocess.run(["debootstrap", "--variant=minbase", release[1], str(root)], check=True)
        for name in ("resolv.conf", "hosts"):  # A container engine provides them, too.
            shutil.copy2(f"/etc/{name}", root / "etc" / name)
        for folder in copies:
            shutil.copytree(folder, root / str(folder.resolve()).lstrip("/"), dirs_exist_ok=True)

    def run(self, command: list[str]) -> None:
        """Runs a command inside. Its mounts end with it, because it has a mount namespace of its own."""
        dev = f"{self.root}/dev"
        mounts = [f"mount -t proc proc {self.root}/proc", f"mount -t tmpfs tmpfs {dev}", f"mkdir -m 1777 {dev}/shm"]
        mounts += [f"touch {dev}/{name} && mount --bind /dev/{name} {dev}/{name}" for name in DEVICES]
        passed = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        variables = [f"{name}={value}" for name, value in {**passed, **self.variables}.items()]
        inside = shlex.join(["chroot", str(self.root), "env", "-i", "-C", self.folder, *variables, *command])
        script = " && ".join([*mounts, f"exec {inside}"])
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "sh", "-c", script], check=True)

    def place(self, path: str) -> pathlib.Path:
        """Returns the place outside of a path inside."""
        return self.root / os.path.join(self.folder, path).lstrip("/")


def steps(text: str) -> list[Step]:
    """Returns the instructions of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [Step(line.split()[0].upper(), " ".join(line.split()[1:])) for line in lines if line.strip()]


def copy_from_clone(source: str, target: pathlib.Path) -> None:
    """Copies the files of the clone that git knows, as from a fresh one. A folder's content goes into the target."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "--", source]
    for name in subprocess.check_output(listed, cwd=ROOT, encoding="utf-8").splitlines():
        if not os.path.lexists(ROOT / name):  # removed, and not yet committed
            continue
        inside = pathlib.PurePath(name).relative_to(source) if (ROOT / source).is_dir() else pathlib.PurePath(name).name
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / inside, follow_symlinks=False)


def copy(words: list[str], stage: Stage, stages: dict[str, Stage]) -> None:
    *sources, target = [word for word in words if not word.startswith("--")]
    place = stage.place(target)
    place.mkdir(parents=True, exist_ok=True)
    origin = next((word.partition("=")[2] for word in words if word.startswith("--from=")), None)
    for source in sources:
        if origin is None:
            copy_from_clone(source, place)
        else:
            subprocess.run(["cp", "-a", f"{stages[origin].place(source)}/.", str(place)], check=True)


def build(dockerfile: pathlib.Path, copies: list[pathlib.Path]) -> None:
    """Runs all steps, and prints each with its seconds.

    Raises:
      ValueError: An image or instruction is none of those that this program knows.
      subprocess.CalledProcessError: A step failed.
    """
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for step in steps(dockerfile.read_text(encoding="utf-8")):
        print(f"== {step.instruction} {step.words[:100]}", flush=True)
        began = time.monotonic()
        if step.instruction == "FROM":
            image, *name = re.split(r"\s+as\s+", step.words, flags=re.IGNORECASE)
            label = name[0] if name else "last"
            stage = stages[label] = Stage(ROOTS / label, image, copies)
        elif stage is None:
            raise ValueError(f"{dockerfile} must begin with FROM, got {step.instruction}.")
        elif step.instruction == "RUN":
            stage.run(["sh", "-c", step.words])
        elif step.instruction == "COPY":
            copy(step.words.split(), stage, stages)
        elif step.instruction == "ENV":
            name_of, _, value = step.words.partition("=")
            stage.variables[name_of] = value.replace("$PATH", stage.variables["PATH"])
        elif step.instruction == "WORKDIR":
            stage.folder = step.words
            stage.place("").mkdir(parents=True, exist_ok=True)
        elif step.instruction == "CMD":
            stage.run(json.loads(step.words))
        else:
            raise ValueError(f"{dockerfile} has the instruction {step.instruction}, which this program does not know.")
        print(f"== done in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the steps of a Dockerfile in plain Debian roots.")
    parser.add_argument("dockerfile", type=pathlib.Path)
    parser.add_argument("--copy", type=pathlib.Path, action="append", default=[], help="folder to copy into roots")
    arguments = parser.parse_args()
    try:
        build(arguments.dockerfile, arguments.copy)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
