"""Controls what Ctrl-C does to this process.

Imports almost nothing, since an interrupted import prints a traceback.
"""

import _signal  # the module `signal` imports other modules

_raised = False


def was_raised() -> bool:
    """Return whether Ctrl-C has raised KeyboardInterrupt since `raise_on_interrupt` was called."""
    return _raised


def end_on_interrupt() -> None:
    """Make Ctrl-C end this process without a traceback until another handler is installed."""
    if _signal.getsignal(_signal.SIGINT) in (_signal.default_int_handler, _raise):  # not ignored
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`: make Ctrl-C raise KeyboardInterrupt again."""
    if _signal.getsignal(_signal.SIGINT) == _signal.SIG_DFL:
        _signal.signal(_signal.SIGINT, _raise)


def _raise(*_: object) -> None:
    global _raised
    _raised = True
    raise KeyboardInterrupt
