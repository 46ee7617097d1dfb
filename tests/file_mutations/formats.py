"""The formats that are read without torch: valid files as seeds, how they are mutated, and what reads them."""

import csv
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import yaml
from comparison_records import comparison, probe, trial
from hypothesis import strategies as st
from model_configs import ARCHITECTURES
from safetensors.numpy import save
from scripts.write_presets import SETTINGS_BLOCK

from file_mutations import edits
from file_mutations.attempts import ROOT, Case, Command, call, command
from file_mutations.edits import edited, json_text
from toolkit.compare.build_results import build_results
from toolkit.compare.comparison_report import write_report
from toolkit.compare.specification import open_comparison
from toolkit.data.data_files import check_file, iter_rows
from toolkit.data.formats import to_sample
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import check_unquantized, read_model
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import PlanRequest, make_plans
from toolkit.presets import load_preset, read_preset

FIXTURES = ROOT / "tests" / "fixtures"
DATA = (ROOT / "examples" / "data.jsonl").read_bytes()
Files = Mapping[str, bytes | Path]

# Share of a format whose commands take milliseconds.
LIGHT_SHARE = 30


@dataclass(frozen=True, kw_only=True, repr=False)
class Format:
    """A kind of file."""

    name: str
    seeds: Sequence[Files]  # files of valid inputs, by name
    mutated: Sequence[str]  # patterns of the names of which one is mutated
    commands: Sequence[Command]
    writes: tuple[str, ...] = ("out",)
    adjust: Callable[[dict[str, bytes | Path], str], dict[str, bytes | Path]] = lambda files, _changed: files
    """Changes other files with the mutated one, as whoever wrote it on purpose would."""
    share: int = LIGHT_SHARE  # attempts in relation to the other formats: fewer where a command takes long

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def valid(self) -> list[Case]:
        pairs = itertools.product(self.seeds, self.commands)
        return [Case(format=self.name, files=files, command=each, writes=self.writes) for files, each in pairs]


@st.composite
def mutated_cases(draw: st.DrawFn, kind: Format) -> Case:
    files = dict(draw(st.sampled_from(kind.seeds)))
    names = sorted(name for name in files if any(Path(name).match(pattern) for pattern in kind.mutated))
    name = draw(st.sampled_from(names))
    content = content_of(files[name])
    structural = _structural(name, content)
    if structural is None or draw(st.integers(0, 3)) == 3:
        others = tuple(content_of(files[other]) for other in names if other != name)[:2]
        structural = edits.edited_bytes(content, others=others)
    files[name] = draw(structural)
    run = draw(st.sampled_from(kind.commands))
    if draw(st.integers(0, 3)):
        files = kind.adjust(files, name)
    return Case(format=kind.name, files=files, command=run, changed=name, writes=kind.writes)


def content_of(file: bytes | Path) -> bytes:
    return file.read_bytes() if isinstance(file, Path) else file


def _structural(name: str, content: bytes) -> st.SearchStrategy[bytes] | None:
    """Return a strategy of files whose parsed content is changed; None for a kind that is not parsed."""
    match Path(name).suffix or name[-9:]:
        case ".yaml" | ".yml":
            return edited(yaml.safe_load(content), values=edits.YAML_VALUES).map(
                lambda new: edits.yaml_text(new).encode()
            )
        case ".json" | ".heartbeat":
            return edited(json.loads(content)).map(lambda new: json_text(new).encode())
        case ".jsonl":
            return edited([json.loads(line) for line in content.splitlines()]).map(_json_lines)
        case ".safetensors":
            return edited_safetensors(content)
        case ".metadata":
            return edits.edited_pickle(content)
        case ".pt" | ".pth":
            return edits.edited_torch_file(content)
    return None


def _json_lines(rows: Any) -> bytes:
    lines = [json_text(row, indent=None) + "\n" for row in rows] if isinstance(rows, list) else [json_text(rows)]
    return "".join(lines).encode()


@st.composite
def edited_safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text = json_text(draw(edited(json.loads(content[8 : 8 + length])))).encode()
    claimed = draw(st.sampled_from([len(text)] * 6 + [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]))
    return claimed.to_bytes(8, "little") + text + content[8 + length :]


TINY_CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "tie_word_embeddings": True},
}
DRY_RUN = ("train", "--dry-run", "--cpu", "--preset", "ddp", "--num-processes", "2", "--")
JOB = ("--model_name_or_path", "model", "--dataset", "rows.jsonl", "--output_dir", "out", "--max_steps", "4")
JOB_FILES: Files = {
    "model/config.json": json.dumps(TINY_CONFIG).encode(),
    "model/model.safetensors": save({"model.embed_tokens.weight": numpy.zeros((96, 32), "float32")}),
    "rows.jsonl": DATA,
}


# -- Presets


