"""The console script `zerolm`: Ctrl-C ends it without a traceback, even during imports."""

from zerolm.common import interrupts


def console_script() -> int:
    interrupts.end_on_interrupt()
    from zerolm import __main__

    return __main__.console_script()
