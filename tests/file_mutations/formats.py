"""The formats that are read without torch: valid files as seeds, how they are mutated, and what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from file_mutations.attempts import ROOT, Case, Command, call, command
from file_mutations.documents import YAML_VALUES, edited, json_text, yaml_text
from file_mutations.pickles import edited_pickle, edited_torch_file
from file_mutations.raw_bytes import edited_bytes

FIXTURES = ROOT / "tests" / "fixtures"
LLAMA_8B = FIXTURES / "llama-8b"
DATA = (ROOT / "examples" / "data.jsonl").read_bytes()
Files = Mapping[str, bytes | Path]


# Share of a format whose commands take milliseconds.
LIGHT_SHARE = 30


@dataclass(frozen=True, kw_only=True, repr=False)
class Format:
    """A kind of file."""

    name: str
    seeds: Sequence[Files]
    """Files of valid inputs, by name."""
    mutated: Sequence[str]
    """Patterns of the names of which one is mutated."""
    commands: Sequence[Command]
    writes: tuple[str, ...] = ("out",)
    adjust: Callable[[dict[str, bytes | Path], str], dict[str, bytes | Path]] = lambda files, _changed: files
    """Changes other files with the mutated one, as whoever wrote it on purpose would."""
    share: int = LIGHT_SHARE
    """Attempts in relation to the other formats: fewer where a command takes long."""

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def valid(self) -> list[Case]:
        """Return every seed with every command, unchanged."""
        return [
            Case(format=self.name, files=files, command=each, writes=self.writes)
            for files in self.seeds
            for each in self.commands
        ]

    def cases(self) -> st.SearchStrategy[Case]:
        """Return a strategy of seeds with one file mutated, and a command."""
        return _cases(self)


@st.composite
def _cases(draw: st.DrawFn, kind: Format) -> Case:
    files = dict(draw(st.sampled_from(kind.seeds)))
    names = sorted(name for name in files if any(Path(name).match(pattern) for pattern in kind.mutated))
    name = draw(st.sampled_from(names))
    original = content_of(files[name])
    others = tuple(content_of(files[other]) for other in names if other != name)[:2]
    files[name] = draw(mutated_file(name, original, others=others))
    run = draw(st.sampled_from(kind.commands))
    if draw(st.integers(0, 3)):
        files = kind.adjust(files, name)
    return Case(format=kind.name, files=files, command=run, changed=name, original=original, writes=kind.writes)


@st.composite
def mutated_file(draw: st.DrawFn, name: str, content: bytes, *, others: tuple[bytes, ...] = ()) -> bytes:
    """Return a file with its parsed content changed, or (one in four) its bytes."""
    structural = _structural(name, content)
    if structural is None or draw(st.integers(0, 3)) == 3:
        return draw(edited_bytes(content, others=others))
    return draw(structural)


def content_of(file: bytes | Path) -> bytes:
    return file.read_bytes() if isinstance(file, Path) else file


def _structural(name: str, content: bytes) -> st.SearchStrategy[bytes] | None:
    suffix = Path(name).suffix
    if suffix in (".yaml", ".yml"):
        return edited(yaml.safe_load(content), values=YAML_VALUES).map(lambda new: yaml_text(new).encode())
    if suffix in (".json", ".heartbeat"):
        return edited(json.loads(content)).map(lambda new: json_text(new).encode())
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in content.splitlines()]
        return edited(rows).map(lambda new: _json_lines(new).encode())
    if suffix == ".safetensors":
        return edited_safetensors(content)
    if name.endswith(".metadata"):
        return edited_pickle(content)
    if suffix in (".pt", ".pth"):
        return edited_torch_file(content)
    return None


def _json_lines(rows: Any) -> str:
    if not isinstance(rows, list):
        return json_text(rows, indent=None)
    return "".join(json_text(row, indent=None) + "\n" for row in rows)


@st.composite
def edited_safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a safetensors file whose header is changed, or lies about its length."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json_text(draw(edited(header))).encode()
    claimed = draw(st.sampled_from([len(text)] * 6 + [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]))
    return claimed.to_bytes(8, "little") + text + content[8 + length :]


def safetensors(tensors: Mapping[str, Sequence[int]]) -> bytes:
    """Return a safetensors file of fp32 zeros, by name and shape."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * offset