def preset_formats() -> list[Format]:
    """Return accelerate's YAML of every preset, and DeepSpeed's JSON that it names, beside a model and data."""
    seeds = []
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        text, files = path.read_text(), dict(JOB_FILES)
        if (settings := read_preset(path).deepspeed_config()) is not None:
            named = SETTINGS_BLOCK.sub("  deepspeed_config_file: mine.json\n", text).encode()
            seeds.append({**files, "mine.yaml": named, "mine.json": json.dumps(settings, indent=2).encode()})
        seeds.append({**files, "mine.yaml": text.encode()})
    dry_run = ("train", "--dry-run", "--preset", "mine.yaml", "--num-processes")
    split = (*dry_run, "4", "--cpu", "--", *JOB)
    commands = [*(command("preset", "show", "mine.yaml", *options) for options in ((), ("--as", "trainer")))]
    commands += [*(command("lint", *options, "mine.yaml") for options in ((), ("--json",), ("--fix",)))]
    commands += [command("preset", "export", "out", "mine.yaml")]
    commands += [command("plan", "model", "--gpu", "h100", "--num-processes", "8", "--preset", "mine.yaml")]
    commands += [command(*dry_run, "2", "--cpu", "--", *JOB), command(*dry_run, "4", "--gpu", "h100", "--", *JOB)]
    for_yaml = [command(*split, "--tp", "2"), command(*split, "--cp", "2")]
    for_json = [command("preset", "show", "mine.yaml", "--as", "deepspeed"), command(*split, "--sp", "2")]
    for_json.append(command("lint", "mine.json"))
    with_json = [files for files in seeds if "mine.json" in files]
    return [
        Format(name="accelerate YAML", seeds=seeds, mutated=["mine.yaml"], commands=[*commands, *for_yaml]),
        Format(name="DeepSpeed JSON", seeds=with_json, mutated=["mine.json"], commands=[*commands, *for_json]),
    ]


# -- Jobs


def training_seeds() -> list[Files]:
    """Return the examples' training arguments on a tiny model, and one file with many kinds of values."""
    ours = {"model_name_or_path": "model", "dataset": "rows.jsonl", "output_dir": "out"}
    jobs = [yaml.safe_load(path.read_text()) | ours for path in sorted((ROOT / "examples").glob("*.yaml"))]
    many = {
        **ours,
        **{"dataset": ["rows.jsonl", "more.jsonl"], "dataset_weights": [2, 1], "lora_r": 8, "optim": "sgd"},
        **{"lora_config": {"use_dora": True, "layers_to_transform": [0, 1]}, "streaming": True, "max_steps": 10},
        **{"lora_target_modules": ["q_proj", "v_proj"], "optim_args": "momentum=0.9", "eval_dataset": "rows.jsonl"},
        **{"lr_scheduler_kwargs": {"num_cycles": 1}, "eval_strategy": "steps", "eval_steps": 5, "report_to": "none"},
        **{"save_strategy": "steps", "save_steps": 0.5, "system_prompt": "Be brief.", "loss_on": "all"},
        **{"warmup_steps": 3, "seed": 1},
    }
    for job in jobs:
        job.pop("load_in_4bit", None)
    texts = [yaml.safe_dump(job, sort_keys=False).encode() for job in [*jobs, many]]
    return [{**JOB_FILES, "more.jsonl": DATA, "job.yaml": text} for text in texts]


def job_formats() -> list[Format]:
    on_gpus = ("train", "--dry-run", "--gpu", "h100", "--preset", "zero3", "--num-processes", "2", "--", "job.yaml")
    training = [command(*DRY_RUN, "job.yaml"), command(*on_gpus), command("lint", "job.yaml")]
    tiny = [{"model_type": model_type, **fields} for model_type, fields in ARCHITECTURES]
    real = [json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*/config.json"))]
    models: list[Files] = [{"config.json": json.dumps(fields).encode()} for fields in (*tiny, *real)]
    of_job, job = ["config.json", "model.safetensors"], [command(*DRY_RUN, *JOB)]
    return [
        Format(name="training YAML", seeds=training_seeds(), mutated=["job.yaml"], commands=training),
        Format(name="data file", seeds=data_seeds(), mutated=["rows.*"], commands=[call(read_every_row)]),
        Format(name="model config.json", seeds=models, mutated=["config.json"], commands=[call(plan_without_counting)]),
        Format(name="config.json of a job", seeds=[JOB_FILES], mutated=of_job, commands=job, share=6),
    ]


def data_seeds() -> list[Files]:
    rows = [json.loads(line) for line in DATA.splitlines()][:6]
    asked = [("Add.", "1, 2", "3"), ("Hi", "", "Hej")]
    alpaca = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in asked]
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    sharegpt = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hej"}], "tools": tools}]
    text, parquet = io.StringIO(), io.BytesIO()
    csv.writer(text).writerows([list(alpaca[0]), *asked])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(alpaca), parquet)
    lists = [rows, alpaca, sharegpt, [{"prompt": "1 + 1 =", "completion": " 2"}]]
    return [
        *({"rows.jsonl": _json_lines(each)} for each in lists),
        *({"rows.json": json.dumps(each).encode()} for each in lists),
        {"rows.json": json.dumps({"data": rows}, indent=1).encode()},
        {"rows.csv": text.getvalue().encode()},
        {"rows.parquet": parquet.getvalue()},
    ]


