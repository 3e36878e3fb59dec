"""``python -m draftsmith`` is the same as ``draftsmith``."""

from draftsmith.cli import main

main()
