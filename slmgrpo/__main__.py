"""Where `slmgrpo` and `python -m slmgrpo` start: the command line, and Ctrl-C before it is loaded."""

import sys


def main() -> None:
    """Run the command line; an early Ctrl-C ends as a later one does, without a traceback."""
    try:
        from slmgrpo.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
