"""``python -m qtensor``: the command line."""

from qtensor.cli import main

if __name__ == "__main__":
    main()
