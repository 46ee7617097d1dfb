"""Tokenisation: supervised tokens, statistics, the cache, and refused rows."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest
from conversations import CHATML_WITH_GENERATION_BLOCK, RENDERED, TURNS, marked, tokenized, with_template
from dataset_folders import write_dataset_folder

from toolkit.data.data_files import DataSource, resolve_sources
from toolkit.data.formats import Sample
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import DataArguments
from toolkit.train.data.collation import Collator
from toolkit.train.data.data_report import DataStats, preflight_lines, system_prompt_lines
from toolkit.train.data.tokenization import encode, encode_rows, load_hub, load_rows, row_encoder


def test_text_or_a_completion_is_supervised_and_ended_once_and_a_prompt_is_not(tokenizer: Any) -> None:
    sample = Sample(prompt="2 + 2 =", completion=" 4")
    assert marked(sample, tokenizer) == "2 + 2 =« 4<|im_end|>»"
    assert marked(sample, tokenizer, supervise_all=True) == "«2 + 2 = 4<|im_end|>»"
    for text in ("Hello", "Hello<|im_end|>"):
        assert marked(Sample(text=text), tokenizer) == "«Hello<|im_end|>»"


@pytest.mark.parametrize(
    ("rows", "data_format", "changes", "message"),
    [
        ([{"messages": TURNS[:2]}] * 2, "messages", {}, "no supervised token in any of the 2 rows: no assistant turn"),
        ([{"messages": TURNS}], "messages", {"max_seq_length": 8}, "every prompt fills max_seq_length=8"),
        ([{"messages": TURNS}, {"messages": []}], "messages", {}, "row 2: `messages` is empty"),
        ([{"text": "Hello"}], "text", {"loss_on": "assistant"}, "plain text"),
    ],
)
def test_rows_without_a_target_are_refused(
    rows: Any, data_format: str, changes: Any, message: str, tokenizer: Any
) -> None:
    with pytest.raises(ToolkitError, match=message) as caught:
        tokenized(rows, tokenizer, data_format, **changes)
    if "max_seq_length" in changes:
        tokens = len(encode(Sample(messages=TURNS), tokenizer)[0])
        assert caught.value.hint == f"raise it: the longest row has {tokens} tokens"


def test_the_end_of_turn_is_supervised_although_it_is_the_pad_token(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows, _ = tokenized([{"messages": TURNS}, {"messages": TURNS[:3]}], tokenizer, "messages")
    batch = Collator(tokenizer)(list(rows))
    learned_ends = (batch["labels"] == tokenizer.pad_token_id).sum(dim=1)
    assert learned_ends.tolist() == [2, 1]  # one per turn of the assistant, none for the padding


def test_a_generation_block_gives_the_same_spans_as_prefixes(tokenizer: Any) -> None:
    blocks = with_template(tokenizer, CHATML_WITH_GENERATION_BLOCK)
    without = CHATML_WITH_GENERATION_BLOCK.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    by_block = encode(Sample(messages=TURNS), blocks)
    assert by_block == encode(Sample(messages=TURNS), tokenizer)
    assert by_block == encode(Sample(messages=TURNS), with_template(tokenizer, without))


@pytest.mark.parametrize("template", [None, CHATML_WITH_GENERATION_BLOCK])
def test_the_turns_of_a_prompt_are_context_unless_the_loss_is_on_all(tokenizer: Any, template: str | None) -> None:
    tokenizer = with_template(tokenizer, template or tokenizer.chat_template)
    sample = Sample(messages=TURNS, first_supervised_message=3)
    assert marked(sample, tokenizer) == RENDERED.replace("«Hello 🙂\n\nyou<|im_end|>»", "Hello 🙂\n\nyou<|im_end|>")
    every = RENDERED.replace("«", "").replace("»", "")
    assert marked(Sample(messages=TURNS), tokenizer, supervise_all=True) == f"«{every}»"


def test_only_turns_of_the_assistant_are_supervised_wherever_its_markers_are(tokenizer: Any) -> None:
    assert marked(Sample(messages=TURNS), tokenizer) == RENDERED
    starts = [{"role": "assistant", "content": "Welcome"}, {"role": "user", "content": "Hej?"}]
    expected = "<|im_start|>assistant\n«Welcome<|im_end|>»\n<|im_start|>user\nHej?<|im_end|>\n"
    assert marked(Sample(messages=starts), tokenizer).endswith(expected)
    user = {"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nHa"}
    text = marked(Sample(messages=[user, {"role": "assistant", "content": "Ha"}]), tokenizer)
    assert text.count("«") == 1
    assert text.endswith("<|im_start|>assistant\n«Ha<|im_end|>»\n")


@pytest.mark.parametrize("max_seq_length", [20, 29, 30, 1000])
def test_supervision_before_the_cut_does_not_depend_on_the_cut(tokenizer: Any, max_seq_length: int) -> None:
    input_ids, supervised = encode(Sample(messages=TURNS * 3), tokenizer)
    cut_ids, cut_supervised = encode(Sample(messages=TURNS * 3), tokenizer, max_seq_length=max_seq_length)
    assert cut_ids == input_ids
    assert cut_supervised[:max_seq_length] == supervised[:max_seq_length]


def test_tools_and_their_calls_reach_the_template(tokenizer: Any) -> None:
    template = (
        "{% for tool in tools %}[{{ tool['function']['name'] }}]{% endfor %}{% for message in messages %}"
        "{{ message['role'] }}:{{ message['content'] }}{% for call in message.get('tool_calls', []) %}"
        "<{{ call['function']['name'] }}={{ call['function']['arguments'] | tojson }}>{% endfor %};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Lund"}}}
    turns = [{"role": "user", "content": "Hej"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    input_ids, _ = encode(Sample(messages=turns, tools=tools), with_template(tokenizer, template), supervise_all=True)
    assert tokenizer.decode(input_ids) == '[weather]user:Hej;assistant:<weather={"city": "Lund"}>;'


REWRITES_EARLIER_TURNS = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}|"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message", "hint"),
    [
        (REWRITES_EARLIER_TURNS, "row 2: the chat template renders message 3 differently", "{% generation %}"),
        (None, "row 1: .*has no chat template", "--chat_template FILE"),
        ("{{ raise_exception('must alternate') }}", r"row 1: .* refuses .*\(system, user, .*must alternate", "FILE"),
        ("{% for %}", r"row 1: .* refuses .*\(system, user, .*Expected an expression", "FILE"),
        ("{{ " + 5_000 * "x" + ".y }}", r"row 1: .* refuses this conversation \([a-z, ]+\): .{300}\n", "FILE"),
    ],
)
def test_a_template_that_hides_turns_is_reported(tokenizer: Any, template: str | None, message: str, hint: str) -> None:
    with pytest.raises(ToolkitError, match=message) as caught:
        tokenized([{"messages": TURNS[:3]}, {"messages": TURNS}], with_template(tokenizer, template), "messages")
    assert hint in str(caught.value.hint)


def test_the_statistics_count_rows_tokens_and_truncated_rows(tokenizer: Any) -> None:
    # " a" is one token: 2 + end, 4 + end (cut to 4), 1 + end, and an empty row whose only token nothing predicts.
    rows = [{"text": " a a"}, {"text": " a a a a"}, {"text": " a"}, {"text": ""}]
    dataset, stats = tokenized(rows, tokenizer, "text", max_seq_length=4)
    counts = {"rows": 4, "dropped_rows": 1, "epoch_rows": 3, "truncated_rows": 1, "longest_row_tokens": 5}
    counts |= {"tokens": 3 + 4 + 2, "supervised_tokens": 2 + 3 + 1}
    assert stats == DataStats(format="text", sample="« a a<|im_end|>»", **counts)
    assert dataset.column_names == ["input_ids", "labels", "length", "row", "supervised"]
    assert (dataset["length"][:], dataset["row"][:]) == ([3, 4, 2], [0, 1, 2])
    assert preflight_lines(stats)[-1] == "  | « a a<|im_end|>»"


@pytest.mark.parametrize(
    ("data_format", "rows", "warns"),
    [
        ("messages", [{"messages": TURNS}, {"messages": TURNS[1:]}], False),
        ("messages", [{"messages": TURNS}], True),
        ("text", [{"text": "plain"}], True),
    ],
)
def test_a_system_prompt_is_added_where_there_is_none(data_format: str, rows: Any, warns: bool, tokenizer: Any) -> None:
    encoder = row_encoder(tokenizer, data_format, DataArguments(max_seq_length=128, system_prompt="Be kind."))
    found = encode_rows(datasets.Dataset.from_list(rows), encoder)
    prompts = [tokenizer.decode(row["input_ids"]).split("<|im_end|>")[0].splitlines()[-1] for row in found]
    assert prompts == (["plain"] if data_format == "text" else ["Be brief.", "Be kind."][: len(rows)])
    assert len(set(found["supervised"][:])) == 1
    lines = system_prompt_lines([found], "Be kind.")
    assert [line.split(":")[1] for line in lines] == [" --system_prompt has no effect"] * warns
    assert system_prompt_lines([found], None) == []


def test_both_formats_of_real_data_give_the_same_tokens(tokenizer: Any, faq_alpaca: Path, faq_sharegpt: Path) -> None:
    (alpaca, first), (sharegpt, second) = (load_rows(str(path), "train") for path in (faq_alpaca, faq_sharegpt))
    assert (first, second) == ("alpaca", "sharegpt")
    (one, stats), (other, _) = tokenized(alpaca, tokenizer, first), tokenized(sharegpt, tokenizer, second)
    assert one[:] == other[:]
    assert (stats.rows, stats.tokens, stats.supervised_tokens) == (503, 50263, 29839)
    assert (stats.truncated_rows, stats.dropped_rows, stats.longest_row_tokens) == (68, 0, 169)


def test_an_invalid_row_of_a_file_is_reported_by_its_line(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps({"messages": TURNS}))
    dataset, data_format = load_rows(str(path), "train")
    with pytest.raises(ToolkitError, match="row 1, line 2: the data are conversations"):
        tokenized(dataset, with_template(tokenizer, None), data_format)


@pytest.mark.nightly
def test_a_file_is_never_in_memory_whole_and_its_rows_are_parsed_by_one_rank_of_a_node(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(8_000):  # more than `datasets` collects before it writes
            file.write(json.dumps({"text": str(number % 10) * 2**13}) + "\n")
    tracemalloc.start()
    first, _ = load_rows(str(path), "train")
    by_first_rank = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    again, data_format = load_rows(str(path), "train")
    by_next_rank = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(first), len(again), data_format, again._fingerprint) == (8_000, 8_000, "text", first._fingerprint)
    assert by_first_rank < path.stat().st_size
    assert by_next_rank < 2**24, "the first row tells the format"


@pytest.mark.parametrize("row", [{"text": 3}, {"prompt": "no text"}])
def test_an_invalid_row_at_the_end_of_a_file_is_reported_before_a_token_is_made(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in [*[{"text": "a"}] * 3000, row]))
    with pytest.raises(ToolkitError, match=r"rows\.jsonl: row 3001, line 3001: "):
        load_rows(str(path), "train")


def test_rows_may_have_different_fields(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Lund"}}}
    other = {"function": {"name": "add", "arguments": {"city": 3, "b": [1, "x"]}}}
    turns = [[{"role": "assistant", "tool_calls": [called]}] for called in (call, other)]
    rows = [{"messages": turns[0], "score": 1}, {"messages": turns[1], "score": "high"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset, _ = load_rows(str(path), "train")
    assert [json.loads(row)["messages"] for row in dataset["json_row"]] == [row["messages"] for row in rows]


def test_an_edited_file_and_a_changed_template_or_length_are_tokenised_again(tokenizer: Any, tmp_path: Path) -> None:
    def tokens(rows: Path, tokenizer: Any, length: int) -> list[int]:
        loaded, _ = load_rows(str(rows), "train")
        found, _ = tokenized(loaded, tokenizer, "messages", max_seq_length=length, loss_on="all")
        return list(found[0]["input_ids"])

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TURNS}))
    complete = tokens(path, tokenizer, 128)
    assert tokens(path, tokenizer, 25) == complete[:25]
    assert tokens(path, with_template(tokenizer, tokenizer.chat_template.replace("'\n'", "'!\n'")), 128) != complete
    path.write_text(json.dumps({"messages": TURNS[:3]}))
    assert len(tokens(path, tokenizer, 128)) < len(complete)


def test_another_column_of_the_same_file_is_tokenised_again(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"title": "Greetings", "body": "Hej"}))
    for column, text in (("title", "Greetings"), ("body", "Hej"), ("title", "Greetings")):
        [source] = resolve_sources([str(path)], columns={"text": column})
        rows, data_format = load_rows(source, "train")
        found, _ = tokenized(rows, tokenizer, data_format)
        assert tokenizer.decode(found[0]["input_ids"], skip_special_tokens=True) == text


def test_configurations_of_a_hub_data_set_have_their_own_rows_and_tokens(tokenizer: Any, tmp_path: Path) -> None:
    folder = write_dataset_folder(tmp_path / "greetings")

    def texts(config: str, split: str = "train") -> list[str]:
        [source] = resolve_sources([str(folder)], config=config)
        rows, data_format = load_rows(source, split)
        found, _ = tokenized(rows, tokenizer, data_format)
        return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in found]

    assert texts("en") == [f"hello {number}" for number in range(6)]
    assert texts("sv") == [f"hej {number}" for number in range(6)]
    assert texts("en", "validation") == ["goodbye 0", "goodbye 1"]
    with (folder / "sv" / "train.jsonl").open("a") as file:
        file.write('{"text": "hej igen"}\n')
    assert texts("sv")[-1] == "hej igen"
    with pytest.raises(ToolkitError, match=r"""split 'validation' cannot be loaded: Unknown split "validation"""):
        texts("sv", "validation")


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_or_missing_configuration_is_refused_with_those_that_exist(streaming: bool, tmp_path: Path) -> None:
    folder = str(write_dataset_folder(tmp_path / "greetings"))
    for config, message in (("svv", "has no configuration 'svv'; it has: en, sv"), (None, "several .*: en, sv")):
        source = DataSource(kind="hub", name=folder, config=config)
        with pytest.raises(ToolkitError, match=message) as caught:
            load_hub(source, "train", streaming=streaming, option="eval_dataset")
        assert "--eval_dataset_config" in str(caught.value.hint)
