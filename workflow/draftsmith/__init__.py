"""Draftsmith: from conversations and a target LLM to a served and measured EAGLE-3 draft."""

__version__ = "0.1.0"
