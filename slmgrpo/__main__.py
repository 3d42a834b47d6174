"""`python -m slmgrpo` is the command line."""

from slmgrpo.cli import main

if __name__ == "__main__":
    main()
