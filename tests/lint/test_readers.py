"""Who reads a file decides what lint says of it: the script's own dataclass or parser, its project, or nobody known."""

import json
from pathlib import Path

import pytest

from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint.check import fixed_text, lint_paths
from toolkit.lint.document import detect_kind
from toolkit.lint.findings import Finding

COMMAND = "torchrun train.py --model_name_or_path a/b --output_dir out --bf16 --warmup_ratio 0.1\n"
HF = "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser((Mine, TrainingArguments))\n"
TRL_SCRIPT = "from trl import ModelConfig, TrlParser\nTrlParser((Mine, SFTConfig, ModelConfig))\n"
TRL = "model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\nmax_length: 512\noutput_dir: out\nreport_to: none\n"
OF_A_SCRIPT = f"{TRL}my_prompts: x\nmore_of_mine: y\ntorch_dtype: bfloat16\nwarmup_ratio: 0.1\n"
ACCELERATE = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: {}\n  fsdp_{}: {}\n"


def lint(folder: Path, **files: str) -> list[Finding]:
    """Lint the first of some files, named with `__` in the place of the dot; the others lie beside it."""
    paths = [folder / name.replace("__", ".") for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text)
    return lint_paths(paths[:1]).findings


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.key: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("source", "level"),
    [
        (HF, "error"),  # the library's own dataclass gets it
        (f"{HF}class Mine(TrainingArguments):\n    warmup_ratio: float = 0.1\n", None),
        (f"{HF}HfArgumentParser(Mine).parse_args_into_dataclasses(return_remaining_strings=True)\n", "warning"),
        ("p = argparse.ArgumentParser()\np.add_argument('--warmup-ratio', type=float)\n", None),
        ("p = argparse.ArgumentParser()\nadd_all(p)\n", None),  # a parser of its own
        ("", "warning"),  # nothing says who reads it
    ],
)
def test_an_argument_that_the_script_declares_is_no_error(source: str, level: str | None, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers>=5.15\n")
    findings = lint(tmp_path, run__sh=COMMAND, train__py=source)
    assert levels(findings).get("warmup_ratio") == level


def test_a_dataclass_beside_the_script_counts_too(tmp_path: Path) -> None:
    own = "@dataclass\nclass Mine:\n    warmup_ratio: Optional[float] = None\n"
    assert "warmup_ratio" not in levels(lint(tmp_path, run__sh=COMMAND, train__py=HF, arguments__py=own))


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        (f"{TRL}warmup_ratio: 0.1\n", "", {"warmup_ratio": "error"}),  # a file that TRL's commands read
        (f"{TRL}warmup_ratio: 0.1\n", "class A:\n    warmup_ratio: float = 0\n", {"warmup_ratio": "note"}),
        (OF_A_SCRIPT, "", {"warmup_ratio": "warning", "torch_dtype": "note"}),
        (OF_A_SCRIPT, TRL_SCRIPT, {"warmup_ratio": "warning", "torch_dtype": "warning"}),
        (OF_A_SCRIPT, f"{TRL_SCRIPT}class Mine:\n    torch_dtype: str = 'auto'\n", {"torch_dtype": None}),
        # without a model, which its command may name
        ("dataset_name: c/d\nuse_peft: true\nmax_length: 5\noutput_dir: out\ntorch_dtype: auto\n", "",
         {"torch_dtype": "warning"}),
        ("dataset_name: c/d\nuse_peft: true\nmy_words: 5\noutput_dir: out\ntorch_dtype: auto\n", "",
         {"torch_dtype": None}),
    ],
)  # fmt: skip
def test_the_project_of_a_file_says_who_reads_it(
    text: str, source: str, expected: dict[str, str | None], tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("trl\ntransformers>=5.15\n")
    found = levels(lint(tmp_path, a__yaml=text, train__py=source))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ("warmup_ratio: 0.03", "`warmup_steps: 0.03`, a fraction of all steps"),
        ("warmup_ratio: 0.03\nwarmup_steps: 100", "remove it"),
        ("group_by_length: false", "remove it"),  # its present name would turn it on
        ("adafactor: false", "remove it"),
        ("dispatch_batches: false", "`accelerator_config: {dispatch_batches: ...}`"),  # None there is no False
    ],
)
def test_what_replaces_a_removed_argument_does_the_same(settings: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{TRL}{settings}\n")
    key = settings.partition(":")[0]
    assert [each.fix for each in lint_paths([file]).findings if each.key == key] == [fix]
    text = fixed_text(file)
    assert (key in text) == (fix != "remove it" or "warmup" in fix or "steps" in settings)


# -- words of FSDP


@pytest.mark.parametrize(
    ("version", "name", "value", "fix"),
    [
        (1, "backward_prefetch", "no_prefetch", None),
        (1, "backward_prefetch", "NONE", "`NO_PREFETCH`"),  # torch's BackwardPrefetch has no such member
        (2, "backward_prefetch", "None", "`NO_PREFETCH`"),  # version 2 reads the word before it drops it
        (1, "backward_prefetch", "AUTO", "one of these"),
        (1, "sharding_strategy", "hybrid_shard_zero2", None),
        (1, "sharding_strategy", "_HYBRID_SHARD_ZERO2", None),
        (1, "sharding_strategy", "5", None),
    ],
)
def test_words_of_fsdp_are_folded_as_accelerate_folds_them(
    version: int, name: str, value: str, fix: str | None, tmp_path: Path
) -> None:
    findings = lint(tmp_path, a__yaml=ACCELERATE.format(version, name, value))
    assert [each.fix for each in findings if each.rule == "unknown-word"] == ([fix] if fix else [])


def test_a_strategy_of_fsdp1_is_the_same_by_its_number_and_its_names(tmp_path: Path) -> None:
    text = ACCELERATE.format(1, "sharding_strategy", "5") + "  fsdp_reshard_after_forward: hybrid_shard_zero2\n"
    assert "fsdp1-reshard-ignored" not in {each.rule for each in lint(tmp_path, a__yaml=text)}


def test_a_block_that_is_not_in_effect_has_no_wrong_word(tmp_path: Path) -> None:
    text = ACCELERATE.format(1, "backward_prefetch", "NONE").replace(": FSDP", ": MULTI_GPU")
    assert [each.level for each in lint(tmp_path, a__yaml=text)] == ["warning"]  # the block


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("HYBRID_SHARD_ZERO2 auto_wrap", 1, "warning"),  # folded, and then FULL_SHARD all the same
        ("hybrid_shard_zero2", 2, "error"),
        ("_hybrid_shard_zero2", 1, "error"),
        ("FULL_SHARD", 2, "error"),
        ("full_shard auto_wrap", 2, "note"),
    ],
)
def test_words_of_the_trainers_fsdp(words: str, version: int, expected: str, tmp_path: Path) -> None:
    text = f"output_dir: out\nbf16: true\nreport_to: none\nfsdp: {words}\nfsdp_config: {{version: {version}}}\n"
    assert expected in {each.level for each in lint(tmp_path, a__yaml=text) if each.key == "fsdp"}


