"""What the checks look at: read, opened or asked of vLLM when the first of them needs it, and kept."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from draftsmith import engine, hardware, vllm_compat
from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.layers import resolve_layers
from draftsmith.rows import read_rows
from draftsmith.verdict import Skip, sentence, shortened

T = TypeVar("T")
# What vLLM and transformers say of a model that they do not have.
_UNKNOWN = ("are not supported for now", "is not supported anymore", "not supported in-tree", "does not recognize")
# A prompt of L tokens and the one token that ends it take L + 1 positions; one more is margin.
MARGIN = 2


class EngineRefused(DraftsmithError):
    """vLLM does not start with these arguments."""


class UnknownArchitecture(EngineRefused):
    """vLLM has no model class for the target."""


class Subject:
    """A run before its first load: ``target`` is target.json's content, ``tokenised`` that of tokenize.json."""

    def __init__(
        self, config: Config, target: dict[str, Any], rows: Path, tokenised: dict[str, Any], granted: int | None
    ) -> None:
        self.config, self.target, self.rows, self.tokenised, self.granted = config, target, rows, tokenised, granted
        self.folder = Path(target["path"])
        self.dtype = hardware.target_dtype(config.target.dtype, target["torch_dtype"])
        self.on_cpu = engine.on_cpu(config)
        self._kept: dict[str, Any] = {}

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Tokens of each row, by its id; raises :class:`DraftsmithError` when there is no row."""
        table = read_rows(self.rows, ["row_id", "length"])
        if table.empty:
            raise DraftsmithError(f"{self.rows}: holds no rows; run the stage tokenize again, and look into its report")
        return dict(zip(table["row_id"], (int(length) for length in table["length"]), strict=True))

    @property
    def layers(self) -> list[int]:
        """The layer ids; raises :class:`DraftsmithError` for such as cannot be."""
        return resolve_layers(self.config.target.layers, self.target["num_layers"])

    @property
    def architectures(self) -> list[str]:
        """What the checkpoint, or an override of its config, says that it is."""
        overrides = self.config.engine.args.get("hf_overrides")
        overridden = overrides.get("architectures") if isinstance(overrides, dict) else None
        return list(overridden or self.target.get("architectures") or [])

    @property
    def chat(self) -> Chat:
        """The target's tokenizer with its chat template; raises :class:`DraftsmithError` when it cannot be opened."""
        return self._once("chat", self._open_chat)

    @property
    def model_class(self) -> type[Any] | None:
        """vLLM's own class for the target; None when it has none."""
        return self._once("model class", lambda: vllm_compat.model_class(self.architectures))

    @property
    def view(self) -> vllm_compat.EngineView:
        """What vLLM makes of the target; raises :class:`EngineRefused` with its reason."""
        return self._once("view", self._look)

    def unknown_arguments(self) -> list[str]:
        """Keys of engine.args that are no arguments of the installed vLLM."""
        known = self._once("arguments", vllm_compat.known_arguments)
        return [name for name in self.config.engine.args if name not in known]

    def _once(self, name: str, call: Callable[[], T]) -> T:
        # An error is kept like a value: what failed once is not tried again for the next check.
        if name not in self._kept:
            try:
                self._kept[name] = call()
            except Exception as error:
                self._kept[name] = error
        if isinstance(self._kept[name], Exception):
            raise self._kept[name]
        return self._kept[name]  # type: ignore[no-any-return]

    def _open_chat(self) -> Chat:
        try:
            return Chat.load(self.target, self.config.tokenize.template_args)
        except DraftsmithError:
            raise
        except Exception as error:
            # transformers, tokenizers and code of the checkpoint each raise their own kinds.
            raise DraftsmithError(
                f"{self.folder}: its tokenizer cannot be opened ({sentence(error)}); fetch its files again, and "
                "set target.trust_remote_code where they bring Python code"
            ) from error

    def _look(self) -> vllm_compat.EngineView:
        longest = max(needed(lambda: self.lengths, "row lengths").values())
        own = self.model_class
        arguments = engine.vllm_arguments(self.config, self.target, longest + MARGIN)
        # As the extraction does.
        arguments["enable_prefix_caching"] = False
        for name in self.unknown_arguments():
            # Told of in their own words; what the others would do is told as well.
            del arguments[name]
        try:
            return vllm_compat.engine_view(arguments)
        except Exception as error:
            text = _first(error)
            if own is None and any(words in text for words in _UNKNOWN):
                # Lists of all that there is and advice follow.
                raise UnknownArchitecture(text.split(". ")[0].rstrip(".")) from error
            raise EngineRefused(text) from error


def _first(error: Exception) -> str:
    """The first fault of pydantic's list of them, or the text of any other error, in one line."""
    faults = getattr(error, "errors", None)
    if callable(faults) and (listed := faults()):
        where = ".".join(str(part) for part in listed[0]["loc"])
        said = str(listed[0]["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return shortened(f"{where}: {said}".removeprefix(": ")).rstrip(".")
    return sentence(error)


def needed(call: Callable[[], T], name: str) -> T:
    """What ``call`` gives, for a check that can do nothing without it; its own fault is told by the check ``name``."""
    try:
        return call()
    except DraftsmithError:
        raise Skip(left_out(name)) from None


def left_out(name: str) -> str:
    """Why a check is left out that needs what the check ``name`` looks at."""
    return f"left out: the check '{name}' did not pass"


def version(name: str) -> str | None:
    """The installed version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
