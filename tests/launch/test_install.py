"""launch/install.py: pip's settings for uv, the build of torch, and progress without a terminal."""

import sys
import zipfile
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch import install

PINS = install.pins()
PIP = [*install.PIP, "install"]


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


@pytest.fixture(params=["uv", pytest.param("pip", marks=pytest.mark.soak)])
def new_installer(request, tmp_path, monkeypatch):
    """Make an installer of a pip that is configured for two directories of wheels and no index."""
    for name in [*install.os.environ]:
        if name.startswith(("PIP_", "UV_", "ZEROLM_")):
            monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nno-index = true\n[install]\nfind-links = nowhere\n")
    write_wheel(tmp_path / "some", "torch", "0.9+cpu")
    write_wheel(tmp_path / "more", "torch", "1.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")  # an installer sets it
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'some'} {tmp_path / 'more'}")
    monkeypatch.setattr(install, "LOG", tmp_path / "setup.log")
    install.LOG.touch()
    monkeypatch.setattr(install, "CONSTRAINTS", tmp_path / "constraints.txt")
    # Another version than that of this environment, which pip counts as offered, and set-up keeps.
    monkeypatch.setattr(install, "pins", lambda: PINS | {"torch": "0.9"})
    monkeypatch.setattr(install, "has_nvidia_device", lambda: False)

    def make():
        installer = install.Installer()
        if request.param == "uv" and len(installer.programs) == 1:
            pytest.skip("uv is not installed by launch/setup.sh here")
        installer.programs = installer.programs[:1] if request.param == "uv" else [PIP]
        return installer

    return make


def test_an_installer_sees_all_places_that_pip_is_configured_for(new_installer):
    offers = new_installer().offers
    assert [offers(f"torch=={each}") for each in ("0.9+cpu", "1.0", "0.1")] == [True, True, False]


def test_uv_gets_the_places_of_wheels_that_exist_as_pip_finds_them(
    new_installer, monkeypatch, tmp_path, capsys
):
    write_wheel(tmp_path / "home", "torch", "0.9+cpu")
    missing = (tmp_path / "none").as_uri()
    text = f"[global]\nno-index = true\nfind-links =\n    nowhere\n    {missing}\n    ~/home\n"
    (tmp_path / "pip.conf").write_text(text + f"    {(tmp_path / 'more').as_uri()}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIP_FIND_LINKS")
    offers = new_installer().offers
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "find-links" in line] == [
        f"setup: note: find-links {each}: no such file or directory: ignored"
        for each in ("nowhere", missing)
    ]
    assert [offers(f"torch=={each}") for each in ("0.9+cpu", "1.0", "0.1")] == [True, True, False]


def test_the_tests_need_the_headers_of_python_and_setup_says_so_before_it_installs(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(install, "HEADER", tmp_path / "Python.h")
    monkeypatch.setattr(install, "LOG", tmp_path / "setup.log")
    with pytest.raises(SystemExit, match=r"no .*/Python\.h: .*apt-get install python3-dev"):
        install.main(["dev"])
    assert not install.LOG.exists()


def test_torch_is_a_cpu_build_where_there_is_one_and_no_device(
    new_installer, monkeypatch, capsys, tmp_path
):
    assert install.choose_torch(new_installer()) == "==0.9+cpu"
    assert "no NVIDIA device. ZEROLM_TORCH=VERSION" in capsys.readouterr().out

    (tmp_path / "some" / "torch-0.9+cpu-py3-none-any.whl").unlink()
    assert install.choose_torch(new_installer()) == "==0.9"
    printed = capsys.readouterr().out
    assert "2.5 GB" in printed
    assert f"ZEROLM_TORCH_INDEX={install.CPU_INDEX} bash launch/setup.sh" in printed

    monkeypatch.setattr(install, "has_nvidia_device", lambda: True)
    assert install.choose_torch(new_installer()) == "==0.9,!=0.9+cpu"
    monkeypatch.setenv("ZEROLM_TORCH", "2.0+rocm")
    assert install.choose_torch(new_installer()) == "==2.0+rocm"


def test_an_index_that_is_named_later_replaces_the_default_build(
    new_installer, monkeypatch, tmp_path
):
    files = tmp_path / "index" / "torch"
    files.mkdir(parents=True)
    (wheel,) = (tmp_path / "some").glob("*.whl")
    wheel.rename(files / wheel.name)
    (files / "index.html").write_text('<a href="torch-0.9%2Bcpu-py3-none-any.whl">torch</a>')
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", files.parent.as_uri())
    monkeypatch.setenv("ZEROLM_TORCH_INDEX", files.parent.as_uri())
    installer = new_installer()
    found = SimpleNamespace(version="0.9", locate_file=lambda _: sys.prefix)
    monkeypatch.setattr(install, "installed", lambda name: found)
    assert install.choose_torch(installer) == "==0.9+cpu"
    monkeypatch.delenv("ZEROLM_TORCH_INDEX")
    assert install.choose_torch(installer) == "==0.9"


def test_what_the_first_program_cannot_install_the_second_does_and_compiles(
    new_installer, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python itself never would
    installer = new_installer()
    failing = "import sys; sys.exit('error: no index\\n  cause: it is down\\n  cause: no route')"
    installer.programs.insert(0, [sys.executable, "-c", failing])
    install.write_constraints("==0.9+cpu")
    installer.install("torch", "--target", str(tmp_path / "target"), "torch")
    assert (tmp_path / "target" / "torch-0.9+cpu.dist-info").is_dir()
    assert list(tmp_path.glob("target/__pycache__/torch.*.pyc"))
    note = "setup: note: trying pip, since error: no index: it is down: no route\n"
    assert f": failed: {sys.executable}\n{note}setup: install torch" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"its complete output is in .*setup\.log"):
        installer.install("torch", "torch==1.0")


def test_a_stage_that_takes_long_prints_its_progress(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(install, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(install, "PROGRESS_SECONDS", 0.3)
    code = "import time; print('Downloading x (2.0MiB)', flush=True); time.sleep(1.5)"
    assert install.run_stage("install x", [sys.executable, "-c", code])
    first, *between, last = capsys.readouterr().out.splitlines()
    assert first == "setup: install x ..." and last.endswith("s, 2 MB to download: done")
    assert between[-1].endswith("s, 2 MB to download"), between


def test_constraints_name_one_version_for_each_python():
    lines = (install.ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] != "#"]
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        names = [
            canonicalize_name(pin.name)
            for pin in pins
            if pin.marker is None or pin.marker.evaluate({"python_version": version})
        ]
        assert len(names) == len(set(names)) and {"torch", "transformers", "uv"} <= set(names)


def test_an_unknown_extra_is_refused_with_those_that_exist():
    with pytest.raises(SystemExit, match=r"^setup: no extra deb in setup.cfg. It has .*dedup"):
        install.main(["deb"])
