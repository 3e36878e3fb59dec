"""Which files of a folder are conversations."""

from __future__ import annotations

from pathlib import Path

from draftsmith.source_files import within


def test_what_is_hidden_is_not_read(tmp_path: Path) -> None:
    """A copy that a notebook or a cache keeps would be read as more of the same; the folder itself may lie in a hidden one."""
    folder = tmp_path / ".cache" / "data"
    read = ["a.jsonl", "b.json", "deep/c.parquet", "deep/d.jsonl.gz"]
    others = [".hidden.jsonl", ".ipynb_checkpoints/a.jsonl", "deep/.cache/c.parquet", "readme.md", "table.csv"]
    for name in read + others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "named.jsonl").mkdir()
    (folder / "lost.jsonl").symlink_to(folder / "nowhere")
    assert [str(path.relative_to(folder)) for path in within(folder)] == sorted([*read, "lost.jsonl"])
