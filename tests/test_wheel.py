"""A wheel that is built from the tree works outside of a checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT, tracked
from tests.launching import environment, write_shards

BUILT_FROM = ("pretrain.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("zerolm", "data_prep", "launch", "ds_configs", "model_configs")
SOURCES = tracked(*BUILT_FROM, *(f"{name}/**" for name in PACKAGES))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A directory in which the wheel is installed; built from a copy, as pip writes to the tree."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for path in SOURCES:
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tree, tree],
        cwd=tree, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def call(site: Path, directory: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `zerolm` as the wheel's console script does, in a directory outside of the checkout.

    PYTHONPATH is searched before an editable installation of the checkout.
    """
    script = (
        "import sys; from zerolm.console import console_script; import zerolm\n"
        "assert zerolm.__file__.startswith(sys.argv.pop(1)), zerolm.__file__\n"
        "sys.exit(console_script())"
    )
    return subprocess.run(
        [sys.executable, "-c", script, site, *map(str, words)],
        cwd=directory, env=environment(PYTHONPATH=str(site)), capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


def test_the_wheel_has_what_a_checkout_has(site):
    shipped = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
    shipped = {path for path in shipped if not path.parts[0].endswith(".dist-info")}
    wanted = {Path("pretrain.py"), Path("launch/hostfile.example")}
    for path in SOURCES:
        if path.suffix in (".py", ".json", ".html") or path.parent.name == "assets":
            wanted.add(path.relative_to(ROOT))
    assert shipped == wanted
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    assert "zerolm = zerolm.console:console_script" in entry_points.read_text()


@pytest.mark.soak  # always: tests/setup_rotation.py installs and checks
def test_the_installed_wheel_checks_a_run_with_shipped_configs(site, tmp_path):
    shards = write_shards(tmp_path / "shards", 50)
    model, profile = "model_configs/tiny.json", "ds_configs/zero1.json"
    words = ["train", "--check", "--model_config", model, "--deepspeed_config", profile]
    words += ["--data", shards, "--run_dir", "run", "--seq_len", 32, "--num_gpus", 2]
    done = call(site, tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (model, profile):
        assert f"note: {name}: not in this directory; using {site / name}" in done.stdout
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / profile).write_text("{}x")
    own = call(site, tmp_path, *words)  # the user's own file of that name comes first
    assert own.returncode == 2 and f"{profile}: cannot be read as JSON" in own.stderr
    helped = call(site, tmp_path, "data", "--help")
    assert helped.returncode == 0 and "tokenize" in helped.stdout