TINY_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TINY_MODEL: Files = {
    "model/config.json": json.dumps(TINY_CONFIG).encode(),
    "model/model.safetensors": safetensors({"model.embed_tokens.weight": (96, 32)}),
}
JOB = ("--model_name_or_path", "model", "--dataset", "rows.jsonl", "--output_dir", "out", "--max_steps", "4")
JOB_FILES: Files = {**TINY_MODEL, "rows.jsonl": DATA}


# -- Presets


def preset_seeds() -> list[Files]:
    """Return every preset as `mine.yaml` with its `mine.json`, beside a model and data."""
    from toolkit.presets import read_preset

    seeds = []
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        text = path.read_text()
        files: dict[str, bytes | Path] = dict(JOB_FILES)
        config = read_preset(path).deepspeed_config_path
        if config is not None:
            files["mine.json"] = config.read_bytes()
            text = text.replace(f"ds_configs/{config.name}", "mine.json")
        files["mine.yaml"] = text.encode()
        seeds.append(files)
    return seeds


def preset_formats() -> list[Format]:
    """Return accelerate's YAML, and DeepSpeed's JSON that it names."""
    commands = [
        command("preset", "show", "mine.yaml"),
        command("preset", "show", "mine.yaml", "--as", "trainer"),
        command("preset", "export", "out", "mine.yaml"),
        command("lint", "mine.yaml"),
        command("lint", "--json", "mine.yaml"),
        command("lint", "--fix", "mine.yaml"),
        command("plan", "model", "--gpu", "h100", "--num-processes", "8", "--preset", "mine.yaml"),
        command("train", "--dry-run", "--cpu", "--preset", "mine.yaml", "--num-processes", "2", "--", *JOB),
        command("train", "--dry-run", "--gpu", "h100", "--preset", "mine.yaml", "--num-processes", "4", "--", *JOB),
    ]
    seeds = preset_seeds()
    with_json = [files for files in seeds if "mine.json" in files]
    split = ("train", "--dry-run", "--cpu", "--preset", "mine.yaml", "--num-processes", "4", "--", *JOB)
    for_yaml = [command(*split, "--tp", "2"), command(*split, "--cp", "2")]
    for_json = [command("lint", "mine.json"), command("preset", "show", "mine.yaml", "--as", "deepspeed")]
    for_json.append(command(*split, "--sp", "2"))
    return [
        Format(name="accelerate YAML", seeds=seeds, mutated=["mine.yaml"], commands=[*commands, *for_yaml]),
        Format(name="DeepSpeed JSON", seeds=with_json, mutated=["mine.json"], commands=[*commands, *for_json]),
    ]


# -- Jobs


def training_seeds() -> list[Files]:
    """Return the examples' training arguments on a tiny model, and one file with many kinds of values."""
    seeds = []
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        arguments = yaml.safe_load(path.read_text()) | {"model_name_or_path": "model", "dataset": "rows.jsonl"}
        arguments |= {"output_dir": "out"}
        arguments.pop("load_in_4bit", None)
        seeds.append({**JOB_FILES, "job.yaml": yaml.safe_dump(arguments, sort_keys=False).encode()})
    many = {
        **{"model_name_or_path": "model", "dataset": ["rows.jsonl", "more.jsonl"], "dataset_weights": [2, 1]},
        **{"output_dir": "out", "lora_r": 8, "lora_config": {"use_dora": True, "layers_to_transform": [0, 1]}},
        **{"lora_target_modules": ["q_proj", "v_proj"], "streaming": True, "max_steps": 10, "optim": "sgd"},
        **{"optim_args": "momentum=0.9", "lr_scheduler_kwargs": {"num_cycles": 1}, "eval_dataset": "rows.jsonl"},
        **{"eval_strategy": "steps", "eval_steps": 5, "report_to": "none", "save_strategy": "steps", "save_steps": 0.5},
        **{"system_prompt": "Be brief.", "loss_on": "all", "warmup_steps": 3, "seed": 1},
    }
    seeds.append({**JOB_FILES, "more.jsonl": DATA, "job.yaml": yaml.safe_dump(many, sort_keys=False).encode()})
    return seeds