def read_every_row() -> None:
    """check_file and to_sample on rows.*"""
    path = next(Path.cwd().glob("rows.*"))
    checked = check_file(path)
    for _, row in iter_rows(path):
        to_sample(row, checked.format)


def plan_without_counting() -> None:
    """read_model on config.json, and plans"""
    check_unquantized("config.json")
    shape = read_model("config.json", count=False)
    presets = [load_preset(name) for name in ("ddp", "zero3")]
    make_plans(PlanRequest(shape=shape, presets=presets, world_sizes=[8], job=PlannedJob(), gpu=find_gpu("h100")))


# -- Other tools' configurations

LLAMA_FACTORY: dict[str, Any] = {
    **{"model_name_or_path": "Qwen/Qwen3-8B", "stage": "sft", "do_train": True, "finetuning_type": "lora"},
    **{"lora_target": "q_proj, v_proj", "dataset": "faq", "template": "qwen3", "cutoff_len": 4096},
    **{"neat_packing": True, "output_dir": "saves/lora", "per_device_train_batch_size": 1, "learning_rate": 1.0e-4},
    **{"num_train_epochs": 3.0, "deepspeed": "ds.json", "val_size": 0.1, "eval_strategy": "steps"},
}
TRL: dict[str, Any] = {
    **{"model_name_or_path": "Qwen/Qwen3-8B", "mixture_weights": [1.0], "learning_rate": 2.0e-4, "use_peft": True},
    **{"datasets": [{"path": "a/b", "split": "train", "columns": ["messages"]}], "lora_r": 16, "packing": True},
    **{"lora_target_modules": "all-linear", "env": {"WANDB_PROJECT": "demo"}, "output_dir": "out"},
}


def conversion_formats() -> list[Format]:
    info = {"faq": {"file_name": "faq.jsonl", "formatting": "sharegpt", "columns": {"messages": "m"}}}
    seeds: list[Files] = [
        {"theirs.yaml": (FIXTURES / "axolotl.yaml").read_bytes(), "rows.jsonl": DATA},
        {"theirs.yaml": yaml.safe_dump(TRL).encode()},
        {
            "theirs.yaml": yaml.safe_dump(LLAMA_FACTORY).encode(),
            "ds.json": (ROOT / "ds_configs" / "zero3.json").read_bytes(),
            "data/dataset_info.json": json.dumps(info).encode(),
            "data/faq.jsonl": DATA,
        },
    ]
    convert = ("convert-config", "theirs.yaml")
    commands = [command(*convert), command(*convert, "--json"), command(*convert, "--output", "out/ours.yaml")]
    mutated = ["theirs.yaml", "ds.json", "dataset_info.json"]
    return [Format(name="other tool's YAML", seeds=seeds, mutated=mutated, commands=commands)]


# -- Comparisons


def comparison_formats() -> list[Format]:
    """Return results.json, comparison.json and the ledger, of two presets with trials, a probe and a side run."""
    names = ("results_small.json", "results_made_up_gpus.json")
    results: list[Files] = [{"cmp/results.json": (FIXTURES / name).read_bytes()} for name in names]
    reports = [command("report", "cmp"), command("report", "cmp", "--price-per-gpu-hour", "2")]
    records = [
        *(trial(preset, repeat) for repeat in (0, 1) for preset in ("ddp", "other")),
        probe("ddp", 4, status="out_of_memory"),
        trial("ddp", 0).updated(
            trial="ddp-n2-profile", kind="side_run", kinds=("profile",), communication_fraction=0.25
        ),
    ]
    ledger = {
        "cmp/comparison.json": json.dumps(comparison("ddp", "other", repeats=2).as_json()).encode(),
        "cmp/ledger.jsonl": "".join(record.model_dump_json() + "\n" for record in records).encode(),
    }
    ours, rest = ["ledger.jsonl", "comparison.json"], {"writes": ("cmp",), "share": 6}
    return [
        Format(name="results.json", seeds=results, mutated=["results.json"], commands=reports, **rest),
        Format(name="ledger", seeds=[ledger], mutated=ours, commands=[call(results_of_ledger)], **rest),
    ]


def results_of_ledger() -> None:
    """open_comparison, build_results and write_report, as `compare --resume` does with a finished comparison"""
    folder, spec = Path("cmp"), comparison("ddp", "other", repeats=2)
    open_comparison(folder, spec, resume=True)
    write_report(build_results(spec, folder, {}), folder)


def light_formats() -> list[Format]:
    return [*preset_formats(), *job_formats(), *conversion_formats(), *comparison_formats()]
