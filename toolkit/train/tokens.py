"""Rows to tokens, with labels only where the loss is to look, and a preflight that says what came of it.

    dataset, data_format = load_rows("faq.jsonl", "train")
    tokenized = tokenize(dataset, tokenizer=tokenizer, data_format=data_format, max_seq_length=1024, loss_on=None)

Labels are -100 where nothing is learned. They follow character spans of the rendered conversation, never token ids:
where the pad token is also the end-of-turn token, masking by id would hide every turn's end from the loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from toolkit.data import Sample, check_file, check_row, detect_format, formats, iter_rows, resolve_source, to_sample
from toolkit.errors import ToolkitError

IGNORED = -100  # what PyTorch's cross entropy leaves out
BATCH_FACTS = "batch_facts"
JSON_ROW = "json_row"
PLACE = "place"
TEMPLATE_HINT = "pass `--chat_template FILE` with a `{% generation %}` block around what the assistant says"

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]
"""Characters from, and up to but not including."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStats:
    """What the rows became; `tokens` and `supervised_tokens` are of the rows that are kept, after cutting."""

    format: str
    rows: int
    """All rows read, kept and dropped."""
    dropped_rows: int
    """Rows with no supervised token left."""
    truncated_rows: int
    """Rows longer than `max_seq_length`, kept or dropped."""
    tokens: int
    supervised_tokens: int
    """Tokens that the loss sees: labels that are not -100, without the first position, which nothing predicts."""
    longest_row_tokens: int
    """Before cutting: the `max_seq_length` that would cut nothing."""
    sample: str
    """The first kept row, decoded, its supervised parts between « and »."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenized:
    """Columns `input_ids` and `labels`, and what is known about them."""

    dataset: datasets.Dataset
    stats: DataStats


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What one padded batch holds, counted on the CPU before any device sees it."""

    tokens: int
    """With padding."""
    non_padding_tokens: int
    supervised_tokens: int
    """Labels that are not -100 after the causal shift."""
    sha256: str
    """Of the int64 bytes of the padded input ids, then of the labels: the token order's fingerprint."""


# -- loading


def load_rows(source: str, split: str) -> tuple[datasets.Dataset, str]:
    """The rows of a local file (all of them checked first) or of a hub data set, and their format."""
    resolved = resolve_source(source)
    if resolved.path is not None:
        return _load_file(resolved.path)
    dataset = _load_hub(source, split)
    if len(dataset) == 0:
        raise ToolkitError(f"{source}: split {split!r} has no rows")
    try:
        return dataset, detect_format(dataset[0])
    except ToolkitError as error:
        raise ToolkitError(f"{source}: row 1: {error.message}", hint=error.hint) from None


def _load_file(path: Path) -> tuple[datasets.Dataset, str]:
    """Rows as JSON text: Arrow would guess types from the first rows, and add to each tool call the keys of all."""
    data_format = check_file(path, max_bytes=None).format
    fingerprint = _fingerprint(path.read_bytes(), data_format)  # the content, not the name: an edited file is new
    try:
        with _progress_on_first_rank_only():
            return _from_json_rows(path, data_format, fingerprint), data_format
    except OSError as error:
        cache = datasets.config.HF_DATASETS_CACHE
        raise ToolkitError(f"rows cannot be cached in {cache}: {error}", hint="set HF_HOME to another folder") from None


def _from_json_rows(path: Path, data_format: str, fingerprint: str) -> datasets.Dataset:
    return datasets.Dataset.from_generator(
        _json_rows,
        gen_kwargs={"path": str(path), "data_format": data_format, "content": fingerprint},
        features=datasets.Features({PLACE: datasets.Value("string"), JSON_ROW: datasets.Value("large_string")}),
        fingerprint=fingerprint,
    )


def _json_rows(path: str, data_format: str, content: str) -> Iterator[dict[str, str]]:  # noqa: ARG001
    """`content` only tells the cache of datasets which version of the file this is."""
    for place, row in iter_rows(Path(path)):
        yield {PLACE: place, JSON_ROW: json.dumps(formats.format_fields(row, data_format))}


def _load_hub(name: str, split: str) -> datasets.Dataset:
    try:
        with _progress_on_first_rank_only():
            return datasets.load_dataset(name, split=split)
    except Exception as error:  # network, names, splits and configurations each have their own classes
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "check the name and `--dataset_split`; without network, pass a local file"
        raise ToolkitError(f"data set {name!r}, split {split!r} cannot be loaded: {why}", hint=hint) from error


