"""Python imports this file by its name, where it is on the path."""

import soon  # noqa: F401
