"""Tokenise rows, with labels of -100 at all but supervised tokens.

Labels follow the template's `{% generation %}` marks, or character spans of the rendered conversation, never token ids:
where the pad token is also the end-of-turn token, masking by id would exclude the end of every turn from the loss.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers

from toolkit.data import formats
from toolkit.data.data_files import DataSource, check_file, checked_rows, config_error, resolve_source
from toolkit.data.formats import Sample, check_row, detect_format, to_sample, with_system_prompt
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import DataArguments
from toolkit.observe.batches import IGNORED
from toolkit.record.checkpoints import file_sha256
from toolkit.train.data.data_report import DataStats, mark_supervised, no_supervised_tokens_error

_JSON_ROW, _PLACE = "json_row", "place"


def load_rows(source: str | DataSource, split: str, *, option: str = "dataset") -> tuple[datasets.Dataset, str]:
    """Return the rows of a local file (all checked) or of a hub data set, and their format.

    Only the first process to load this content of a file, of those that share a cache, parses more than its first row.
    Of a file each row is JSON text: Arrow would infer types from the first rows, and give tool calls the keys of all.
    """
    resolved = resolve_source(source) if isinstance(source, str) else source
    if (path := resolved.path) is None:
        dataset = load_hub(resolved, split, option=option)
        return dataset, format_of_first_row(resolved, split, dataset[0] if len(dataset) else None)
    data_format = check_file(path, max_bytes=0, columns=resolved.columns).format
    fingerprint = _fingerprint(file_sha256(path), data_format, resolved.columns)  # an edited file has another content
    try:
        rows = datasets.Dataset.from_generator(
            _json_rows,
            gen_kwargs={"source": resolved, "data_format": data_format, "content": fingerprint},
            features=datasets.Features({_PLACE: datasets.Value("string"), _JSON_ROW: datasets.Value("large_string")}),
            fingerprint=fingerprint,
        )
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        cause, cache = error.__cause__ or error, datasets.config.HF_DATASETS_CACHE
        if isinstance(cause, ToolkitError):
            raise cause from None
        raise ToolkitError(f"rows cannot be cached in {cache}: {cause}", hint="set HF_HOME to another folder") from None
    return rows, data_format


def _json_rows(source: DataSource, data_format: str, content: str) -> Iterator[dict[str, str]]:  # noqa: ARG001
    """`content` identifies the version of the file in the cache of `datasets`."""
    for _, (place, row, _) in checked_rows(Path(str(source.path)), source.columns):
        yield {_PLACE: place, _JSON_ROW: json.dumps(formats.format_fields(row, data_format))}


def load_hub(source: DataSource, split: str, *, streaming: bool = False, option: str = "dataset") -> Any:
    """Load a hub data set, downloaded or (`streaming`) read lazily. Raises ToolkitError if it cannot be loaded."""
    name, config, folder, cache_dir = source.name, source.config, Path(source.name), None
    if folder.is_dir():
        # `datasets` 5.2 keeps the rows of a folder with a README.md in one place, also after a file of it was edited.
        found = [(str(path.resolve()), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
        digest = _fingerprint([(path, stat.st_size, stat.st_mtime_ns) for path, stat in found])
        cache_dir = str(Path(datasets.config.HF_DATASETS_CACHE) / "folders" / digest)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming, cache_dir=cache_dir)
    except Exception as error:  # network, name, split and configuration errors have their own classes
        known: list[str] = []
        if isinstance(error, ValueError):
            with contextlib.suppress(Exception):
                known = [str(each) for each in datasets.get_dataset_config_names(name)]
        if known and (config not in known if config is not None else "Config name is missing" in str(error)):
            raise config_error(name, config, known, option=option) from error
        hint = f"check the name and `--{option}_split`; without network, pass a local file"
        what = f"data set {name!r}, split {split!r} cannot be loaded: {_first_line(error)}"
        raise ToolkitError(what, hint=hint) from error


def _first_line(error: Exception) -> str:
    """Return what to quote of an error; Jinja's repeat names of the template, which may be long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def format_of_first_row(source: DataSource, split: str, first_row: dict[str, Any] | None) -> str:
    """Detect the format of a data set from its first row. Raises ToolkitError for an unknown format or no rows."""
    if first_row is None:
        raise ToolkitError(f"{source.name}: split {split!r} has no rows")
    try:
        return detect_format(first_row, source.columns)
    except ToolkitError as error:
        raise ToolkitError(f"{source.name}: row 1: {error.message}", hint=error.hint) from None


