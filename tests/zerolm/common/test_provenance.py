"""Which commit a result is said to come from."""

import importlib.metadata
import subprocess

from zerolm.common.provenance import git_commit, installed_version


def test_the_version_of_every_installed_package_is_that_of_importlib():
    names = {each.name for each in importlib.metadata.distributions()}
    assert len(names) > 20
    for name in names:
        assert installed_version(name) == importlib.metadata.version(name)
    assert installed_version("no-such-package") is None


def test_a_commit_is_named_only_for_files_that_git_tracks(tmp_path):
    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("tracked", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("")
    git("init")
    git("add", "tracked")
    git("commit", "-m", "one")
    assert git_commit(tmp_path / "tracked") == git("rev-parse", "HEAD")
    assert git_commit(tmp_path / "installed") is None
    (tmp_path / "tracked" / "a.py").write_text("x")
    assert git_commit(tmp_path / "tracked") == git("rev-parse", "HEAD") + "+changes"
