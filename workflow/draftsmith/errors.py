"""The one exception that a user is meant to read."""


class DraftsmithError(Exception):
    """Bad input or an unusable machine, told in one sentence that names the thing and the mend.

    The command line prints the text without a traceback and exits with 1. Anything else that is raised is a fault of
    the program or of the engine, and keeps its whole traceback.
    """