def _fingerprint(*parts: object) -> str:
    """A key for the cache of `datasets`. The code that computes the cached tokens is part of it."""
    code = [Path(file).read_bytes() for file in (__file__, formats.__file__)]
    digest = hashlib.sha256(transformers.__version__.encode())
    for part in (*code, *parts):
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


COLUMNS = ["input_ids", "labels", "length", "row", "supervised"]
ENCODED = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        **dict.fromkeys(("length", "row", "supervised", "uncut_tokens"), datasets.Value("int64")),
        "got_system_prompt": datasets.Value("bool"),
    }
)


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Encodes one row; the callable that `Dataset.map` takes."""

    tokenizer: Any
    data_format: str
    max_seq_length: int
    supervise_all: bool
    system_prompt: str | None
    columns: formats.Columns

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        if _JSON_ROW in row:
            return self.encode_row(json.loads(row[_JSON_ROW]), number=index, place=row[_PLACE])
        row = formats.with_columns(row, formats.columns_of(row, self.columns))  # Arrow gives all rows the same columns
        return self.encode_row(row, number=index, place=f"row {index + 1}")

    def encode_row(self, row: dict[str, Any], *, number: int | None, place: str) -> dict[str, Any]:
        """Return the row's tokens and counts. Raises ToolkitError with the `place` for an invalid row."""
        try:
            check_row(row, self.data_format)
            original = to_sample(row, self.data_format)
            sample = with_system_prompt(original, self.system_prompt)
            input_ids, supervised = encode(
                sample, self.tokenizer, supervise_all=self.supervise_all, max_seq_length=self.max_seq_length
            )
        except ToolkitError as error:
            raise ToolkitError(f"{place}: {error.message}", hint=error.hint) from None
        except (UnicodeError, RecursionError) as error:
            raise ToolkitError(f"{place}: the row cannot be tokenized: {error}") from None
        pairs = list(zip(input_ids, supervised, strict=True))[: self.max_seq_length]
        labels = [token if learned else IGNORED for token, learned in pairs]
        return {
            "input_ids": input_ids[: self.max_seq_length],
            "labels": labels,
            "length": len(labels),
            "row": number,
            "supervised": sum(label != IGNORED for label in labels[1:]),
            "uncut_tokens": len(input_ids),
            "got_system_prompt": sample is not original,
        }


def row_encoder(tokenizer: Any, data_format: str, arguments: DataArguments) -> RowEncoder:
    """Return the encoder for rows of one format. Raises ToolkitError for `--loss_on assistant` with text."""
    if data_format == "text" and arguments.loss_on == "assistant":
        what = "`loss_on: assistant` has no effect on plain text: there is no assistant turn"
        raise ToolkitError(what, hint="leave `--loss_on` out")
    return RowEncoder(
        tokenizer=tokenizer,
        data_format=data_format,
        max_seq_length=arguments.max_seq_length,
        supervise_all=arguments.loss_on == "all" or data_format == "text",
        system_prompt=arguments.system_prompt,
        columns=arguments.column or {},
    )