@contextmanager
def _progress_on_first_rank_only() -> Iterator[None]:
    if os.environ.get("RANK", "0") == "0" or not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _fingerprint(*parts: object) -> str:
    """A key for the cache of datasets. This code is part of it: what it computes is what is cached."""
    code = [Path(file).read_bytes() for file in (__file__, formats.__file__)]
    digest = hashlib.sha256(transformers.__version__.encode())
    for part in (*code, *parts):
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


# -- tokens


def tokenize(
    dataset: datasets.Dataset, *, tokenizer: Any, data_format: str, max_seq_length: int, loss_on: str | None
) -> Tokenized:
    """Every row as input ids and labels, cut to `max_seq_length`; rows with nothing to learn from are dropped.

    `loss_on` is `assistant` (or completion), `all`, or None: assistant for chat and prompt/completion, all for text.
    """
    if data_format == "text" and loss_on == "assistant":
        raise ToolkitError("`loss_on: assistant` has nothing to find in plain text", hint="leave `--loss_on` out")
    encode = _RowEncoder(
        tokenizer=tokenizer,
        data_format=data_format,
        max_seq_length=max_seq_length,
        everything=loss_on == "all" or data_format == "text",
    )
    with _progress_on_first_rank_only():
        encoded = dataset.map(
            encode,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=_FEATURES,
            new_fingerprint=_fingerprint(dataset._fingerprint, *encode.cache_key()),
            desc="Tokenizing",
        )
    kept = [index for index, supervised in enumerate(encoded["supervised"][:]) if supervised]
    if not kept:
        raise _nothing_to_learn(encoded, max_seq_length)
    stats = _stats(encoded, kept, tokenizer, data_format, max_seq_length)
    return Tokenized(dataset=encoded.select(kept).select_columns(["input_ids", "labels"]), stats=stats)


_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "supervised": datasets.Value("int64"),
        "uncut_tokens": datasets.Value("int64"),
    }
)


