"""What the processes of :mod:`draftsmith.row_pool` need, imported once for all of them by the server that they are forked from."""

from draftsmith import row_pool as row_pool
from draftsmith import tokenizers_alone

tokenizers_alone.load()