# -- nodes


@pytest.mark.parametrize(
    "text",
    [
        "#SBATCH --nodes=2\nsrun --nodes=1 --ntasks=1 torchrun --nproc_per_node 8 a.py &\n"
        "srun -N 1 -n 1 torchrun --nproc_per_node 8 b.py &\nwait\n",
        "#SBATCH --nodes=1\nhead=$(hostname || echo localhost)\n"
        "srun torchrun --nnodes $SLURM_NNODES --rdzv_backend c10d a.py\n",
        "#SBATCH --gres=gpu:8\nsrun accelerate launch --num_machines $SLURM_NNODES --main_process_ip $A x.py\n",
    ],
)
def test_a_launcher_on_one_node_has_no_finding_about_several(text: str, tmp_path: Path) -> None:
    assert [each.rule for each in lint(tmp_path, a__sbatch=f"#!/bin/sh\n{text}") if each.level != "note"] == []


# -- a JSON and the arguments that it is used with


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"optimizer": "note", "gradient_clipping": "note", "scheduler": "note"}),  # nobody is known to read it
        ("output_dir: out\nbf16: true\nlr_scheduler_type: cosine\noptim: adamw_torch\nmax_grad_norm: 1.0\n",
         {"scheduler": "warning", "optimizer": "note", "gradient_clipping": "warning"}),
        ("output_dir: out\nbf16: true\nlr_scheduler_type: constant_with_warmup\nmax_grad_norm: 0.5\n",
         {"scheduler": "note", "optimizer": "note", "gradient_clipping": None}),
        ("output_dir: out\nbf16: true\n", {"gradient_clipping": "warning"}),  # the Trainer's default is another
    ],
)  # fmt: skip
def test_what_a_json_does_to_its_arguments_is_a_warning_where_these_are_known(
    arguments: str, expected: dict[str, str | None], tmp_path: Path
) -> None:
    settings = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW"}}
    (tmp_path / "ds.json").write_text(json.dumps({**settings, "scheduler": {"type": "WarmupLR", "params": {}}}))
    (tmp_path / "a.yaml").write_text(f"{arguments}deepspeed: ds.json\n")
    findings = lint_paths([tmp_path / ("a.yaml" if arguments else "ds.json")]).findings
    found = {each.key: each.level for each in findings if each.rule in ("not-auto", "optimizer-of-json")}
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(("source", "level"), [(HF, "warning"), ("", "note")])
def test_a_sharded_save_is_a_warning_where_a_trainer_saves(source: str, level: str, tmp_path: Path) -> None:
    config = ACCELERATE.format(2, "state_dict_type", "SHARDED_STATE_DICT")
    command = COMMAND.replace("torchrun", "accelerate launch --config_file fsdp.yaml")
    findings = lint(tmp_path, run__sh=command, fsdp__yaml=config, train__py=source)
    assert [each.level for each in findings if each.rule == "sharded-final-save"] == [level]


