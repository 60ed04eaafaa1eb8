"""The console script `zerolm`: Ctrl-C ends it without a traceback, whatever it imports."""

import os
import signal
import subprocess
import sys

import pytest

from tests.launching import ROOT, environment

INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if replaced:  # as by numpy's extension
                    raise ImportError("datetime")
                raise

module, _, replaced = sys.argv.pop(1).partition(":")
sys.meta_path.insert(0, Interrupt())
from zerolm.console import console_script
sys.exit(console_script())
"""


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("dataclasses", -signal.SIGINT, ""),
        ("data_prep.__main__", -signal.SIGINT, ""),
        ("zerolm.cli.status", -signal.SIGINT, ""),
        ("zerolm.report.status", 130, "zerolm: interrupted\n"),
        ("zerolm.report.status:replaced", 130, "zerolm: interrupted\n"),
    ],
)
def test_an_interrupt_during_imports_prints_no_traceback(tmp_path, module, code, message):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, "status", tmp_path],
        env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, message)
