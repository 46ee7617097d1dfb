"""Rows to tokens: which of them are supervised, what is counted, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from toolkit.data import Sample
from toolkit.errors import ToolkitError
from toolkit.train.batches import BATCH_FACTS, IGNORED, BatchFacts, Collator
from toolkit.train.data_preflight import mark_supervised, preflight_lines, system_prompt_lines
from toolkit.train.tokens import Tokenized, encode, encode_rows, load_rows, row_encoder, tokenize

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hej?"},
    {"role": "assistant", "content": "Hello 🙂\n\nyou"},
    {"role": "user", "content": "  Åter?\n"},
    {"role": "assistant", "content": "Again.\n"},
]
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHej?<|im_end|>\n"
    "<|im_start|>assistant\n«Hello 🙂\n\nyou<|im_end|>»\n"
    "<|im_start|>user\n  Åter?\n<|im_end|>\n"
    "<|im_start|>assistant\n«Again.\n<|im_end|>»\n"
)
CHATML_WITH_GENERATION_BLOCK = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def marked(sample: Sample, tokenizer: Any, *, everything: bool = False) -> str:
    input_ids, supervised = encode(sample, tokenizer, everything=everything)
    labels = [token if learn else IGNORED for token, learn in zip(input_ids, supervised, strict=True)]
    return mark_supervised({"input_ids": input_ids, "labels": labels}, tokenizer)


def tokenized(rows: list[dict[str, Any]], tokenizer: Any, data_format: str, **changes: Any) -> Tokenized:
    arguments = {"max_seq_length": 128, "loss_on": None, **changes}
    dataset = datasets.Dataset.from_list(rows)
    return tokenize(dataset, tokenizer=tokenizer, data_format=data_format, **arguments)


# -- what is supervised


def test_exactly_the_assistant_turns_with_their_ends_are_supervised(tokenizer: Any) -> None:
    assert marked(Sample(messages=TURNS), tokenizer) == RENDERED


def test_the_tokens_are_those_of_the_rendered_conversation(tokenizer: Any) -> None:
    input_ids, _ = encode(Sample(messages=TURNS), tokenizer)
    assert input_ids == tokenizer.apply_chat_template(TURNS, return_dict=False)


def test_the_closing_token_is_learned_although_it_is_the_pad_token(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = tokenized([{"messages": TURNS}, {"messages": TURNS[:3]}], tokenizer, "messages").dataset
    batch = Collator(tokenizer)(list(rows))
    learned_ends = (batch["labels"] == tokenizer.pad_token_id).sum(dim=1)
    assert learned_ends.tolist() == [2, 1]  # one a turn of the assistant, none for the padding


def test_a_generation_block_marks_what_the_prefixes_mark(tokenizer: Any) -> None:
    blocks = with_template(tokenizer, CHATML_WITH_GENERATION_BLOCK)
    without = CHATML_WITH_GENERATION_BLOCK.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    by_block = encode(Sample(messages=TURNS), blocks)
    assert by_block == encode(Sample(messages=TURNS), tokenizer)
    assert by_block == encode(Sample(messages=TURNS), with_template(tokenizer, without))


@pytest.mark.parametrize("template", [None, CHATML_WITH_GENERATION_BLOCK])
def test_the_turns_of_a_prompt_are_context(tokenizer: Any, template: str | None) -> None:
    tokenizer = with_template(tokenizer, template or tokenizer.chat_template)
    sample = Sample(messages=TURNS, first_supervised_message=3)
    assert marked(sample, tokenizer) == RENDERED.replace("«Hello 🙂\n\nyou<|im_end|>»", "Hello 🙂\n\nyou<|im_end|>")


@pytest.mark.parametrize("template", [None, CHATML_WITH_GENERATION_BLOCK])
def test_loss_on_all_supervises_every_token(tokenizer: Any, template: str | None) -> None:
    tokenizer = with_template(tokenizer, template or tokenizer.chat_template)
    expected = "«" + RENDERED.replace("«", "").replace("»", "") + "»"
    assert marked(Sample(messages=TURNS), tokenizer, everything=True) == expected


def test_an_empty_answer_teaches_to_end_the_turn(tokenizer: Any) -> None:
    turns = [*TURNS[:2], {"role": "assistant", "content": ""}]
    assert marked(Sample(messages=turns), tokenizer).endswith("<|im_start|>assistant\n«<|im_end|>»\n")


def test_a_conversation_that_the_assistant_opens_is_supervised_from_its_words(tokenizer: Any) -> None:
    turns = [{"role": "assistant", "content": "Welcome"}, {"role": "user", "content": "Hej?"}]
    expected = "<|im_start|>assistant\n«Welcome<|im_end|>»\n<|im_start|>user\nHej?<|im_end|>\n"
    assert marked(Sample(messages=turns), tokenizer).endswith(expected)


def test_text_in_the_data_that_looks_like_a_template_moves_nothing(tokenizer: Any) -> None:
    turns = [
        {"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nHa"},
        {"role": "assistant", "content": "Ha"},
    ]
    assert marked(Sample(messages=turns), tokenizer).count("«") == 1
    assert marked(Sample(messages=turns), tokenizer).endswith("<|im_start|>assistant\n«Ha<|im_end|>»\n")


def test_a_completion_and_its_end_are_supervised_and_the_prompt_is_not(tokenizer: Any) -> None:
    sample = Sample(prompt="2 + 2 =", completion=" 4")
    assert marked(sample, tokenizer) == "2 + 2 =« 4<|im_end|>»"
    assert marked(sample, tokenizer, everything=True) == "«2 + 2 = 4<|im_end|>»"


def test_text_is_supervised_and_ended_once(tokenizer: Any) -> None:
    assert marked(Sample(text="Hello"), tokenizer) == "«Hello<|im_end|>»"
    assert marked(Sample(text="Hello<|im_end|>"), tokenizer) == "«Hello<|im_end|>»"


@pytest.mark.parametrize("max_tokens", [1, 20, 29, 30, 40, 1000])
def test_what_comes_before_the_cut_does_not_depend_on_it(tokenizer: Any, max_tokens: int) -> None:
    input_ids, supervised = encode(Sample(messages=TURNS * 3), tokenizer)
    cut_ids, cut_supervised = encode(Sample(messages=TURNS * 3), tokenizer, max_tokens=max_tokens)
    assert cut_ids == input_ids
    assert cut_supervised[:max_tokens] == supervised[:max_tokens]


# -- what is refused


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(tokenizer: Any) -> None:
    template = (
        "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}|"
        "{% endif %}{% endfor %}"
    )
    rows = [{"messages": TURNS[:3]}, {"messages": TURNS}]
    with pytest.raises(ToolkitError, match="row 2: the chat template renders message 3 differently") as caught:
        tokenized(rows, with_template(tokenizer, template), "messages")
    assert "--chat_template FILE" in str(caught.value)
    assert "{% generation %}" in str(caught.value)


def test_a_tokenizer_without_a_template_is_refused_for_conversations(tokenizer: Any) -> None:
    with pytest.raises(ToolkitError, match="has no chat template") as caught:
        tokenized([{"messages": TURNS}], with_template(tokenizer, None), "messages")
    assert "--chat_template FILE" in str(caught.value)


def test_a_conversation_that_the_template_refuses_is_named(tokenizer: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ToolkitError, match=r"row 1: the chat template refuses .*\(system, user, .*roles must alternate"
    ):
        tokenized([{"messages": TURNS}], with_template(tokenizer, template), "messages")


def test_rows_without_an_assistant_turn_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ToolkitError, match="no supervised token in any of the 2 rows: no assistant turn"):
        tokenized([{"messages": TURNS[:2]}] * 2, tokenizer, "messages")


def test_prompts_that_fill_the_length_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ToolkitError, match="every prompt fills max_seq_length=8") as caught:
        tokenized([{"messages": TURNS}], tokenizer, "messages", max_seq_length=8)
    assert (
        caught.value.hint == f"raise it: the longest row has {len(encode(Sample(messages=TURNS), tokenizer)[0])} tokens"
    )


def test_a_wrong_row_of_the_hub_is_named_by_its_number(tokenizer: Any) -> None:
    rows = [{"messages": TURNS}, {"messages": []}]
    with pytest.raises(ToolkitError, match="row 2: `messages` is empty"):
        tokenized(rows, tokenizer, "messages")


def test_loss_on_assistant_is_refused_for_text(tokenizer: Any) -> None:
    with pytest.raises(ToolkitError, match="plain text"):
        tokenized([{"text": "Hello"}], tokenizer, "text", loss_on="assistant")


# -- what is counted


def test_the_stats_count_rows_tokens_and_what_was_cut(tokenizer: Any) -> None:
    # " a" is one token: 2 + end, 4 + end (cut to 4), 1 + end, and an empty row whose only token nothing predicts.
    rows = [{"text": " a a"}, {"text": " a a a a"}, {"text": " a"}, {"text": ""}]
    result = tokenized(rows, tokenizer, "text", max_seq_length=4)
    assert dataclasses.asdict(result.stats) == {
        "format": "text",
        "rows": 4,
        "dropped_rows": 1,
        "truncated_rows": 1,
        "tokens": 3 + 4 + 2,
        "supervised_tokens": 2 + 3 + 1,
        "longest_row_tokens": 5,
        "sample": "« a a<|im_end|>»",
        "packs": None,
        "pack_fill_fraction": None,
        "streamed": False,
    }
    assert result.dataset.column_names == ["input_ids", "labels", "length", "row"]
    assert result.dataset["length"][:] == [3, 4, 2]
    assert result.dataset["row"][:] == [0, 1, 2]


def test_the_preflight_names_the_format_and_shows_the_supervised_part(tokenizer: Any) -> None:
    lines = preflight_lines(tokenized([{"prompt": " a", "completion": " b"}], tokenizer, "prompt_completion").stats)
    assert lines == [
        "data: prompt_completion format, 1 rows, 1 kept",
        "  3 tokens, 2 supervised (67%); longest row 3 tokens",
        "  0 rows truncated, 0 dropped for having no supervised token",
        "  first row, supervised part between « and »:",
        "  |  a« b<|im_end|>»",
    ]


# -- files


def test_both_forms_of_the_real_data_give_the_same_tokens(tokenizer: Any, faq_alpaca: Path, faq_sharegpt: Path) -> None:
    results = []
    for path, expected in ((faq_alpaca, "alpaca"), (faq_sharegpt, "sharegpt")):
        dataset, data_format = load_rows(str(path), "train")
        assert data_format == expected
        results.append(
            tokenize(dataset, tokenizer=tokenizer, data_format=data_format, max_seq_length=128, loss_on=None)
        )
    alpaca, sharegpt = results
    assert alpaca.dataset[:] == sharegpt.dataset[:]
    assert (alpaca.stats.rows, alpaca.stats.tokens, alpaca.stats.supervised_tokens) == (503, 50263, 29839)
    assert (alpaca.stats.truncated_rows, alpaca.stats.dropped_rows, alpaca.stats.longest_row_tokens) == (68, 0, 169)


def test_a_wrong_row_of_a_file_is_named_by_its_line_when_tokenized(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps({"messages": TURNS}))
    dataset, data_format = load_rows(str(path), "train")
    with pytest.raises(ToolkitError, match="row 1, line 2: the data are conversations"):
        tokenize(
            dataset,
            tokenizer=with_template(tokenizer, None),
            data_format=data_format,
            max_seq_length=128,
            loss_on=None,
        )


def test_rows_of_different_shapes_are_no_matter(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Lund"}}}
    other = {"function": {"name": "add", "arguments": {"city": 3, "b": [1, "x"]}}}
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [called]}], "score": score}
        for called, score in ((call, 1), (other, "high"))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset, _ = load_rows(str(path), "train")
    assert [json.loads(row)["messages"] for row in dataset["json_row"]] == [row["messages"] for row in rows]


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text in ("before", "after!"):
        path.write_text(json.dumps({"text": text}))
        dataset, _ = load_rows(str(path), "train")
        assert json.loads(dataset[0]["json_row"]) == {"text": text}


def test_a_changed_template_or_length_is_tokenized_again(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TURNS}))
    dataset, _ = load_rows(str(path), "train")
    shouting = with_template(tokenizer, tokenizer.chat_template.replace("SmolLM", "SMOLLM").replace("'\n'", "'!\n'"))

    def tokens(tokenizer: Any, max_seq_length: int) -> list[int]:
        result = tokenize(
            dataset, tokenizer=tokenizer, data_format="messages", max_seq_length=max_seq_length, loss_on="all"
        )
        return list(result.dataset[0]["input_ids"])

    assert tokens(tokenizer, 128)[:5] == tokens(tokenizer, 5)
    assert tokens(tokenizer, 128) != tokens(shouting, 128)


def test_a_system_prompt_opens_the_conversations_that_have_none(tokenizer: Any) -> None:
    rows = [{"messages": TURNS}, {"messages": TURNS[1:]}]
    dataset = datasets.Dataset.from_list(rows)
    encoder = row_encoder(
        tokenizer=tokenizer, data_format="messages", max_seq_length=128, loss_on=None, system_prompt="Be kind."
    )
    encoded = encode_rows(dataset, encoder)
    texts = [tokenizer.decode(row["input_ids"]) for row in encoded]
    assert [text.split("<|im_end|>")[0] for text in texts] == [
        "<|im_start|>system\nBe brief.",
        "<|im_start|>system\nBe kind.",
    ]
    assert encoded["supervised"][:] == [encoded[0]["supervised"]] * 2


def test_a_system_prompt_that_no_row_takes_is_told(tokenizer: Any) -> None:
    def lines(rows: list[dict[str, Any]], data_format: str, system_prompt: str | None = "Be kind.") -> list[str]:
        encoder = row_encoder(
            tokenizer=tokenizer, data_format=data_format, max_seq_length=128, loss_on=None, system_prompt=system_prompt
        )
        return system_prompt_lines(encode_rows(datasets.Dataset.from_list(rows), encoder), system_prompt)

    assert lines([{"messages": TURNS}, {"messages": TURNS[1:]}], "messages") == []
    assert lines([{"text": "plain"}], "text", system_prompt=None) == []
    for told in (lines([{"messages": TURNS}], "messages"), lines([{"text": "plain"}], "text")):
        assert [line.split(":")[1] for line in told] == [" --system_prompt has no effect"]


def test_several_processes_give_the_same_tokens_once(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": " a" * number}) + "\n" for number in range(1, 9)))
    dataset, data_format = load_rows(str(path), "train")
    encoder = row_encoder(
        tokenizer=tokenizer, data_format=data_format, max_seq_length=128, loss_on=None, system_prompt=None
    )
    two = encode_rows(dataset, encoder, num_proc=2)
    files = [(file["filename"], Path(file["filename"]).stat().st_mtime_ns) for file in two.cache_files]
    again = encode_rows(dataset, encoder, num_proc=2)
    assert [(file["filename"], Path(file["filename"]).stat().st_mtime_ns) for file in again.cache_files] == files
    assert two["row"][:] == list(range(8))
    assert two[:] == again[:] == encode_rows(dataset, encoder)[:]


def test_tools_and_their_calls_reach_the_template(tokenizer: Any) -> None:
    template = (
        "{% for tool in tools %}[{{ tool['function']['name'] }}]{% endfor %}{% for message in messages %}"
        "{{ message['role'] }}:{{ message['content'] }}{% for call in message.get('tool_calls', []) %}"
        "<{{ call['function']['name'] }}={{ call['function']['arguments'] | tojson }}>{% endfor %};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Lund"}}}
    turns = [{"role": "user", "content": "Hej"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    input_ids, _ = encode(Sample(messages=turns, tools=tools), with_template(tokenizer, template), everything=True)
    assert tokenizer.decode(input_ids) == '[weather]user:Hej;assistant:<weather={"city": "Lund"}>;'


def test_a_hub_id_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ToolkitError, match="data set 'nobody/nothing', split 'train' cannot be loaded"):
        load_rows("nobody/nothing", "train")


def test_other_ranks_show_no_progress_bar(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    tokenized([{"text": "Hello"}], tokenizer, "text")
    assert capsys.readouterr().err == ""
    assert datasets.is_progress_bar_enabled()


# -- batches


ROWS = [
    {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "row": 4},
    {"input_ids": [8, 9], "labels": [8, 9], "row": 2},
]


def test_a_batch_is_padded_on_the_right_and_counted(tokenizer: Any) -> None:
    before = copy.deepcopy(tokenizer.init_kwargs), tokenizer.padding_side, tokenizer.pad_token
    pad = tokenizer.pad_token_id
    batch = Collator(tokenizer)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, pad]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    content = torch.tensor([[5, 6, 7, 8, 9, pad], [IGNORED, 6, 7, 8, 9, IGNORED]]).numpy().tobytes()
    assert batch[BATCH_FACTS] == BatchFacts(
        tokens=6,
        non_padding_tokens=5,
        supervised_tokens=3,  # 6, 7 and 9: nothing predicts the first token of a row
        sha256=hashlib.sha256(content).hexdigest(),
        rows=(4, 2),
    )
    assert before == (tokenizer.init_kwargs, tokenizer.padding_side, tokenizer.pad_token)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    assert Collator(bare)(ROWS)["input_ids"][1, 2] == tokenizer.eos_token_id
    assert bare.pad_token is None


def test_the_facts_of_a_batch_pass_through_accelerate(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = torch.utils.data.DataLoader(ROWS * 2, batch_size=2, collate_fn=Collator(tokenizer))
    with caplog.at_level(logging.WARNING):
        batches = list(accelerate.Accelerator(cpu=True).prepare(loader))
    assert [batch[BATCH_FACTS].non_padding_tokens for batch in batches] == [5, 5]
    assert batches[0][BATCH_FACTS] == batches[1][BATCH_FACTS]
