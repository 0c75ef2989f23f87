"""``farm`` and ``python -m cli``: Ctrl-C ends the program without a traceback, even while it is
loading.
"""

import gc
import signal


def main() -> None:
    """The console script."""
    from cli.streams import prepare

    prepare()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # it may be ignored, as in the background of a script
        # while modules are imported nothing needs cleaning up
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A command creates many objects once. Garbage collection among them takes a fifth of its start.
    gc.set_threshold(100_000)
    from cli.main import main as run

    signal.signal(signal.SIGINT, before)
    try:
        run()
    finally:
        gc.freeze()  # no collection at exit: with torch imported it takes a second


if __name__ == "__main__":
    main()
