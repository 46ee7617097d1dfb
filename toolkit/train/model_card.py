"""The README.md of a trained folder: what it was trained from and how, and the Python that talks to it.

All of it is read from the run folder. Of a local path only the last name is shown: the card may be published.
"""

import hashlib
import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from toolkit.demo.assets import attribution
from toolkit.files import write_text
from toolkit.job.argument_values import as_list
from toolkit.record.folder import RunFolder, read_json
from toolkit.record.measurements import read_steps
from toolkit.units import number

# Ends a card, with the digest of the text above it: a later run replaces one that nobody has edited.
_MARK = "<!-- Written by finetune-toolkit; an edited card is kept. "
_CARD = """\
---
{front}
---

# {title}

| | |
| :-- | :-- |
{rows}

```python
from {library} import {auto}
from transformers import AutoTokenizer

model, tokenizer = {auto}.from_pretrained({folder!r}), AutoTokenizer.from_pretrained({folder!r})
inputs = tokenizer{question}, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```
"""
_CHAT = '.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=True'


def write_model_card(folder: RunFolder) -> str:
    """Write the card of a completed run, unless its user wrote one, and return the line that says what to do next."""
    path, card = folder.path, folder.path / "README.md"
    line, merge = f"{card} is yours, and was kept", f"`toolkit checkpoint export {path} FOLDER --merge-lora`"
    body, _, mark = card.read_text("utf-8").rpartition(_MARK) if card.is_file() else ("", "", _sha256(""))
    if mark.removesuffix(" -->\n") == _sha256(body):
        text = model_card(folder)
        write_text(card, f"{text}{_MARK}{_sha256(text)} -->\n")
        line = f"next: the Python in {card} loads the model and answers"
    return line + f"; {merge} merges the adapter into its base" * (path / "adapter_config.json").is_file()


def model_card(folder: RunFolder) -> str:
    """Return the card's text: the hub's front matter, a table of facts, and how to use the model."""
    run, rank = folder.read_run() or {}, (read_json(folder.attestation_json) or {"ranks": [{}]})["ranks"][0]
    spec, model, measured, path = run["spec"], run["spec"]["model"], run["measured"], folder.path
    base, licence, names = _shown(name := model["model_name_or_path"]), _licence(name), spec["data"]["dataset"]
    adapter, library, auto = read_json(path / "adapter_config.json"), "transformers", "AutoModelForCausalLM"
    method = "some of the weights" if model["freeze"] or model["train_only"] else "all weights"
    if adapter is not None:
        library, auto = "peft", "AutoPeftModelForCausalLM"
        layers = {name.rpartition(".")[2] for name in as_list(adapter["target_modules"])}
        method = f"{'Q' * model['load_in_4bit']}LoRA, r {adapter['r']}, alpha {adapter['lora_alpha']}"
        method += f", on {', '.join(sorted(layers))}"
    tokens = sum(row.non_padding_tokens or 0 for step in read_steps(folder) for row in step)
    losses = [
        f"{number(measured['first_loss'], 4)} in the first step",
        f"{number(measured['last_loss'], 4)} in the last",
    ]
    losses += [f"{number(row['eval_loss'], 4)} evaluated" for row in run.get("evaluations", [])[-1:]]
    read_back = ", ".join(f"{key} {rank.get(key)}" for key in ("engine", "sharding", "compute_dtype", "master_dtype"))
    data_rows = "streamed" if run["data"]["streamed"] else f"{run['data']['rows']:,} rows"
    rows = [
        f"Base model | {base}; licence: {licence or 'see the base model'}",
        "; ".join([f"Data | {', '.join(map(_shown, names))}, {data_rows}", *filter(None, map(attribution, names))]),
        f"Method | supervised fine-tuning of {method}",
        f"Preset | {run['preset'] or 'none'}, ranks: {run['world_size']} ({spec['device']})",
        f"Steps | {measured['steps']}, each of {spec['global_batch_size']} sequences of up to"
        f" {spec['data']['max_seq_length']} tokens; {tokens:,} tokens in all",
        f"Learning rate | {spec['learning_rate']:g}, {spec['lr_scheduler_type']}, {spec['optim']}, seed {spec['seed']}",
        f"Loss | {', '.join(losses)}",
        f"Verified | by each rank after its first step: {read_back}",
        f"Versions | {', '.join(f'{name} {version}' for name, version in run['versions'].items() if version)}",
        f"Date | {run['finished'][:10]}",
    ]
    hub = [name for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists()]
    tags = ["finetune-toolkit", "sft", *(["lora"] if adapter else [])]
    front = ModelCardData(base_model=base, datasets=hub or None, library_name=library, tags=tags)
    front.license, front.pipeline_tag = licence and licence.lower(), "text-generation"
    return _CARD.format(
        front=front.to_yaml(),
        title=path.absolute().name,
        rows="\n".join(f"| {row} |" for row in rows),
        library=library,
        auto=auto,
        folder=path.name if path.is_absolute() else str(path),
        question=_CHAT if list(path.glob("chat_template*")) else '("Hello"',
    )


def _licence(name: str) -> str | None:
    card = Path(name) / "README.md" if Path(name).is_dir() else try_to_load_from_cache(name, "README.md")
    try:
        licence = ModelCard.load(Path(str(card))).data.license
    except (OSError, ValueError):  # no card, or one whose front matter is not YAML
        licence = (read_json(Path(name) / "provenance.json") or {}).get("license")
    return licence if isinstance(licence, str) else None


def _shown(name: str) -> str:
    return Path(name).absolute().name if Path(name).exists() else name


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
