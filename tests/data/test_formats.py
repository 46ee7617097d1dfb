"""Rows: which format they have, what is wrong with them, and the sample they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.formats import FORMATS, Sample, check_row, detect_format, to_sample
from toolkit.errors import ToolkitError

QUESTION = {"role": "user", "content": "Hej?"}
ANSWER = {"role": "assistant", "content": "Hello"}

ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hej?"}, {"from": "gpt", "value": "Hello"}]},
    "alpaca": {"instruction": "Hej?", "input": "", "output": "Hello"},
    "prompt_completion": {"prompt": "Hej?", "completion": "Hello"},
    "text": {"text": "Hello"},
}


@pytest.mark.parametrize("data_format", FORMATS)
def test_each_format_is_detected_by_its_fields(data_format: str) -> None:
    assert detect_format({"id": 7, **ROWS[data_format]}) == data_format
    check_row(ROWS[data_format], data_format)


def test_a_conversation_is_preferred_to_a_prompt_and_a_field_that_is_none_counts_as_missing() -> None:
    assert detect_format({"prompt": "Hej?", "completion": "Hello", **ROWS["messages"]}) == "messages"
    assert detect_format({"messages": None, "text": "Hello"}) == "text"


def test_an_unknown_row_is_refused_with_the_fields_found_and_expected() -> None:
    with pytest.raises(ToolkitError, match="fields found: q, a") as caught:
        detect_format({"q": "Hej?", "a": "Hello"})
    assert "instruction + output (alpaca)" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "renames"),
    [
        (("message",), {"message": "messages"}),
        (("conversation", "id"), {"conversation": "conversations"}),
        (("question", "answer"), {"question": "instruction", "answer": "output"}),
        (("instruction", "response"), {"response": "output"}),
        (("Instruction", "Output"), {"Instruction": "instruction", "Output": "output"}),
        (("prompts", "completions"), {"prompts": "prompt", "completions": "completion"}),
        (("title", "content"), {"content": "text"}),
        (("prompt", "response"), {"response": "completion"}),
        (("premise", "hypothesis"), None),
        (("question",), None),  # without an answer
    ],
)
def test_fields_with_another_name_are_asked_about_and_the_renaming_runs(
    fields: tuple[str, ...], renames: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ToolkitError) as caught:
        detect_format(dict.fromkeys(fields, "Hej"))
    hint = str(caught.value.hint)
    if renames is None:
        assert hint.startswith("expected one of: ")
        return
    for name, field in renames.items():
        assert f"`{field}` for `{name}`" in hint
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text(json.dumps(dict.fromkeys(fields, "Hej")) + "\n")
    exec(hint.split("`")[-2])
    assert detect_format(json.loads(Path("NEW.jsonl").read_text()))


def test_preference_data_is_told_the_module_that_trains_on_it() -> None:
    with pytest.raises(ToolkitError, match=r"preference data.*\n  hint: .*--module trl\.scripts\.dpo"):
        detect_format({"prompt": "Hej?", "chosen": "Hello", "rejected": "No"})


@pytest.mark.parametrize("data_format", ["messages", "sharegpt", "alpaca"])
def test_chat_formats_become_the_same_messages(data_format: str) -> None:
    assert to_sample(ROWS[data_format], data_format) == Sample(messages=[QUESTION, ANSWER])


def test_alpaca_input_follows_the_instruction_and_sharegpt_names_map_to_roles() -> None:
    sample = to_sample({"instruction": "Translate", "input": "Hej", "output": "Hello"}, "alpaca")
    assert (sample.messages or [])[0] == {"role": "user", "content": "Translate\n\nHej"}
    names = ["system", "human", "model", "tool", "function_call", "observation"]
    row = {"conversations": [{"from": name, "value": "x"} for name in names]}
    check_row(row, "sharegpt")
    roles = [message["role"] for message in to_sample(row, "sharegpt").messages or []]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]


def test_tool_calls_are_kept_without_the_none_that_arrow_adds() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Lund", "country": None}}}
    row = {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": '[{"a": 1}]'}
    check_row(row, "messages")
    sample, kept = to_sample(row, "messages"), {"function": {"name": "weather", "arguments": {"city": "Lund"}}}
    assert sample.tools == [{"a": 1}]
    assert (sample.messages or [])[1] == {"role": "assistant", "content": "", "tool_calls": [kept]}


def test_prompt_and_completion_stay_strings_or_become_one_conversation() -> None:
    assert to_sample(ROWS["prompt_completion"], "prompt_completion") == Sample(prompt="Hej?", completion="Hello")
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}
    check_row(row, "prompt_completion")
    expected = Sample(messages=[QUESTION, ANSWER, QUESTION, ANSWER], first_supervised_message=3)
    assert to_sample(row, "prompt_completion") == expected


@pytest.mark.parametrize(
    ("row", "data_format", "message"),
    [
        ({"instruction": "Hej?"}, "alpaca", "no field `output`; fields found: instruction"),
        ({"instruction": "Hej?", "output": 5}, "alpaca", "`output` is number, expected a string"),
        ({"text": "\ud83d"}, "text", "`text` has an unpaired surrogate at character 0"),
        ({"messages": []}, "messages", "`messages` is empty"),
        ({"messages": "Hej?"}, "messages", "`messages` is string, expected a list of objects"),
        ({"messages": ["Hej?"]}, "messages", "message 1 of `messages` is string, expected an object"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "messages", "message 2 of `messages` has no `content`"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages", "the content of message 1 .* is list"),
        (
            {"messages": [{"role": "asistant", "content": ""}]},
            "messages",
            "role 'asistant'\n.*did you mean `assistant`",
        ),
        ({"messages": [{"from": "human", "value": ""}]}, "messages", "rename the field `messages` to `conversations`"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages", "the role of message 1 .* is list"),
        ({"messages": [QUESTION], "tools": "{"}, "messages", "`tools` is a string that is not JSON"),
        ({"conversations": [{"from": "gtp", "value": ""}]}, "sharegpt", "unknown role 'gtp'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "sharegpt", "has no `value`; fields found: from"),
        ({"prompt": "Hej?", "completion": [ANSWER]}, "prompt_completion", "`prompt` is string, expected a list"),
        ({"prompt": [QUESTION], "completion": []}, "prompt_completion", "`completion` is empty"),
    ],
)
def test_an_invalid_row_is_refused_with_the_field(row: dict[str, Any], data_format: str, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_row(row, data_format)
