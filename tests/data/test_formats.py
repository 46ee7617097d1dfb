"""Rows: which format they have, what is wrong with them, and the sample they become."""

from typing import Any

import pytest

from toolkit.data.formats import Sample, check_row, detect_format, read_columns, to_sample, with_columns
from toolkit.errors import ToolkitError
from toolkit.job.job import Job

QUESTION = {"role": "user", "content": "Hej?"}
ANSWER = {"role": "assistant", "content": "Hello"}

ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hej?"}, {"from": "gpt", "value": "Hello"}]},
    "alpaca": {"instruction": "Hej?", "input": "", "output": "Hello"},
    "prompt_completion": {"prompt": "Hej?", "completion": "Hello"},
    "text": {"text": "Hello"},
}


def test_a_conversation_is_preferred_to_a_prompt_and_a_field_that_is_none_counts_as_missing() -> None:
    assert detect_format({"prompt": "Hej?", "completion": "Hello", **ROWS["messages"]}) == "messages"
    assert detect_format({"messages": None, "text": "Hello"}) == "text"


TURNS = {"messages": ROWS["messages"]["messages"], "conversations": ROWS["sharegpt"]["conversations"]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"message": TURNS["messages"]}, "messages=message"),
        ({"conversation": TURNS["conversations"], "id": 7}, "conversations=conversation"),
        ({"question": "Hej?", "answer": "Hello"}, "instruction=question output=answer"),
        ({"instruction": "Hej?", "context": "sv", "response": "Hello"}, "input=context output=response"),
        ({"Instruction": "Hej?", "Output": "Hello"}, "instruction=Instruction output=Output"),
        ({"prompts": "Hej?", "completions": "Hello"}, "prompt=prompts completion=completions"),
        ({"title": "Greetings", "content": "Hej"}, "text=content"),
        ({"prompt": "Hej?", "response": "Hello"}, "completion=response"),
        (
            {"system_prompt": "", "query": "Hej?", "response": "Hello"},
            "system=system_prompt instruction=query output=response",
        ),
        (
            {"question": "Hej?", "answers": {"text": ["Hello"], "start": [0]}},
            "instruction=question output=answers.text.0",
        ),
        ({"question": "Hej?", "answer": {"aliases": [], "value": "Hello"}}, "instruction=question output=answer.value"),
        ({"premise": "Hej", "hypothesis": "Hello"}, None),
        ({"question": "Hej?"}, None),  # without an answer
        ({"message": "Hej"}, None),  # not a conversation
    ],
)
def test_columns_of_another_name_are_asked_about_and_the_line_reads_them(
    row: dict[str, Any], words: str | None
) -> None:
    with pytest.raises(ToolkitError) as caught:
        detect_format(row)
    hint = str(caught.value.hint)
    if words is None:
        assert hint.startswith("expected one of: ")
        assert "instruction + output (alpaca)" in hint
        return
    assert hint == f"did you mean `--column {words}`?"
    columns = Job.from_argv(["--column", *words.split()]).column or {}
    data_format = detect_format(row, columns)
    check_row(with_columns(row, columns), data_format)


def test_columns_are_renamed_at_once_and_a_path_goes_into_objects_and_lists() -> None:
    swapped = with_columns({"prompt": "b", "completion": "a"}, {"prompt": "completion", "completion": "prompt"})
    assert swapped == {"prompt": "a", "completion": "b"}
    row = {"a.b": "dotted", "qa": {"answers": [{"text": "Hej"}]}, "id": 7}
    assert with_columns(row, {"text": "qa.answers.0.text"}) == {**row, "text": "Hej"}
    assert with_columns(row, {"text": "a.b"})["text"] == "dotted"
    assert with_columns(row, {"text": "qa.answers.1.text"})["text"] is None


def test_the_format_of_a_named_column_is_preferred() -> None:
    row = {**ROWS["messages"], "content": "Hello"}
    assert (detect_format(row), detect_format(row, {"text": "content"})) == ("messages", "text")
    assert detect_format(ROWS["messages"], {"instruction": "question"}) == "messages"  # of another data set


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("prompts=question", "prompt=question"),
        ("question=prompt", "prompt=question"),  # the other way round
        ("question", "instruction=question"),
        ("input=", "input=NAME"),
        ("body=content", "text=content"),
        ("=", "text=NAME"),
        ("txt=a b", "'text=a b'"),
    ],
)
def test_what_is_not_a_field_of_a_format_is_refused_with_the_fields(words: str, hint: str) -> None:
    with pytest.raises(ToolkitError, match="expected FIELD=COLUMN, and a field of messages, tools, conv") as caught:
        read_columns([words])
    assert caught.value.hint == f"did you mean `--column {hint}`?"
    with pytest.raises(ToolkitError) as caught:  # the whole line is the next thing to type
        read_columns(["output=answer", words])
    assert caught.value.hint == f"did you mean `--column output=answer {hint}`?"


def test_a_column_that_the_rows_do_not_have_names_the_nearest() -> None:
    row = {"question": "Hej?", "answers": {"text": "Hello"}}
    for column, close in (("answer.text", "answers.text"), ("zzz", "NAME")):
        with pytest.raises(ToolkitError, match=f"--column output={column}: .* theirs are question, answers") as caught:
            detect_format(row, {"instruction": "question", "output": column})
        assert caught.value.hint == f"did you mean `--column instruction=question output={close}`?"


def test_preference_data_is_told_the_module_that_trains_on_it() -> None:
    with pytest.raises(ToolkitError, match=r"preference data.*\n  hint: .*--module trl\.scripts\.dpo"):
        detect_format({"prompt": "Hej?", "chosen": "Hello", "rejected": "No"})


@pytest.mark.parametrize("data_format", ["messages", "sharegpt", "alpaca"])
def test_chat_formats_become_the_same_messages(data_format: str) -> None:
    assert to_sample(ROWS[data_format], data_format) == Sample(messages=[QUESTION, ANSWER])


def test_alpaca_system_and_input_are_kept_and_sharegpt_names_map_to_roles() -> None:
    sample = to_sample({"instruction": "Translate", "input": "Hej", "output": "Hello"}, "alpaca")
    assert (sample.messages or [])[0] == {"role": "user", "content": "Translate\n\nHej"}
    told = {"instruction": "Hej?", "output": "Hello", "system": "Be brief."}
    assert (to_sample(told, "alpaca").messages or [])[0] == {"role": "system", "content": "Be brief."}
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
        ({"instruction": "Hej?", "output": None}, "alpaca", "`output` is null; fields found: instruction"),
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
