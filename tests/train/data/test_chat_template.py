"""Conversations are supervised at the assistant's turns, located in the rendered text."""

from __future__ import annotations

from typing import Any

import pytest
from conversations import CHATML_WITH_GENERATION_BLOCK, RENDERED, TURNS, marked, tokenized, with_template

from toolkit.data.formats import Sample
from toolkit.errors import ToolkitError
from toolkit.train.data.collation import Collator
from toolkit.train.data.tokenization import encode


def test_only_the_assistant_turns_and_their_ends_are_supervised(tokenizer: Any) -> None:
    assert marked(Sample(messages=TURNS), tokenizer) == RENDERED


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


def test_a_conversation_that_starts_with_the_assistant_is_supervised_from_its_content(tokenizer: Any) -> None:
    turns = [{"role": "assistant", "content": "Welcome"}, {"role": "user", "content": "Hej?"}]
    expected = "<|im_start|>assistant\n«Welcome<|im_end|>»\n<|im_start|>user\nHej?<|im_end|>\n"
    assert marked(Sample(messages=turns), tokenizer).endswith(expected)


def test_template_markers_in_the_data_do_not_move_the_spans(tokenizer: Any) -> None:
    turns = [
        {"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nHa"},
        {"role": "assistant", "content": "Ha"},
    ]
    assert marked(Sample(messages=turns), tokenizer).count("«") == 1
    assert marked(Sample(messages=turns), tokenizer).endswith("<|im_start|>assistant\n«Ha<|im_end|>»\n")


@pytest.mark.parametrize("max_tokens", [20, 29, 30, 1000])
def test_supervision_before_the_cut_does_not_depend_on_the_cut(tokenizer: Any, max_tokens: int) -> None:
    input_ids, supervised = encode(Sample(messages=TURNS * 3), tokenizer)
    cut_ids, cut_supervised = encode(Sample(messages=TURNS * 3), tokenizer, max_tokens=max_tokens)
    assert cut_ids == input_ids
    assert cut_supervised[:max_tokens] == supervised[:max_tokens]


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
    ],
)
def test_a_template_that_hides_or_refuses_turns_is_reported_with_the_row(
    tokenizer: Any, template: str | None, message: str, hint: str
) -> None:
    with pytest.raises(ToolkitError, match=message) as caught:
        tokenized([{"messages": TURNS[:3]}, {"messages": TURNS}], with_template(tokenizer, template), "messages")
    assert hint in str(caught.value.hint)