# -- files of other programs, and of this one


def test_a_file_of_open_instruct_says_what_was_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "model_name_or_path: a/b\ndataset_mixer_list: [a, 1.0]\nuse_slow_tokenizer: true\nwarmup_ratio: 0.1\n"
    )
    result = lint_paths([file])
    assert [each.level for each in result.findings if each.level != "note"] == []
    assert result.not_checked == [f"{file}: 4 arguments of a script with dataclasses of its own not checked"]


@pytest.mark.parametrize(("script", "why"), [("x.py", ""), ("y.py", ", and the project has no such file")])
def test_a_script_that_a_project_does_not_have_is_named(script: str, why: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "x.py").touch()
    (tmp_path / "a.sh").write_text(f"torchrun {script} --rows 3\n")
    assert lint_paths([tmp_path]).not_checked == [f"{tmp_path}/a.sh:1: 1 argument of {script} not checked{why}"]


def test_a_job_file_of_this_toolkit_is_known(tmp_path: Path) -> None:
    text = "model_name_or_path: a/b\ndataset: rows.jsonl\ncolumn: {instruction: question, output: answer}\n"
    assert lint(tmp_path, a__yaml=text) == []
    assert levels(lint(tmp_path, a__yaml=f"{text}eval_strategy: step\n")) == {"eval_strategy": "error"}


# -- kinds that a second look at public files showed


@pytest.mark.parametrize(
    "text",
    [
        "wandb_version: 1\nlearning_rate: {desc: null, value: 0.1}\nsave_steps: {desc: null, value: 5}\n",
        '{"log_history": [], "max_steps": 10, "num_train_epochs": 3, "save_steps": 5}',
    ],
)
def test_what_a_run_has_left_is_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert lint_paths([tmp_path], skips_others=True).findings == []