@dataclass(frozen=True, kw_only=True)
class _RowEncoder:
    """What `Dataset.map` calls on each row."""

    tokenizer: Any
    data_format: str
    max_seq_length: int
    everything: bool

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            row, place = (json.loads(row[JSON_ROW]), row[PLACE]) if JSON_ROW in row else (row, f"row {index + 1}")
            check_row(row, self.data_format)
            sample = to_sample(row, self.data_format)
            input_ids, supervised = encode(
                sample, self.tokenizer, everything=self.everything, max_tokens=self.max_seq_length
            )
        except ToolkitError as error:
            raise ToolkitError(f"{place}: {error.message}", hint=error.hint) from None
        except (UnicodeError, RecursionError) as error:
            raise ToolkitError(f"{place}: the row cannot be tokenized: {error}") from None
        labels = [token if learn else IGNORED for token, learn in zip(input_ids, supervised, strict=True)]
        labels = labels[: self.max_seq_length]
        return {
            "input_ids": input_ids[: self.max_seq_length],
            "labels": labels,
            "supervised": sum(label != IGNORED for label in labels[1:]),
            "uncut_tokens": len(input_ids),
        }

    def cache_key(self) -> tuple[object, ...]:
        """Everything that decides the result."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
        special = sorted(self.tokenizer.special_tokens_map.items())
        template = self.tokenizer.chat_template
        return vocabulary, str(special), str(template), self.data_format, self.max_seq_length, self.everything


Encoded = tuple[list[int], list[bool]]
"""Input ids, and for each whether it is supervised."""


def encode(sample: Sample, tokenizer: Any, *, everything: bool = False, max_tokens: int | None = None) -> Encoded:
    """One sample's tokens before cutting; `everything` supervises the prompt and the user's turns too.

    What lies behind `max_tokens` will be cut, and may be left without supervision.
    """
    if sample.messages is not None:
        input_ids, supervised = _encode_chat(sample, tokenizer, everything=everything, max_tokens=max_tokens)
    elif sample.text is not None:
        input_ids = _with_end(_with_beginning(sample.text, tokenizer), tokenizer)
        supervised = [True] * len(input_ids)
    else:
        input_ids, supervised = _encode_prompt_completion(sample, tokenizer)
    return input_ids, [True] * len(input_ids) if everything else supervised


def _with_beginning(text: str, tokenizer: Any) -> list[int]:
    """Tokens with the special tokens that the tokenizer puts in front, without an end that it may add."""
    input_ids: list[int] = tokenizer(text, verbose=False).input_ids
    ends = bool(input_ids) and input_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return input_ids[:-1] if ends else input_ids


def _with_end(input_ids: list[int], tokenizer: Any) -> list[int]:
    ended = tokenizer.eos_token_id is None or input_ids[-1:] == [tokenizer.eos_token_id]
    return input_ids if ended else [*input_ids, tokenizer.eos_token_id]


def _encode_prompt_completion(sample: Sample, tokenizer: Any) -> Encoded:
    """The prompt is tokenized by itself, as it will be when the model is asked."""
    prompt = _with_beginning(sample.prompt or "", tokenizer)
    completion = tokenizer(sample.completion or "", add_special_tokens=False, verbose=False).input_ids
    completion = _with_end(completion, tokenizer)
    return prompt + completion, [False] * len(prompt) + [True] * len(completion)


# -- conversations


def _encode_chat(sample: Sample, tokenizer: Any, *, everything: bool, max_tokens: int | None) -> Encoded:
    chat = _Chat(tokenizer=tokenizer, messages=sample.messages or [], tools=sample.tools)
    if not everything and _GENERATION_BLOCK.search(chat.template()):
        return _encode_generation_blocks(chat, first_supervised_message=sample.first_supervised_message)
    text = chat.render(len(chat.messages))
    input_ids, offsets = _with_offsets(text, tokenizer)
    if everything:
        return input_ids, [True] * len(input_ids)
    # Each span renders the conversation again: past the cut, a long one is not worth it.
    cut = len(text) if max_tokens is None or max_tokens >= len(offsets) else offsets[max_tokens][0]
    return input_ids, _touches(offsets, _assistant_spans(chat, text, sample.first_supervised_message, cut))


def _assistant_spans(chat: _Chat, text: str, first_supervised_message: int, cut: int) -> list[Span]:
    """Where the assistant speaks before the `cut`, a place in the text."""
    spans: list[Span] = []
    for index, message in enumerate(chat.messages):
        if spans and spans[-1][1] >= cut:
            break
        if message["role"] == "assistant" and index >= first_supervised_message:
            spans.append(chat.assistant_span(text, index))
    return spans


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """A conversation, and the tokenizer whose template renders it."""

    tokenizer: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    def template(self) -> str:
        """The template in use; some tokenizers have one for conversations with tools."""
        try:
            return str(self.tokenizer.get_chat_template(tools=self.tools))
        except ValueError:
            hint = "pass `--chat_template FILE`, or choose an instruction-tuned model"
            raise ToolkitError(
                "the data are conversations, and the tokenizer has no chat template", hint=hint
            ) from None

    def render(self, num_messages: int, *, prompt_assistant: bool = False) -> str:
        """The first messages as text, with the header of an assistant turn at the end if `prompt_assistant`."""
        return str(self.apply(num_messages, tokenize=False, add_generation_prompt=prompt_assistant))

    def apply(self, num_messages: int, **arguments: Any) -> Any:
        """`apply_chat_template`; what the template refuses is the user's to fix."""
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
        """From after the turn's header up to and with its end-of-turn token, in the `text` of all messages.

        Found by rendering growing prefixes, which works where each is the beginning of the whole.
        """
        through = self.render(index + 1)
        start = self._span_start(through, index)
        if start is None or not text.startswith(through):
            why = "differently when other messages follow or are missing, so the assistant's part cannot be located"
            raise ToolkitError(f"the chat template renders message {index + 1} {why}", hint=TEMPLATE_HINT)
        # White space after the end-of-turn token belongs to the template: the model has stopped by then.
        return start, max(start, len(through.rstrip()))

    def _span_start(self, through: str, index: int) -> int | None:
        if index == 0:  # many templates cannot render a header after no message at all
            content = self.messages[0]["content"].strip()
            found = through.rfind(content) if content else -1
            return None if found < 0 else found
        prefix = self.render(index, prompt_assistant=True)
        return len(prefix) if through.startswith(prefix) else None


def _with_offsets(text: str, tokenizer: Any) -> tuple[list[int], list[Span]]:
    """Tokens of the whole text at once, and the characters that each covers."""
    if not tokenizer.is_fast:
        raise ToolkitError("the tokenizer cannot say which characters a token covers", hint="use a fast tokenizer")
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoding.input_ids, encoding.offset_mapping


