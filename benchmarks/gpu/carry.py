"""Collect the wheels that benchmarks/gpu needs on a machine without a package index.

    python -m benchmarks.gpu.carry --python 3.12

Fills `.whl/`, which git ignores, with the requirements of setup.cfg and of Hugging Face Trainer and
all their dependencies, at the versions of constraints.txt and for the target's Python on Linux.
Packages in `--have` are on the target already. Dependencies are read from the metadata of installed
packages, so run it after launch/setup.sh. DeepSpeed is published as source only; its wheel is built
here, without operators.
"""

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

from benchmarks import ROOT, tables

SOURCE_ONLY = "deepspeed"
TRAINER = "accelerate"  # required by Hugging Face Trainer; in zerolm[dev]
NOT_NEEDED = {  # required by setup.cfg, but not imported by the benchmark
    "datasets": "for --hellaswag and data_prep",
    "isal": "for data_prep",
    "matplotlib": "for the HTML report, which --report_interval 0 turns off",
    "rich": "for zerolm status",
    "wandb": "turned off by --wandb off",
}
ALWAYS = {"typing-extensions"}  # pydantic needs a newer version than torch
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17)


def main() -> None:
    parser = tables.parser(__doc__, has_table=False)
    parser.add_argument("--python", default="3.12", help="Python version of the target")
    parser.add_argument("--machine", default="x86_64", help="architecture of the target")
    parser.add_argument(
        "--have", default="torch,transformers,numpy,pyarrow,pytest", help="packages on the target"
    )
    parser.add_argument("--output", type=Path, default=ROOT / ".whl")
    parser.add_argument("--most_mib", type=int, default=64, help="maximum total size in MiB")
    arguments = parser.parse_args()

    target = environment(arguments.python, arguments.machine)
    needed = missing(arguments.have.split(","), target)
    pins = versions(target)
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
         *(f"{name}=={pins[name]}" for name in sorted(needed - {SOURCE_ONLY}))],
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
    """Return the environment with which markers of requirements are evaluated."""
    here = {key: str(value) for key, value in default_environment().items()}
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    target |= {"platform_machine": machine, "platform_system": "Linux", "sys_platform": "linux"}
    return here | target | {"os_name": "posix", "implementation_name": "cpython", "extra": ""}


def roots(target: dict[str, str]) -> list[str]:
    """Return the packages that setup.cfg requires, without `NOT_NEEDED`, and Trainer's."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].strip().splitlines()
    return [*(name for name in _named(required, target) if name not in NOT_NEEDED), TRAINER]


def missing(have: Iterable[str], target: dict[str, str]) -> set[str]:
    """Return the canonical names of all packages to collect.

    The direct requirements of packages on the target are assumed to be there, too, but not those of
    further levels: they depend on versions, which may differ.
    """
    present = {canonicalize_name(name) for name in have}
    present |= {inner for name in present for inner in required_by(name, target)} - ALWAYS
    needed: set[str] = set()
    queue = roots(target)
    while queue:
        name = queue.pop()
        if name not in needed | present:
            needed.add(name)
            queue += required_by(name, target)
    return needed


def required_by(name: str, target: dict[str, str]) -> list[str]:
    """Return the requirements of a package that is installed here, without extras."""
    return _named(importlib.metadata.requires(name) or [], target)


def _named(requirements: Iterable[str], target: dict[str, str]) -> list[str]:
    parsed = [Requirement(line) for line in requirements]
    return [
        canonicalize_name(each.name)
        for each in parsed
        if each.marker is None or each.marker.evaluate(target)
    ]


def versions(target: dict[str, str]) -> dict[str, str]:
    """Return {canonical name: version} of constraints.txt for the target's Python."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(target)
    }


if __name__ == "__main__":
    main()
