"""Tokenise rows, with labels only at supervised tokens.

    rows, data_format = load_rows("faq.jsonl", "train")
    encoder = row_encoder(tokenizer, data_format, DataArguments(max_seq_length=1024))
    source = EncodedSource(name="faq.jsonl", rows=encode_rows(rows, encoder), encoder=encoder)
    dataset, stats = source.supervised()

Labels are -100 at all other tokens. They follow character spans of the rendered conversation, never token ids: where
the pad token is also the end-of-turn token, masking by id would exclude the end of every turn from the loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers

from toolkit.data import formats
from toolkit.data.data_files import DataSource, check_file, config_error, iter_rows, resolve_source
from toolkit.data.formats import Sample, check_row, detect_format, to_sample, with_system_prompt
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import DataArguments
from toolkit.observe.batches import IGNORED
from toolkit.train.data import chat_template
from toolkit.train.data.chat_template import Encoded, encode_chat
from toolkit.train.data.data_report import DataStats, data_stats, no_supervised_tokens_error

_JSON_ROW, _PLACE = "json_row", "place"

# -- loading


def load_rows(source: str | DataSource, split: str, *, option: str = "dataset") -> tuple[datasets.Dataset, str]:
    """Return the rows of a local file (checked first) or of a hub data set, and their format.

    Of a file each row is JSON text: Arrow would infer types from the first rows, and give tool calls the keys of all.
    """
    resolved = resolve_source(source) if isinstance(source, str) else source
    if (path := resolved.path) is None:
        dataset = load_hub(resolved, split, option=option)
        return dataset, format_of_first_row(resolved.name, split, dataset[0] if len(dataset) else None)
    data_format = check_file(path, max_bytes=None).format
    fingerprint = _fingerprint(path.read_bytes(), data_format)  # an edited file has another content
    try:
        rows = datasets.Dataset.from_generator(
            _json_rows,
            gen_kwargs={"path": str(path), "data_format": data_format, "content": fingerprint},
            features=datasets.Features({_PLACE: datasets.Value("string"), _JSON_ROW: datasets.Value("large_string")}),
            fingerprint=fingerprint,
        )
    except OSError as error:
        cache = datasets.config.HF_DATASETS_CACHE
        raise ToolkitError(f"rows cannot be cached in {cache}: {error}", hint="set HF_HOME to another folder") from None
    return rows, data_format


def _json_rows(path: str, data_format: str, content: str) -> Iterator[dict[str, str]]:  # noqa: ARG001
    """`content` identifies the version of the file in the cache of `datasets`."""
    for place, row in iter_rows(Path(path)):
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
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = f"check the name and `--{option}_split`; without network, pass a local file"
        raise ToolkitError(f"data set {name!r}, split {split!r} cannot be loaded: {why}", hint=hint) from error


def format_of_first_row(name: str, split: str, first_row: dict[str, Any] | None) -> str:
    """Detect the format of a data set from its first row. Raises ToolkitError for an unknown format or no rows."""
    if first_row is None:
        raise ToolkitError(f"{name}: split {split!r} has no rows")
    try:
        return detect_format(first_row)
    except ToolkitError as error:
        raise ToolkitError(f"{name}: row 1: {error.message}", hint=error.hint) from None


def _fingerprint(*parts: object) -> str:
    """A key for the cache of `datasets`. The code that computes the cached tokens is part of it."""
    code = [Path(file).read_bytes() for file in (__file__, chat_template.__file__, formats.__file__)]
    digest = hashlib.sha256(transformers.__version__.encode())
    for part in (*code, *parts):
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


# -- tokens

COLUMNS = ["input_ids", "labels", "length", "row", "supervised"]
_FEATURES = datasets.Features(
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

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        if _JSON_ROW in row:
            return self.encode_row(json.loads(row[_JSON_ROW]), number=index, place=row[_PLACE])
        return self.encode_row(row, number=index, place=f"row {index + 1}")

    def encode_row(self, row: dict[str, Any], *, number: int | None, place: str) -> dict[str, Any]:
        """Return the row's tokens and counts. Raises ToolkitError with the `place` for an invalid row."""
        try:
            check_row(row, self.data_format)
            original = to_sample(row, self.data_format)
            sample = with_system_prompt(original, self.system_prompt)
            input_ids, supervised = encode(
                sample, self.tokenizer, supervise_all=self.supervise_all, max_tokens=self.max_seq_length
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

    def cache_key(self) -> tuple[object, ...]:
        """Return everything that the tokens depend on, beside the rows."""
        tokenizer, backend = self.tokenizer, getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
        parts = vocabulary, str(sorted(tokenizer.special_tokens_map.items())), str(tokenizer.chat_template)
        return *parts, self.data_format, self.max_seq_length, self.supervise_all, self.system_prompt


def row_encoder(tokenizer: Any, data_format: str, arguments: DataArguments) -> RowEncoder:
    """Return the encoder for rows of one format.

    `loss_on` is `assistant` (also the completion), `all`, or None: assistant for chat and prompt/completion, all for
    text. Raises ToolkitError for `assistant` with text.
    """
    if data_format == "text" and arguments.loss_on == "assistant":
        what = "`loss_on: assistant` has no effect on plain text: there is no assistant turn"
        raise ToolkitError(what, hint="leave `--loss_on` out")
    return RowEncoder(
        tokenizer=tokenizer,
        data_format=data_format,
        max_seq_length=arguments.max_seq_length,
        supervise_all=arguments.loss_on == "all" or data_format == "text",
        system_prompt=arguments.system_prompt,
    )


def encode_rows(dataset: datasets.Dataset, encoder: RowEncoder, *, num_proc: int | None = None) -> datasets.Dataset:
    """Tokenise all rows, or read them from the cache of `datasets`."""
    return dataset.map(
        encoder,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=_FEATURES,
        new_fingerprint=_fingerprint(dataset._fingerprint, *encoder.cache_key()),
        num_proc=None if num_proc is None else min(num_proc, len(dataset)),
    )


def encoded_dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """Return a dataset of a few encoded rows, in memory."""
    return datasets.Dataset.from_list(rows, features=_FEATURES)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSource:
    """The tokenised rows of one data set."""

    name: str
    rows: datasets.Dataset
    encoder: RowEncoder

    def supervised(self) -> tuple[datasets.Dataset, DataStats]:
        """Return the `COLUMNS` of rows with a supervised token, and statistics. Raises ToolkitError if none is left."""
        encoder = self.encoder
        kept = [index for index, supervised in enumerate(self.rows["supervised"][:]) if supervised]
        if not kept:
            error = no_supervised_tokens_error(self.rows, encoder.max_seq_length)
            raise ToolkitError(f"{self.name}: {error.message}", hint=error.hint)
        stats = data_stats(self.rows, kept, encoder.tokenizer, encoder.data_format, encoder.max_seq_length)
        return self.rows.select(kept).select_columns(COLUMNS), stats


def encode(sample: Sample, tokenizer: Any, *, supervise_all: bool = False, max_tokens: int | None = None) -> Encoded:
    """Tokenise one sample without truncation; `supervise_all` supervises prompts and user turns too.

    Tokens behind `max_tokens`, which will be cut, may be left unsupervised.
    """
    if sample.messages is not None:
        return encode_chat(sample, tokenizer, supervise_all=supervise_all, max_tokens=max_tokens)
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
