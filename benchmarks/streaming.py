"""CPU time of streaming per rank: parsing every row, tokenising its own, and resuming after a checkpoint.

    python benchmarks/streaming.py

One process, in seconds of CPU time, which other processes on a busy machine hardly change. The chitchat data
(conversations of many turns) and the FAQ (one answer per row), `max_seq_length` 1,024, a buffer of 1,000 rows.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record import print_table, write_result

from toolkit.demo.assets import chitchat_data_file, default_data_file, prepare_default_model
from toolkit.train.data.packing import OpenPacks
from toolkit.train.data.streaming import LANE_STATE, BatchShare, RowStream, TokenStream, endless_rows, open_stream
from toolkit.train.data.tokenization import RowEncoder, row_encoder

MAX_SEQ_LENGTH = 1024
PARSED_ROWS = 6000
SEQUENCES = 240
SHARE = BatchShare(rank=0, world_size=1, per_device_train_batch_size=8, gradient_accumulation_steps=1)


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds that `work` takes in this process, and its result."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def opened(path: Path, tokenizer: Any) -> tuple[RowStream, RowEncoder]:
    rows = open_stream(str(path), "train", buffer_size=1000, seed=42)
    encoder = row_encoder(
        tokenizer=tokenizer,
        data_format=rows.data_format,
        max_seq_length=MAX_SEQ_LENGTH,
        loss_on=None,
        system_prompt=None,
    )
    return rows, encoder


def cost(path: Path, tokenizer: Any) -> dict[str, float]:
    """Return the cost of one file: parsing rows, tokenising and packing them, and both again for a resumed run."""
    rows, encoder = opened(path, tokenizer)
    parsing, _ = cpu_seconds(lambda: list(itertools.islice(endless_rows(rows, at_least=1), PARSED_ROWS)))
    training, sequences = cpu_seconds(lambda: list(itertools.islice(TokenStream(rows, [encoder], SHARE), SEQUENCES)))
    states = {row[LANE_STATE].lane: row[LANE_STATE] for row in sequences}
    resumed = TokenStream(rows, [encoder], SHARE)
    resumed.resume(states, batches=SEQUENCES // 8)
    going_on, _ = cpu_seconds(lambda: list(itertools.islice(resumed, SEQUENCES, SEQUENCES + 1)))
    return {
        "parsed_rows_per_cpu_second": PARSED_ROWS / parsing,
        "tokenised_rows_per_cpu_second": SEQUENCES / training,
        "tokenised_tokens_per_cpu_second": sum(len(row["input_ids"]) for row in sequences) / training,
        "tokenising_again_seconds": training,
        "going_on_seconds": going_on,
    }


def first_sequence(path: Path, tokenizer: Any) -> float:
    """Return the CPU seconds from opening a file to its first sequence."""

    def first() -> Any:
        rows, encoder = opened(path, tokenizer)
        return next(iter(TokenStream(rows, [encoder], SHARE)))

    return cpu_seconds(first)[0]


def pack_fill(path: Path, tokenizer: Any, *, rows: int, open_packs: int) -> float:
    """Return the tokens of the packs over their capacity."""
    stream, encoder = opened(path, tokenizer)
    packs = OpenPacks(max_tokens=MAX_SEQ_LENGTH, at_most=open_packs)
    given = [pack for row in encoded(stream, encoder, rows) if (pack := packs.add(row)) is not None]
    return sum(len(row["input_ids"]) for pack in given for row in pack) / (MAX_SEQ_LENGTH * len(given))


def encoded(stream: RowStream, encoder: RowEncoder, number: int) -> Iterator[dict[str, Any]]:
    for row in itertools.islice(stream.epoch(0), number):
        yield encoder.encode_row(row.fields, number=row.number, place=row.place_in(stream.name))


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0]).parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_default_model())
    files = {"chitchat": chitchat_data_file(), "faq": default_data_file("faq-en-sharegpt.jsonl")}
    costs = {name: cost(path, tokenizer) for name, path in files.items()}
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "rows.jsonl"
        text = files["faq"].read_text().rstrip("\n") + "\n"
        large.write_text(text * 500)
        first = {"file_bytes": large.stat().st_size, "cpu_seconds": first_sequence(large, tokenizer)}
    fill = {str(number): pack_fill(files["chitchat"], tokenizer, rows=1000, open_packs=number) for number in (4, 8, 32)}
    names = list(next(iter(costs.values())))
    print_table(["data", *names], [[name, *(f"{found[key]:,.3g}" for key in names)] for name, found in costs.items()])
    print(f"first sequence of {first['file_bytes'] / 2**20:.0f} MiB: {first['cpu_seconds']:.2f} s; pack fill {fill}")
    print(
        write_result("streaming", {"costs": costs, "first_sequence": first, "chitchat_pack_fill_by_open_packs": fill})
    )


if __name__ == "__main__":
    main()
