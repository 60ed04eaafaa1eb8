"""`python zerolm/run_module.py MODULE ARGUMENTS`: `python -m MODULE` without the directory's files.

`python -m` puts the working directory before the standard library, so a json.py or queue.py there
is imported in place of Python's own (`python -P`, which avoids this, needs Python 3.11). Must not
be imported: `zerolm.common.shipped` builds the command.
"""

import os  # Python itself has imported it
import sys

HERE = __file__.rpartition("/")[0]
ROOT = HERE.rpartition("/")[0]
UNWANTED = {"", HERE}
try:
    directory = os.getcwd()  # noqa: PTH109, pathlib would be imported from it
    if directory not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        UNWANTED.add(directory)  # an empty entry of PYTHONPATH, made absolute
except OSError:  # the directory was deleted
    pass
sys.path[:] = [entry for entry in sys.path if entry not in UNWANTED]
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


def main() -> None:
    import runpy

    from zerolm.common.shipped import shield

    shield(os.environ)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