@pytest.mark.parametrize(
    "lines",
    ['LR=""\n[[ -n "$1" ]] && LR="$1"\n', 'LR=0\ncase "$1" in\na) LR=1e-5 ;;\nesac\n', 'LR=""; read LR; LR=$LR\n'],
)
def test_a_variable_that_is_set_elsewhere_on_a_line_is_not_known(lines: str, tmp_path: Path) -> None:
    script = f"{lines}torchrun train.py --output_dir out --bf16 --report_to none --learning_rate $LR --seed 1\n"
    assert [each.key for each in lint(tmp_path, run__sh=script) if each.level != "note"] == []


def test_a_script_is_found_in_another_folder_of_its_project(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "src" / "tune").mkdir(parents=True)
    (tmp_path / "src" / "tune" / "sft.py").write_text(
        "p = argparse.ArgumentParser()\np.add_argument('--warmup_ratio')\n"
    )
    command = COMMAND.replace("train.py", "-m tune.sft")
    assert "warmup_ratio" not in levels(lint(tmp_path, run__sh=command))


def test_a_parser_that_drops_what_it_does_not_know_refuses_nothing(tmp_path: Path) -> None:
    findings = lint(tmp_path, run__sh=COMMAND, train__py="H4ArgumentParser((Mine, TrainingArguments)).parse()\n")
    assert [each.level for each in findings if each.level != "note"] == []


def test_the_beginning_of_an_option_is_taken_for_it_on_a_command_line(tmp_path: Path) -> None:
    command = COMMAND.replace("--warmup_ratio 0.1", "--gradient_accumulation_step 4 --save_total 2")
    assert levels(lint(tmp_path, run__sh=command, train__py=HF)) == {}


@pytest.mark.parametrize(("second", "keys"), [("false", []), ("true", ["do_eval"])])
def test_a_key_that_repeats_its_value_is_harmless(second: str, keys: list[str], tmp_path: Path) -> None:
    findings = lint(tmp_path, a__yaml=f"{TRL}do_eval: false\nseed: 1\ndo_eval: {second}\n")
    assert [each.key for each in findings if each.rule == "duplicate-key"] == keys


