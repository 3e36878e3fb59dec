"""What the processes of :mod:`draftsmith.tokenize.row_pool` need, imported once for all of them by the server that they are forked from."""

from draftsmith import tokenizers_alone
from draftsmith.tokenize import row_pool as row_pool

tokenizers_alone.load()
