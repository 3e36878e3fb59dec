"""Languages of texts, without what a chat template adds to each of them."""

from __future__ import annotations

from draftsmith.look import languages


def test_languages_by_hand() -> None:
    texts = [
        "The weather is very nice today and we want to go for a walk.",
        "Das Wetter ist heute sehr schön und wir möchten spazieren gehen.",
        "今天天气很好，我们想去散步。",  # noqa: RUF001
        "I would like to know where the station is.",
        "x = 3; y = 4",
        "",
    ]
    assert languages.count(texts) == {"en": 2, "und": 2, "de": 1, "zh": 1}


def test_lines_that_many_texts_share_do_not_decide() -> None:
    questions = ["Wo ist der Bahnhof?", "Wie spät ist es?", "Warum ist der Himmel blau?", "user"]
    decoded = [f"system\nYou are a helpful assistant named Somebody.\nuser\n{text}\nassistant" for text in questions]
    found = languages.without_headers({"train": decoded, "evaluation": ["Wer bist du?\nuser"]})
    assert found["train"][:3] == questions[:3]
    # Nothing of its own: left as it is.
    assert found["train"][3] == decoded[3]
    assert found["evaluation"] == ["Wer bist du?"]
    assert languages.count(found["train"][:3]) == {"de": 3}


def test_a_line_that_few_share_stays() -> None:
    texts = ["Translate this.\nLe chat dort.", "Translate this.\nLe chien mange.", "Hello"]
    assert languages.without_headers({"train": texts}) == {"train": texts}