def job_formats() -> list[Format]:
    """Return training arguments as YAML, data files, and a model's configuration."""
    dry_run = command("train", "--dry-run", "--cpu", "--preset", "ddp", "--num-processes", "2", "--", "job.yaml")
    planned = command(
        "train", "--dry-run", "--gpu", "h100", "--preset", "zero3", "--num-processes", "2", "--", "job.yaml"
    )
    return [
        Format(
            name="training YAML",
            seeds=training_seeds(),
            mutated=["job.yaml"],
            commands=[dry_run, planned, command("lint", "job.yaml")],
        ),
        Format(name="data file", seeds=data_seeds(), mutated=["rows.*"], commands=[call(read_every_row)]),
        Format(
            name="model config.json",
            seeds=model_seeds(),
            mutated=["config.json"],
            commands=[call(plan_without_counting)],
        ),
        Format(
            name="config.json of a job",
            seeds=[{**JOB_FILES}],
            mutated=["config.json", "model.safetensors"],
            commands=[command("train", "--dry-run", "--cpu", "--preset", "ddp", "--num-processes", "2", "--", *JOB)],
            share=6,
        ),
    ]


def data_seeds() -> list[Files]:
    """Return the same conversations in every format and kind of file."""
    import csv
    import io

    rows = [json.loads(line) for line in DATA.splitlines()][:6]
    alpaca = [
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"instruction": "Hi", "input": "", "output": "Hej"},
    ]
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    sharegpt = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hej"}], "tools": tools}]
    completion = [{"prompt": "1 + 1 =", "completion": " 2"}]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(alpaca[0]))
    writer.writeheader()
    writer.writerows(alpaca)
    lists = [rows, alpaca, sharegpt, completion]
    return [
        *({"rows.jsonl": _json_lines(each).encode()} for each in lists),
        *({"rows.json": json.dumps(each).encode()} for each in lists),
        {"rows.json": json.dumps({"data": rows}, indent=1).encode()},
        {"rows.csv": text.getvalue().encode()},
        {"rows.parquet": _parquet(alpaca)},
    ]


def _parquet(rows: list[dict[str, str]]) -> bytes:
    import io

    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def read_every_row() -> None:
    """check_file and to_sample on rows.*"""
    from toolkit.data.data_files import check_file, iter_rows
    from toolkit.data.formats import to_sample

    path = next(Path.cwd().glob("rows.*"))
    checked = check_file(path)
    for _, row in iter_rows(path):
        to_sample(row, checked.format)


