"""Files that come with zerolm. A checkout and an installed wheel have them in the same places."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the checkout, or the site-packages directory
SCRIPT = ROOT / "pretrain.py"
DS_CONFIGS = ROOT / "ds_configs"
DIRECTORIES = ("ds_configs", "model_configs")


def find_config(path: str | Path) -> Path:
    """Return the path of a config file; `ds_configs/zero2.json` works from any directory.

    A relative path that does not exist here but names a file that comes with zerolm is that file.
    """
    path = Path(path)
    shipped = ROOT / path
    in_directory = path.parts[:1] in [(name,) for name in DIRECTORIES] and ".." not in path.parts
    return shipped if in_directory and not path.exists() and shipped.exists() else path


def shipped_notice(path: str | Path) -> str | None:
    """Return a line for the plan if `find_config` takes the file that comes with zerolm."""
    found = find_config(path)
    return None if found == Path(path) else f"{path}: not in this directory; using {found}"
