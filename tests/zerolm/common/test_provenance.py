"""Which commit a result is said to come from."""

import subprocess

from zerolm.common.provenance import git_commit


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