@pytest.mark.parametrize(("settings", "count"), [({"profile": False}, 0), ({"partition_activations": True}, 1)])
def test_an_unread_block_matters_where_it_turns_something_on(
    settings: dict[str, bool], count: int, tmp_path: Path
) -> None:
    text = json.dumps({"zero_optimization": {"stage": 2}, "activation_checkpointing": settings})
    assert sum(each.rule == "checkpointing-block-unread" for each in lint(tmp_path, ds__json=text)) == count


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps_per_print": "auto"}, {}),  # accelerate puts a number there
        ({"steps_per_print": "often"}, {"steps_per_print": "error"}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}},
         {"zero_optimization.offload_optimizer.device": "note"}),  # the default, none
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": "auto"}},
         {"zero_optimization.zero_hpz_partition_size": "note"}),
        ({"zero_optimization": {"stage": "auto"}}, {"zero_optimization.stage": "warning"}),  # the default, 0
        ({"zero_optimization": True}, {"zero_optimization": "note"}),  # DeepSpeed's old form of stage 1
    ],
)  # fmt: skip
def test_auto_and_old_forms_of_a_json_are_read_by_some(
    settings: dict[str, object], expected: dict[str, str], tmp_path: Path
) -> None:
    text = json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 8, **settings})
    found = {each.key: each.level for each in lint(tmp_path, ds__json=text) if each.rule != "not-auto"}
    assert found == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "swift sft --model a/b --train_type lora --split_dataset_ratio 0.1 --max_length 512\n"),
        ("sft.yaml", "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ntemplate: qwen3\ntrain_type: lora\n"),
        ("axo.yaml", "base_model: a/b\nmicro_batch_size: 1\nadapter: lora\nsequence_len: 5\ntrain_type: lora\n"),
    ],
)
@pytest.mark.parametrize("has_copy", [False, True])
def test_a_copy_of_the_program_in_the_project_says_what_it_has(
    name: str, text: str, has_copy: bool, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('dependencies = ["llamafactory", "ms-swift"]\n')
    (tmp_path / "name" / "args").mkdir(parents=True)
    (tmp_path / "name" / "args" / "base.py").write_text("class A:\n    train_type: str = 'lora'\n" if has_copy else "")
    folder = tmp_path / "a/b/c/d/e/f/g"  # as ms-swift's own examples lie
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    keys = [each.key for each in lint_paths([folder / name]).findings if each.level != "note"]
    assert keys == ([] if has_copy else ["train_type"])


def test_a_setting_that_a_script_declares_says_nothing_of_its_program(tmp_path: Path) -> None:
    source = f"{HF}class Mine:\n    finetuning_type: str = 'lora'\n"
    findings = lint(tmp_path, run__sh=COMMAND.replace("--bf16", "--finetuning_type lora"), train__py=source)
    assert [each.rule for each in findings] == ["removed-training-argument"]


def test_a_fork_of_transformers_in_the_project_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork" / "training_args.py").write_text("class TrainingArguments:\n    warmup_ratio: float = 0.0\n")
    assert not levels(lint(tmp_path, run__sh=COMMAND, train__py=HF))


def test_a_key_that_the_projects_copy_takes_out_is_known(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text('mine = args.pop("evaluators", None)\n')
    text = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ntemplate: qwen3\nevaluators: x\n"
    assert not levels(lint(tmp_path, sft__yaml=text))


def test_a_key_in_a_block_that_accelerate_copies_has_an_effect(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  mixed_precision: bf16\n"
    assert not levels(lint(tmp_path, a__yaml=text))


@pytest.mark.parametrize("name", ["ipex_config", "model_parallel_config"])
def test_no_block_is_taken_for_another_one(name: str, tmp_path: Path) -> None:
    (finding,) = lint(tmp_path, a__yaml=f"distributed_type: MULTI_GPU\n{name}: {{ipex: false}}\n")
    assert (finding.rule, finding.fix) == ("unknown-key", "remove it")


def test_text_that_env_hands_over_is_no_assignment(tmp_path: Path) -> None:
    text = 'ENV="A=1 CUDA_VISIBLE_DEVICES=0,1 HF_HUB_OFFLINE=1"\nenv $ENV torchrun --nproc_per_node=2 a.py\n'
    assert not levels(lint(tmp_path, run__sh=text))


def test_what_replaces_an_argument_is_said_for_other_programs_too(tmp_path: Path) -> None:
    text = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ntemplate: qwen3\ndispatch_batches: false\n"
    assert [each.fix for each in lint(tmp_path, sft__yaml=text)] == ["`accelerator_config: {dispatch_batches: ...}`"]


def test_one_epoch_beside_a_number_of_steps_contradicts_nothing(tmp_path: Path) -> None:
    assert not levels(lint(tmp_path, a__yaml=f"{TRL}max_steps: 20\nnum_train_epochs: 1\n"))


def test_a_record_of_all_arguments_is_no_configuration() -> None:
    names = sorted(trainer_argument_names())[:70]
    assert detect_kind({"train_type": "lora", "evaluation_strategy": "no", **dict.fromkeys(names)}) is None


def test_a_copy_of_a_program_that_torchrun_starts_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("class A:\n    train_type: str = 'lora'\n")
    (tmp_path / "swift" / "cli").mkdir(parents=True)
    (tmp_path / "swift" / "cli" / "sft.py").touch()
    text = "torchrun --nproc_per_node=8 swift/cli/sft.py --model a/b --train_type lora --split_dataset_ratio 0.1\n"
    assert not levels(lint(tmp_path, run__sh=text))


def test_a_local_rank_that_the_launcher_sets_anew_is_harmless(tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
    text = "export LOCAL_RANK=$SLURM_LOCALID\nL='accelerate launch --machine_rank=$SLURM_PROCID'\nsrun sh -c $L\n"
    assert "rank-of-first-node" not in [each.rule for each in lint(tmp_path, job__sbatch=head + text)]


def test_a_placeholder_is_no_wrong_type(tmp_path: Path) -> None:
    assert not levels(lint(tmp_path, a__yaml=f"{TRL}learning_rate: dummy\n"))


# -- a file of settings with the command that names it

GROUPS = "model_name_or_path: a/b\ndataset_name: c/d\nnum_generations: 8\nper_device_train_batch_size: 1\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\nstreaming: true\n"


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        ("accelerate launch --num_processes 7 grpo.py --config {}", GROUPS, [("refused-by-grpo", "x.yaml", 3)]),
        ("accelerate launch --num_processes 8 grpo.py --config {}", GROUPS, []),
        ("accelerate launch --num_processes 8 g.py --config {} --num_generations 3", GROUPS,
         [("refused-by-grpo", "run.sh", 1)]),
        ("deepspeed --num_gpus 4 g.py --config {}", GROUPS, [("refused-by-grpo", "x.yaml", 3)]),
        ("trl sft --config {}", "model_name_or_path: a\ndataset_name: b\npacking: true\nmax_length: null\n",
         [("refused-by-trl", "x.yaml", 4)]),
        ("trl sft --config {}", "model_name_or_path: a\ndataset_name: b\nuse_peft: true\nlora_target_modules: q,v\n",
         [("refused-by-peft", "x.yaml", 4)]),
        ("C=${{C:-{}}}\nllamafactory-cli train $C --output_dir o", FACTORY + "do_train: true\n",
         [("option-behind-file", "run.sh", 2)]),
        ("llamafactory-cli train {}", "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\nlearning_rate: 0.1\n",
         [("refused-by-llama-factory", "x.yaml", 2)]),
        ("llamafactory-cli train {}", "model_name_or_path: a\nstage: sft\ntemplate: qwen3\nlora_target: all-linear\n",
         [("refused-by-peft", "x.yaml", 4)]),
        ("llamafactory-cli train {}", FACTORY, [("refused-by-llama-factory", "x.yaml", 4)]),
        ("llamafactory-cli train {} max_steps=5", FACTORY, []),
        ("llamafactory-cli train {} max_steps=5 val_size=0.1", FACTORY, [("refused-by-llama-factory", "run.sh", 1)]),
        ("llamafactory-cli train {} $MORE", FACTORY, []),
        ("llamafactory-cli webchat {}", FACTORY + "max_steps: 5\noutput_dir: a\n",
         [("refused-by-llama-factory", "x.yaml", None)]),
        ("llamafactory-cli export {}", FACTORY + "max_steps: 5\noutput_dir: a\n",
         [("refused-by-llama-factory", "x.yaml", None)]),
        ("axolotl train {} --load-in-8bit=true", "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\n",
         [("refused-by-axolotl", "run.sh", 1)]),
    ],
)  # fmt: skip
def test_a_file_is_linted_with_the_words_and_processes_of_its_command(
    command: str, settings: str, expected: list[tuple[str, str, int | None]], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(settings)
    (tmp_path / "run.sh").write_text(command.format("x.yaml") + "\n")
    found = lint_paths([tmp_path]).findings
    assert [(each.rule, Path(each.file).name, each.line) for each in found if each.level == "error"] == expected


def test_the_engine_of_accelerates_file_is_that_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n")
    (tmp_path / "x.yaml").write_text(
        f"{GROUPS}save_only_model: true\nload_best_model_at_end: true\neval_strategy: steps\n"
    )
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file zero.yaml --num_processes 8 g.py --config x.yaml\n"
    )
    found = lint_paths([tmp_path]).findings
    assert [(each.rule, each.line) for each in found if each.level == "error"] == [("save-only-model-best", 5)]


@pytest.mark.parametrize(("stage", "ranking", "expected"), [("sft", True, [5]), ("dpo", True, []), ("dpo", False, [5])])
def test_a_dataset_is_ranked_where_its_stage_compares_answers(
    stage: str, ranking: bool, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "x", "ranking": ranking}}))
    (tmp_path / "x.yaml").write_text(
        f"model_name_or_path: a/b\nstage: {stage}\nfinetuning_type: lora\ncutoff_len: 8\ndataset: rows\n"
    )
    found = lint_paths([tmp_path / "x.yaml"]).findings
    assert [each.line for each in found if each.rule == "refused-by-llama-factory"] == expected
