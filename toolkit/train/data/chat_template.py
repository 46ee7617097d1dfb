"""Tokenise conversations with the chat template, and supervise the assistant's turns.

If the template marks the generated text with `{% generation %}`, that mark is used. Otherwise the assistant's turns are
located as characters of the rendered text, never as token ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.data.formats import Sample
from toolkit.errors import ToolkitError

TEMPLATE_HINT = "pass `--chat_template FILE` with a `{% generation %}` block around the assistant's turns"

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]
"""First character, and the character after the last."""

Encoded = tuple[list[int], list[bool]]
"""Input ids, and True for each that is supervised."""


def encode_chat(sample: Sample, tokenizer: Any, *, supervise_all: bool, max_tokens: int | None) -> Encoded:
    """Tokenise a conversation. Turns behind `max_tokens`, which will be cut, may be left unsupervised.

    Raises ToolkitError if the template is missing, refuses the conversation, or hides the assistant's turns.
    """
    chat = _Chat(tokenizer=tokenizer, messages=sample.messages or [], tools=sample.tools)
    if not supervise_all and _GENERATION_BLOCK.search(chat.template()):
        encoding = chat.apply(
            len(chat.messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        context = len(chat.render(sample.first_supervised_message)) if sample.first_supervised_message else 0
        pairs = zip(encoding["assistant_masks"], encoding["offset_mapping"], strict=True)
        return encoding["input_ids"], [bool(generated) and first >= context for generated, (first, _) in pairs]
    text = chat.render(len(chat.messages))
    if not tokenizer.is_fast:
        raise ToolkitError("the tokenizer does not provide token offsets", hint="use a fast tokenizer")
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids, offsets = encoding.input_ids, encoding.offset_mapping
    if supervise_all:
        return input_ids, [True] * len(input_ids)
    # Each span renders the conversation again, which is too slow for long conversations behind the cut.
    cut = len(text) if max_tokens is None or max_tokens >= len(offsets) else offsets[max_tokens][0]
    spans: list[Span] = []
    for index, message in enumerate(chat.messages):
        if spans and spans[-1][1] >= cut:
            break
        if message["role"] == "assistant" and index >= sample.first_supervised_message:
            spans.append(chat.assistant_span(text, index))
    return input_ids, _overlaps(offsets, spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """A conversation, and the tokenizer whose template renders it."""

    tokenizer: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    def template(self) -> str:
        """Some tokenizers have another template for conversations with tools."""
        try:
            return str(self.tokenizer.get_chat_template(tools=self.tools))
        except ValueError:
            what = "the data are conversations, but the tokenizer has no chat template"
            hint = "pass `--chat_template FILE`, or choose an instruction-tuned model"
            raise ToolkitError(what, hint=hint) from None

    def render(self, num_messages: int, *, prompt_assistant: bool = False) -> str:
        """Render the first messages, followed by the header of an assistant turn if `prompt_assistant`."""
        return str(self.apply(num_messages, tokenize=False, add_generation_prompt=prompt_assistant))

    def apply(self, num_messages: int, **arguments: Any) -> Any:
        """Call `apply_chat_template`; an error of the template is one that the user can fix."""
        self.template()
        messages = self.messages[:num_messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tools=self.tools, **arguments)
        except Exception as error:  # a template is a program: it can raise anything
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            roles = ", ".join(message["role"] for message in messages)
            hint = "change the rows, or pass `--chat_template FILE`"
            raise ToolkitError(f"the chat template refuses this conversation ({roles}): {why}", hint=hint) from None

    def assistant_span(self, text: str, index: int) -> Span:
        """The turn after its header, with its end-of-turn token, in the `text` of all messages.

        Found by rendering growing prefixes, which works if each is a prefix of the complete text.
        """
        through = self.render(index + 1)
        if index:
            prefix = self.render(index, prompt_assistant=True)
            start = len(prefix) if through.startswith(prefix) else None
        else:  # many templates cannot render a header without a message before it
            content = self.messages[0]["content"].strip()
            start = through.rfind(content) if content and content in through else None
        if start is None or not text.startswith(through):
            why = "differently depending on the messages around it, so the assistant's turn cannot be located"
            raise ToolkitError(f"the chat template renders message {index + 1} {why}", hint=TEMPLATE_HINT)
        # White space after the end-of-turn token belongs to the template: the model stops before it.
        return start, max(start, len(through.rstrip()))


def _overlaps(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """True for each token that shares a character with a span; spans are in text order."""
    overlaps, remaining = [], list(reversed(spans))
    for first, last in offsets:
        while remaining and first >= remaining[-1][1]:
            remaining.pop()
        overlaps.append(bool(remaining) and last > remaining[-1][0])
    return overlaps
