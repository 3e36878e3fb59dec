"""transformers without PyTorch: tokenizers work, and PyTorch is there for whoever asks for it later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import chats

CODE = """
import sys
{before}
from draftsmith import tokenizers_alone
tokenizers_alone.load()
print("torch" in sys.modules, end=" ")
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer
from transformers.utils import is_torch_available
tokenizer = AutoTokenizer.from_pretrained({folder!r})
ids = tokenizer.apply_chat_template([{{"role": "user", "content": "hello"}}], tokenize=True, return_dict=False)
print(is_torch_available(), ids, end=" ")
import torch
print(torch.ones(2).sum().item())
"""


def run(folder: Path, before: str = "") -> tuple[str, str]:
    code = CODE.format(folder=str(folder), before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_tokenizers_work_without_it_and_as_with_it(tmp_path: Path) -> None:
    tokenizer = chats.fast(chats.CHATML)
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=True, return_dict=False)
    out, err = run(tmp_path)
    assert out == f"False False {expected} 2.0"
    assert "PyTorch was not found" not in err


def test_where_it_is_imported_already_nothing_is_done(tmp_path: Path) -> None:
    chats.fast(chats.CHATML).save_pretrained(tmp_path)
    assert run(tmp_path, "import torch")[0].startswith("True True [")
