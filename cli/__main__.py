"""``farm``, and ``python -m cli``: from the first moment on, Ctrl-C ends it without a traceback."""

import gc
import signal


def main() -> None:
    """The console script."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load there is nothing to put in order
    # A command makes many objects once, most of them modules: looking for garbage among them is a fifth of its start.
    gc.set_threshold(100_000)
    from cli.main import main as run

    signal.signal(signal.SIGINT, before)
    try:
        run()
    finally:
        gc.freeze()  # nor as it ends: where torch was imported that takes a second


if __name__ == "__main__":
    main()