def _touches(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token whether it shares a character with a span; spans are in the order of the text."""
    touched, remaining = [], list(reversed(spans))
    for first, last in offsets:
        while remaining and first >= remaining[-1][1]:
            remaining.pop()
        touched.append(bool(remaining) and last > remaining[-1][0])
    return touched


def _encode_generation_blocks(chat: _Chat, *, first_supervised_message: int) -> Encoded:
    """The template itself says what the assistant generates."""
    encoding = chat.apply(
        len(chat.messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )
    context_chars = len(chat.render(first_supervised_message)) if first_supervised_message else 0
    pairs = zip(encoding["assistant_masks"], encoding["offset_mapping"], strict=True)
    return encoding["input_ids"], [bool(said) and first >= context_chars for said, (first, _) in pairs]


# -- what came of it


def _nothing_to_learn(encoded: datasets.Dataset, max_seq_length: int) -> ToolkitError:
    rows, uncut = len(encoded), encoded["uncut_tokens"][:]
    truncated = sum(tokens > max_seq_length for tokens in uncut)
    why = f"no supervised token in any of the {rows:,} rows"
    if truncated == rows:
        hint = f"raise it: the longest row has {max(uncut):,} tokens"
        return ToolkitError(f"{why}: every prompt fills max_seq_length={max_seq_length}", hint=hint)
    hint = "check the roles and that the answers are not empty, or pass `--loss_on all`"
    cut = f" ({truncated:,} were cut at max_seq_length={max_seq_length})" if truncated else ""
    return ToolkitError(f"{why}{cut}: no assistant turn, completion or text to learn from", hint=hint)


def _stats(
    encoded: datasets.Dataset, kept: list[int], tokenizer: Any, data_format: str, max_seq_length: int
) -> DataStats:
    uncut, supervised = encoded["uncut_tokens"][:], encoded["supervised"][:]
    return DataStats(
        format=data_format,
        rows=len(encoded),
        dropped_rows=len(encoded) - len(kept),
        truncated_rows=sum(tokens > max_seq_length for tokens in uncut),
        tokens=sum(min(uncut[index], max_seq_length) for index in kept),
        supervised_tokens=sum(supervised),
        longest_row_tokens=max(uncut),
        sample=mark_supervised(encoded[kept[0]], tokenizer),
    )


def mark_supervised(row: dict[str, Any], tokenizer: Any) -> str:
    """The row's text, with « and » around what is supervised."""
    parts = []
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        parts.append(f"«{text}»" if supervised else text)
    return "".join(parts)


def preflight_lines(stats: DataStats) -> list[str]:
    """What a person should read before the training starts."""
    kept = stats.rows - stats.dropped_rows
    share = stats.supervised_tokens / stats.tokens
    lines = [
        f"data: {stats.format} format, {stats.rows:,} rows, {kept:,} kept",
        f"  {stats.tokens:,} tokens, {stats.supervised_tokens:,} supervised ({share:.0%});"
        f" longest row {stats.longest_row_tokens:,} tokens",
        f"  {stats.truncated_rows:,} rows truncated, {stats.dropped_rows:,} dropped for having no supervised token",
        "  first row, supervised part between « and »:",
    ]
    return lines + [f"  | {line}" for line in _shortened(stats.sample).splitlines()]


def _shortened(text: str, *, at_most: int = 1200) -> str:
    """The beginning and the end, where the closing mark is."""
    return text if len(text) <= at_most else f"{text[: at_most // 2]} … {text[-at_most // 2 :]}"


# -- batches


class Collator:
    """Pads rows on the right to the longest of the batch, and says under `BATCH_FACTS` what the batch holds.

    By hand rather than with `tokenizer.pad`, which needs a pad token and follows the tokenizer's padding side.
    """

    def __init__(self, tokenizer: Any) -> None:
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.pad_id: int = next((token for token in (pad, end) if token is not None), 0)  # masked, so any id will do

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        lengths = [len(row["input_ids"]) for row in rows]
        input_ids = _padded([row["input_ids"] for row in rows], self.pad_id)
        labels = _padded([row["labels"] for row in rows], IGNORED)
        attention_mask = _padded([[1] * length for length in lengths], 0)
        facts = _batch_facts(input_ids, labels, non_padding_tokens=sum(lengths))
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, BATCH_FACTS: facts}


def _padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
    return padded


def _batch_facts(input_ids: torch.Tensor, labels: torch.Tensor, *, non_padding_tokens: int) -> BatchFacts:
    digest = hashlib.sha256(input_ids.numpy().tobytes())
    digest.update(labels.numpy().tobytes())
    return BatchFacts(
        tokens=input_ids.numel(),
        non_padding_tokens=non_padding_tokens,
        supervised_tokens=int((labels[:, 1:] != IGNORED).sum()),
        sha256=digest.hexdigest(),
    )
