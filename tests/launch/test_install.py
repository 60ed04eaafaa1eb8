"""launch/install.py: pip's settings for uv, the build of torch, and what a Python cannot have."""

import importlib.metadata
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from launch import install

NO_UV = "uv is not installed by launch/setup.sh here"


def write_wheel(directory, name, version):
    """Write a wheel of an empty module, as small as installers accept."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        for file, text in {"METADATA": metadata, "WHEEL": tags, "RECORD": ""}.items():
            wheel.writestr(f"{info}/{file}", text)


@pytest.fixture
def pip_configuration(tmp_path, monkeypatch):
    """Settings of pip: two directories of wheels instead of an index."""
    for name in [*install.os.environ]:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.write_text("[global]\ntimeout = 7\nno-index = true\n[install]\nfind-links = nowhere\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    write_wheel(tmp_path / "some", "torch", "0.9+cpu")
    write_wheel(tmp_path / "more", "torch", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'some'} {tmp_path / 'more'}")
    monkeypatch.setattr(install, "LOG", tmp_path / "setup.log")
    return file


def installer(monkeypatch, with_uv):
    if not with_uv:
        monkeypatch.setattr(install, "SAME_FOR_UV", set())  # as if a setting had no equivalent
        monkeypatch.setattr(install, "UV_VARIABLES", {})
    elif install.installed("uv") is None:
        pytest.skip(NO_UV)
    return install.Installer()


def test_settings_of_pip_are_read_with_its_precedence(pip_configuration, tmp_path):
    settings = install.pip_settings()
    links = settings.pop("find-links").split()
    assert links == [str(tmp_path / "some"), str(tmp_path / "more")]
    assert {name: settings[name] for name in ("timeout", "no-index")} == {
        "timeout": "7", "no-index": "true",
    }  # fmt: skip


def test_a_setting_without_an_equivalent_makes_pip_install(pip_configuration, monkeypatch, capsys):
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    assert install.Installer().uv == []
    assert "uv has no equivalent of pip's setting require-hashes" in capsys.readouterr().out


@pytest.mark.parametrize("with_uv", [True, False], ids=["uv", "pip"])
def test_an_installer_sees_all_places_that_pip_is_configured_for(
    pip_configuration, monkeypatch, with_uv
):
    chosen = installer(monkeypatch, with_uv)
    assert bool(chosen.uv) == with_uv
    offered = [chosen.offers(f"torch=={each}") for each in ("1.0", "0.1")]
    assert offered == [True, False]


@pytest.mark.parametrize("with_uv", [True, False], ids=["uv", "pip"])
def test_torch_is_a_cpu_build_where_there_is_one_and_no_device(
    pip_configuration, monkeypatch, capsys, tmp_path, with_uv
):
    chosen = installer(monkeypatch, with_uv)
    pinned = "0.9"  # not the one that runs this test: pip counts what is installed as offered
    monkeypatch.setattr(install, "pins", lambda: {"torch": pinned})
    monkeypatch.delenv("ZEROLM_TORCH", raising=False)
    monkeypatch.setattr(install, "installed", lambda name: None)
    monkeypatch.setattr(install, "has_nvidia_device", lambda: False)
    assert install.choose_torch(chosen) == f"=={pinned}+cpu"
    assert "no NVIDIA device. ZEROLM_TORCH=VERSION" in capsys.readouterr().out

    (tmp_path / "some" / f"torch-{pinned}+cpu-py3-none-any.whl").unlink()
    assert install.choose_torch(chosen) == f"=={pinned}"
    printed = capsys.readouterr().out
    assert f"ZEROLM_TORCH_INDEX={install.CPU_INDEX} bash launch/setup.sh" in printed

    monkeypatch.setattr(install, "has_nvidia_device", lambda: True)
    assert install.choose_torch(chosen) == f"=={pinned},!={pinned}+cpu"

    monkeypatch.setenv("ZEROLM_TORCH", "2.0+rocm")
    assert install.choose_torch(chosen) == "==2.0+rocm"


@pytest.mark.parametrize("with_uv", [True, False], ids=["uv", "pip"])
def test_an_index_that_is_named_later_replaces_the_default_build(
    pip_configuration, monkeypatch, tmp_path, with_uv
):
    files = tmp_path / "index" / "torch"
    files.parent.mkdir()
    write_wheel(files, "torch", "0.8+cpu")
    (file,) = files.iterdir()
    (files / "index.html").write_text(f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>')
    environment = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": files.parent.as_uri()}
    for name, value in {**environment, "ZEROLM_TORCH_INDEX": files.parent.as_uri()}.items():
        monkeypatch.setenv(name, value)
    chosen = installer(monkeypatch, with_uv)
    monkeypatch.setattr(install, "pins", lambda: {"torch": "0.8"})
    monkeypatch.delenv("ZEROLM_TORCH", raising=False)
    found = SimpleNamespace(version="0.8", locate_file=lambda _: sys.prefix)
    monkeypatch.setattr(install, "installed", lambda name: found)
    monkeypatch.setattr(install, "has_nvidia_device", lambda: False)
    assert install.choose_torch(chosen) == "==0.8+cpu"
    monkeypatch.delenv("ZEROLM_TORCH_INDEX")
    assert install.choose_torch(chosen) == "==0.8"


def test_a_stage_that_takes_long_prints_what_it_does_where_there_is_no_terminal(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(install, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(install, "PROGRESS_SECONDS", 0.3)
    code = "import time; print('Downloading x (2.0MiB)', flush=True); time.sleep(1.5)"
    assert install.run_stage("install x", [sys.executable, "-c", code], {}) == (True, 2.0)
    first, *between, last = capsys.readouterr().out.splitlines()
    assert first == "setup: install x ..." and last.startswith("setup: install x ... 2 MB, ")
    assert between[-1].endswith(" s, 2 MB to download"), between


@pytest.mark.parametrize("with_uv", [True, False], ids=["uv", "pip"])
def test_what_is_installed_is_compiled_where_python_never_would(
    pip_configuration, monkeypatch, tmp_path, with_uv
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    chosen = installer(monkeypatch, with_uv)
    target = tmp_path / "installed"
    command, environment = chosen.command(["--target", str(target), "torch==1.0"], pinned=False)
    subprocess.run(command, env={**install.os.environ, **environment}, check=True, timeout=60)
    assert list(target.glob("__pycache__/torch.*.pyc"))


def test_an_installed_build_of_the_pinned_torch_is_kept(capsys):
    if install.outside(importlib.metadata.distribution("torch")):
        pytest.skip("the torch of the machine is used")
    version = importlib.metadata.version("torch")
    if version.partition("+")[0] != install.pins()["torch"]:
        pytest.skip("another torch is installed")
    assert install.choose_torch(None) == f"=={version}"


def test_dev_includes_other_extras_and_leaves_out_what_this_python_cannot_have():
    found = {name: applies for name, _, applies in install.requirements_of(["dev"])}
    assert {"rensa", "gigatoken", "s3fs", "lm-eval", "pytest", "fasttext-numpy2-wheel"} <= set(
        found
    )
    absent = {name for name, applies in found.items() if not applies}
    assert absent == ({"fasttext-numpy2-wheel"} if sys.version_info >= (3, 13) else set())
    assert set(install.OFF_WITHOUT) <= set(found)


def test_constraints_name_one_version_for_each_python():
    from packaging.requirements import Requirement

    lines = (install.ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] != "#"]
    for version in ("3.10", "3.11", "3.12", "3.13"):
        names = [
            install.normalized(pin.name)
            for pin in pins
            if pin.marker is None or pin.marker.evaluate({"python_version": version})
        ]
        assert len(names) == len(set(names)) and {"torch", "transformers", "uv"} <= set(names)


def test_an_unknown_extra_is_refused_with_those_that_exist():
    result = subprocess.run(
        [sys.executable, "-I", install.__file__, "deb"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.startswith("setup: no extra deb in setup.cfg. It has ")
    assert "dedup" in result.stderr and "Traceback" not in result.stderr