def encode_rows(dataset: datasets.Dataset, encoder: RowEncoder, *, num_proc: int | None = None) -> datasets.Dataset:
    """Tokenise all rows, or read them from the cache of `datasets`, by everything that the tokens depend on."""
    tokenizer, backend = encoder.tokenizer, getattr(encoder.tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    options = [value for name, value in vars(encoder).items() if name != "tokenizer"]
    key = vocabulary, sorted(tokenizer.special_tokens_map.items()), str(tokenizer.chat_template), *options
    return dataset.map(
        encoder,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=ENCODED,
        new_fingerprint=_fingerprint(dataset._fingerprint, *key),
        num_proc=None if num_proc is None else min(num_proc, len(dataset)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSource:
    """The tokenised rows of one data set."""

    name: str
    rows: datasets.Dataset
    encoder: RowEncoder

    def supervised(self) -> tuple[datasets.Dataset, DataStats]:
        """Return the `COLUMNS` of rows with a supervised token, and statistics. Raises ToolkitError if none is left."""
        rows, max_seq_length = self.rows, self.encoder.max_seq_length
        uncut, supervised = rows["uncut_tokens"][:], rows["supervised"][:]
        kept = [index for index, tokens in enumerate(supervised) if tokens]
        if not kept:
            raise no_supervised_tokens_error(self.name, rows, max_seq_length)
        stats = DataStats(
            format=self.encoder.data_format,
            rows=len(rows),
            dropped_rows=len(rows) - len(kept),
            epoch_rows=len(kept),
            truncated_rows=sum(tokens > max_seq_length for tokens in uncut),
            tokens=sum(min(uncut[index], max_seq_length) for index in kept),
            supervised_tokens=sum(supervised),
            longest_row_tokens=max(uncut),
            sample=mark_supervised(rows[kept[0]], self.encoder.tokenizer),
        )
        return rows.select(kept).select_columns(COLUMNS), stats


# -- supervised tokens

Encoded = tuple[list[int], list[bool]]  # input ids, and True for each that is supervised
Span = tuple[int, int]  # the first character, and the character after the last

TEMPLATE_HINT = "pass `--chat_template FILE` with a `{% generation %}` block around the assistant's turns"
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode(
    sample: Sample, tokenizer: Any, *, supervise_all: bool = False, max_seq_length: int | None = None
) -> Encoded:
    """Tokenise one sample without truncation; `supervise_all` supervises prompts and user turns too.

    Tokens behind `max_seq_length`, which will be cut, may be left unsupervised. Raises ToolkitError if the chat
    template is missing, refuses the conversation, or hides the assistant's turns.
    """
    if sample.messages is not None:
        return encode_chat(sample, tokenizer, supervise_all=supervise_all, max_seq_length=max_seq_length)
    # A prompt is tokenised separately, as in generation.
    text = sample.text if sample.text is not None else sample.prompt or ""
    eos, input_ids = tokenizer.eos_token_id, tokenizer(text, verbose=False).input_ids
    if input_ids and input_ids[-1] == eos and not text.endswith(tokenizer.eos_token):  # the tokenizer appends it
        input_ids = input_ids[:-1]
    prompt_tokens = 0 if sample.text is not None else len(input_ids)
    if sample.text is None:
        input_ids = input_ids + tokenizer(sample.completion or "", add_special_tokens=False, verbose=False).input_ids
    if eos is not None and (len(input_ids) == prompt_tokens or input_ids[-1] != eos):
        input_ids = [*input_ids, eos]
    return input_ids, [supervise_all or index >= prompt_tokens for index in range(len(input_ids))]


def encode_chat(sample: Sample, tokenizer: Any, *, supervise_all: bool, max_seq_length: int | None) -> Encoded:
    chat = _Chat(tokenizer=tokenizer, messages=sample.messages or [], tools=sample.tools)
    if not supervise_all and _GENERATION_BLOCK.search(chat.template()):
        options = {"tokenizer_kwargs": {"return_offsets_mapping": True, "verbose": False}}
        encoding = chat.apply(len(chat.messages), return_dict=True, return_assistant_tokens_mask=True, **options)
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
    cut = len(text) if max_seq_length is None or max_seq_length >= len(offsets) else offsets[max_seq_length][0]
    spans: list[Span] = []
    for index, message in enumerate(chat.messages):
        if spans and spans[-1][1] >= cut:
            break
        if message["role"] == "assistant" and index >= sample.first_supervised_message:
            spans.append(chat.assistant_span(text, index))
    return input_ids, _overlaps(offsets, spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    tokenizer: Any
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    def template(self) -> str:
        try:  # some tokenizers have another template for conversations with tools
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
            why, roles = _first_line(error), ", ".join(message["role"] for message in messages)[:300]
            hint = "change the rows, or pass `--chat_template FILE`"
            raise ToolkitError(f"the chat template refuses this conversation ({roles}): {why}", hint=hint) from None

    def assistant_span(self, text: str, index: int) -> Span:
        """The turn after its header, with its end, in the `text` of all messages; found by growing prefixes."""
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