def model_seeds() -> list[Files]:
    """Return tiny configurations of every architecture that has formulas, and the fixtures'."""
    from model_configs import ARCHITECTURES

    tiny = [{"model_type": model_type, **fields} for model_type, fields in ARCHITECTURES]
    real = [json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*/config.json"))]
    return [{"config.json": json.dumps(fields).encode()} for fields in (*tiny, *real)]


def plan_without_counting() -> None:
    """read_model on config.json, and plans"""
    from toolkit.hardware.gpu_table import find_gpu
    from toolkit.models.read_model import check_unquantized, read_model
    from toolkit.plan.planned_job import PlannedJob
    from toolkit.plan.planner import PlanRequest, make_plans
    from toolkit.presets import load_preset

    check_unquantized("config.json")
    shape = read_model("config.json", count=False)
    presets = [load_preset(name) for name in ("ddp", "zero3")]
    request = PlanRequest(shape=shape, presets=presets, world_sizes=[8], job=PlannedJob(), gpu=find_gpu("h100"))
    make_plans(request)


# -- Other tools' configurations

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj, v_proj
dataset: faq
template: qwen3
cutoff_len: 4096
neat_packing: true
output_dir: saves/lora
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
deepspeed: ds.json
val_size: 0.1
eval_strategy: steps
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen3-8B
datasets:
  - path: a/b
    split: train
    columns: [messages]
mixture_weights: [1.0]
learning_rate: 2.0e-4
use_peft: true
lora_r: 16
lora_target_modules: all-linear
packing: true
env:
  WANDB_PROJECT: demo
output_dir: out
"""


def conversion_formats() -> list[Format]:
    """Return the files of TRL, axolotl and LLaMA-Factory that `convert-config` reads."""
    info = json.dumps({"faq": {"file_name": "faq.jsonl", "formatting": "sharegpt", "columns": {"messages": "m"}}})
    factory = {
        "theirs.yaml": LLAMA_FACTORY.encode(),
        "ds.json": (ROOT / "ds_configs" / "zero3.json").read_bytes(),
        "data/dataset_info.json": info.encode(),
        "data/faq.jsonl": DATA,
    }
    seeds: list[Files] = [
        {"theirs.yaml": (FIXTURES / "axolotl.yaml").read_bytes(), "rows.jsonl": DATA},
        {"theirs.yaml": TRL_YAML.encode()},
        factory,
    ]
    commands = [
        command("convert-config", "theirs.yaml"),
        command("convert-config", "theirs.yaml", "--json"),
        command("convert-config", "theirs.yaml", "--output", "out/ours.yaml"),
    ]
    return [
        Format(
            name="other tool's YAML",
            seeds=seeds,
            mutated=["theirs.yaml", "ds.json", "dataset_info.json"],
            commands=commands,
        ),
    ]


# -- Comparisons


def comparison_formats() -> list[Format]:
    """Return results.json, comparison.json and the ledger."""
    names = ("results_small.json", "results_made_up_gpus.json")
    results: list[Files] = [{"cmp/results.json": (FIXTURES / name).read_bytes()} for name in names]
    reports = [command("report", "cmp"), command("report", "cmp", "--price-per-gpu-hour", "2")]
    return [
        Format(
            name="results.json", seeds=results, mutated=["results.json"], commands=reports, writes=("cmp",), share=6
        ),
        Format(
            name="ledger",
            seeds=[ledger_seed()],
            mutated=["ledger.jsonl", "comparison.json"],
            commands=[call(results_of_ledger)],
            writes=("cmp",),
            share=6,
        ),
    ]


def ledger_seed() -> Files:
    """Return a comparison of two presets with trials, a probe and a side run."""
    from comparison_records import comparison, probe, trial

    from toolkit.compare.ledger import SideRunRecord

    spec = comparison("ddp", "other", repeats=2)
    records = [
        *(trial(preset, repeat) for repeat in (0, 1) for preset in ("ddp", "other")),
        probe("ddp", 4, status="out_of_memory"),
        SideRunRecord.of(trial("ddp", 0), trial="ddp-n2-profile", kinds=["profile"], communication_fraction=0.25),
    ]
    lines = "".join(record.model_dump_json() + "\n" for record in records)
    return {"cmp/comparison.json": json.dumps(spec.as_json()).encode(), "cmp/ledger.jsonl": lines.encode()}


def results_of_ledger() -> None:
    """open_comparison, build_results and write_report, as `compare --resume` does with a finished comparison"""
    from comparison_records import comparison

    from toolkit.compare.build_results import build_results
    from toolkit.compare.comparison_report import write_report
    from toolkit.compare.specification import open_comparison

    folder, spec = Path("cmp"), comparison("ddp", "other", repeats=2)
    open_comparison(folder, spec, resume=True)
    write_report(build_results(spec, folder, {}), folder)


def light_formats() -> list[Format]:
    """Return the formats that are read without torch."""
    return [*preset_formats(), *job_formats(), *conversion_formats(), *comparison_formats()]
