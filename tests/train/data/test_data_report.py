"""The report on tokenised rows that is printed before training."""

from __future__ import annotations

from typing import Any

import datasets

from toolkit.train.data.data_report import preflight_lines, system_prompt_lines
from toolkit.train.data.tokenization import encode_rows, row_encoder, tokenize

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hej?"},
    {"role": "assistant", "content": "Hello"},
]


def test_the_report_names_the_format_and_shows_the_supervised_part(tokenizer: Any) -> None:
    rows = datasets.Dataset.from_list([{"prompt": " a", "completion": " b"}])
    result = tokenize(rows, tokenizer=tokenizer, data_format="prompt_completion", max_seq_length=128, loss_on=None)
    assert preflight_lines(result.stats) == [
        "data: prompt_completion format, 1 rows, 1 kept",
        "  3 tokens, 2 supervised (67%); longest row 3 tokens",
        "  0 rows truncated, 0 dropped without a supervised token",
        "  first row, supervised part between « and »:",
        "  |  a« b<|im_end|>»",
    ]


def test_a_system_prompt_that_no_row_takes_is_reported(tokenizer: Any) -> None:
    def lines(rows: list[dict[str, Any]], data_format: str, system_prompt: str | None = "Be kind.") -> list[str]:
        encoder = row_encoder(
            tokenizer=tokenizer, data_format=data_format, max_seq_length=128, loss_on=None, system_prompt=system_prompt
        )
        return system_prompt_lines([encode_rows(datasets.Dataset.from_list(rows), encoder)], system_prompt)

    assert lines([{"messages": MESSAGES}, {"messages": MESSAGES[1:]}], "messages") == []
    assert lines([{"text": "plain"}], "text", system_prompt=None) == []
    for warning in (lines([{"messages": MESSAGES}], "messages"), lines([{"text": "plain"}], "text")):
        assert [line.split(":")[1] for line in warning] == [" --system_prompt has no effect"]
