"""A hub data set as a folder on the disk: two configurations, declared in its README.md."""

import json
from pathlib import Path

README = """\
---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train.jsonl}
  - {split: validation, path: en/validation.jsonl}
- config_name: sv
  data_files:
  - {split: train, path: sv/train.jsonl}
---
# Greetings
"""


def write_dataset_folder(folder: Path, *, default: str | None = None) -> Path:
    text = README if default is None else README.replace(f"name: {default}\n", f"name: {default}\n  default: true\n")
    for file, word, count in (("en/train", "hello", 6), ("en/validation", "goodbye", 2), ("sv/train", "hej", 6)):
        path = folder / f"{file}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"{word} {number}"}) + "\n" for number in range(count)))
    (folder / "README.md").write_text(text)
    return folder
