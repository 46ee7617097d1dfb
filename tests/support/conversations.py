"""A conversation, its rendering by the chat template, and the tokenised rows that several tests use."""

import copy
from typing import Any

import datasets

from toolkit.data.formats import Sample
from toolkit.job.argument_fields import DataArguments
from toolkit.observe.batches import IGNORED
from toolkit.train.data.data_report import DataStats, mark_supervised
from toolkit.train.data.tokenization import EncodedSource, encode, encode_rows, row_encoder

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hej?"}]
TURNS += [{"role": "assistant", "content": "Hello 🙂\n\nyou"}, {"role": "user", "content": "  Åter?\n"}]
TURNS += [{"role": "assistant", "content": "Again.\n"}]
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


def with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def marked(sample: Sample, tokenizer: Any, *, supervise_all: bool = False) -> str:
    input_ids, supervised = encode(sample, tokenizer, supervise_all=supervise_all)
    labels = [token if learned else IGNORED for token, learned in zip(input_ids, supervised, strict=True)]
    return mark_supervised({"input_ids": input_ids, "labels": labels}, tokenizer)


def tokenized(
    rows: list[dict[str, Any]] | datasets.Dataset, tokenizer: Any, data_format: str, **changes: Any
) -> tuple[datasets.Dataset, DataStats]:
    dataset = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    encoder = row_encoder(tokenizer, data_format, DataArguments(**{"max_seq_length": 128, **changes}))
    return EncodedSource(name="rows", rows=encode_rows(dataset, encoder), encoder=encoder).supervised()
