"""Wheels that benchmarks/gpu.py needs on a machine without a package index.

    python benchmarks/carry.py --python 3.12

Fills `.whl/`, which git ignores: what setup.cfg requires and Hugging Face Trainer needs, with all
that those require in turn, at the versions of constraints.txt, for another Python on Linux, without
what `--have` brings there itself. It walks the metadata of what is installed here, so run it where
launch/setup.sh ran. DeepSpeed, which is published as source, is made a wheel without operators.
"""

import argparse
import configparser
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ONLY = "deepspeed"
TRAINER = "accelerate"  # Hugging Face Trainer's other half, in zerolm[dev]
LEFT_OUT = {  # required by setup.cfg, and not imported by a case
    "datasets": "for --hellaswag and data_prep",
    "isal": "for data_prep",
    "matplotlib": "for the report; a case has --report_interval 0",
    "rich": "for zerolm status",
    "wandb": "a case has --wandb off",
}
ALSO = {"typing-extensions"}  # pydantic wants a newer one than torch
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="version there")
    parser.add_argument("--machine", default="x86_64", help="its architecture")
    parser.add_argument(
        "--have", default="torch,transformers,numpy,pyarrow,pytest", help="packages that are there"
    )
    parser.add_argument("--output", type=Path, default=ROOT / ".whl")
    parser.add_argument("--most_mib", type=int, default=64, help="that can be carried")
    arguments = parser.parse_args()

    there = environment(arguments.python, arguments.machine)
    wanted = missing(arguments.have.split(","), there)
    pins = versions()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in arguments.output.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", arguments.output,
         f"{SOURCE_ONLY}=={pins[SOURCE_ONLY]}"],
        check=True, env={**os.environ, "DS_BUILD_OPS": "0"},
    )  # fmt: skip
    platforms = [f"manylinux_2_{minor}_{arguments.machine}" for minor in GLIBC]
    platforms += [f"manylinux2014_{arguments.machine}", f"manylinux1_{arguments.machine}"]
    subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation=cp",
         f"--python-version={arguments.python}", "-d", arguments.output,
         *(f"--platform={platform}" for platform in platforms),
         *(f"{name}=={pins[name]}" for name in sorted(wanted - {SOURCE_ONLY}))],
        check=True,
    )  # fmt: skip
    wheels = sorted(arguments.output.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{total:6.1f} MiB  {len(wheels)} wheels in {arguments.output}")
    if total > arguments.most_mib:
        sys.exit(f"more than --most_mib {arguments.most_mib}")


def environment(python: str, machine: str) -> dict[str, str]:
    """Return what markers of requirements are evaluated with."""
    here = {key: str(value) for key, value in default_environment().items()}
    there = {"python_version": python, "python_full_version": f"{python}.0"}
    there |= {"platform_machine": machine, "platform_system": "Linux", "sys_platform": "linux"}
    return here | there | {"os_name": "posix", "implementation_name": "cpython", "extra": ""}


def roots(there: dict[str, str]) -> list[str]:
    """Return the packages that setup.cfg requires, but for `LEFT_OUT`, and Trainer's."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].strip().splitlines()
    return [*(name for name in _named(required, there) if name not in LEFT_OUT), TRAINER]


def missing(have: Iterable[str], there: dict[str, str]) -> set[str]:
    """Return the packages to bring, by canonical name, without what is there.

    Of what is there only the direct requirements are taken to be there too: what those require in
    turn depends on their versions, which are others there.
    """
    brought = {canonicalize_name(name) for name in have}
    brought |= {inner for name in brought for inner in required_by(name, there)} - ALSO
    found: set[str] = set()
    left = roots(there)
    while left:
        name = left.pop()
        if name not in found | brought:
            found.add(name)
            left += required_by(name, there)
    return found


def required_by(name: str, there: dict[str, str]) -> list[str]:
    """Return what a package that is installed here requires, extras left out."""
    return _named(importlib.metadata.requires(name) or [], there)


def _named(requirements: Iterable[str], there: dict[str, str]) -> list[str]:
    read = [Requirement(line) for line in requirements]
    return [
        canonicalize_name(one.name)
        for one in read
        if one.marker is None or one.marker.evaluate(there)
    ]


def versions() -> dict[str, str]:
    """Return {canonical name: version} of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.partition(";")[0].strip().split("==") for line in lines if "==" in line[:60])
    return {canonicalize_name(name): version for name, version in pins}


if __name__ == "__main__":
    main()
