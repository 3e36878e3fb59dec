"""The picture of the rules: all of them, the optional one told apart, and every line of text within its box."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from draftsmith import dag_picture
from draftsmith.report import dag

SVG = "{http://www.w3.org/2000/svg}"
# Pixels that a character of 11 px takes on average in DejaVu Sans, among the widest of the fonts that system-ui may be.
WIDE = 5.8


def boxes(picture: str) -> dict[str, tuple[ElementTree.Element, str]]:
    """Each rule's rectangle and the line below its name."""
    root = ElementTree.fromstring(picture)
    texts = [(text, text.text or "") for text in root.findall(f"{SVG}text")]
    assert not [text for text, _ in texts if "textLength" in text.attrib], "squeezed"
    names = [words for text, words in texts if text.get("class") != "what"]
    lines = [words for text, words in texts if text.get("class") == "what"]
    rectangles = root.findall(f"{SVG}rect")
    return {name: (box, line) for name, box, line in zip(names, rectangles, lines, strict=True)}


def test_an_optional_rule_is_dashed_and_says_so() -> None:
    picture = dag_picture.svg(
        {"get_target": set(), "regenerate": {"get_target"}, "tokenize": {"regenerate"}, "own": set()}
    )
    found = boxes(picture)
    assert [name for name, (box, _) in found.items() if box.get("class") == "optional"] == ["regenerate"]
    assert [name for name, (_, line) in found.items() if "optional" in line] == ["regenerate"]
    assert re.search(r"\.optional \{[^}]*stroke-dasharray", picture)
    assert found["own"][1] == "", "a rule that is none of the package's has a box too"


def test_the_picture_of_the_readme_has_every_rule_of_its_table(repo: Path) -> None:
    table = set(re.findall(r"^\| `(\w+)` \| ", (repo / "README.md").read_text().split("| rule | does |")[1], re.M))
    assert "regenerate" in table
    assert set(boxes((repo / "docs/dag.svg").read_text())) == table
    assert set(dag.read_mermaid(repo / "docs/dag.mmd")) == table


def test_every_line_fits_into_its_box(repo: Path) -> None:
    for name, (box, line) in boxes((repo / "docs/dag.svg").read_text()).items():
        assert len(line) * WIDE + 8 < float(box.get("width", "0")), name
