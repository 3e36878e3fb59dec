"""Names the folder of everything that is answered alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from draftsmith import hardware
from draftsmith.chat import Chat
from draftsmith.config import Config

# Raise it when the same settings come to give other answers.
_FORMAT = 1


def fingerprint(config: Config, target: dict[str, Any], chat: Chat) -> str:
    """16 hex digits of all that changes answers: target, template, sampling, and who answers.

    The engine in this process and a server count as two, as a server's precision and arguments are its own; where the
    server is does not count, nor how patiently it is asked.
    """
    settings = config.regenerate
    sampling = settings.model_dump(
        mode="json", include={"max_tokens", "temperature", "top_p", "repetition_penalty", "seed"}
    )
    # Off, they were not there before.
    sampling |= {name: value for name in ("top_k", "min_p") if (value := getattr(settings, name))}
    # Both ways of dropping a cut answer end the conversation there; which of the two it is, is decided at the end.
    sampling["keep_truncated"] = settings.unfinished == "keep"
    what: dict[str, Any] = {
        "format": _FORMAT,
        "target": target["fingerprint"],
        "settings": sampling,
        "template": chat.template_sha256,
        "template_args": config.tokenize.template_args,
        "max_length": config.tokenize.max_length,
        "ends": sorted(chat.end_ids),
    }
    if settings.endpoints:
        what["server"] = {"model": settings.model, "api": settings.api}
    else:
        what["dtype"] = hardware.target_dtype(config.target.dtype, target["torch_dtype"])
        what |= {"engine_args": config.engine.args} if config.engine.args else {}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
