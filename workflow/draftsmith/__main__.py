"""``python -m draftsmith`` is the same as ``draftsmith``."""

from draftsmith.cli import main

if __name__ == "__main__":
    main()
