"""Kinds of mistakes that public files showed: what lint says of each, and does not say."""

import json
import tempfile
from pathlib import Path

import pytest

from toolkit.convert.job_script import read_script
from toolkit.errors import ToolkitError
from toolkit.lint.check import fixed_text, lint_paths
from toolkit.lint.document import detect_kind, read_text
from toolkit.lint.findings import Finding
from toolkit.lint.named_files import forget_projects, pinned_below

TRL = "model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\nbeta: 0.1\nmax_length: 512\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ntemplate: qwen3\ncutoff_len: 512\n"
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 8\n"
SWIFT = "swift sft --model a/b --tuner_type lora --split_dataset_ratio 0.1 --max_length 512"


def lint(folder: Path, **files: str) -> list[Finding]:
    """Lint files of one folder, by their names with `__` in the place of the dot; the first one is named to lint."""
    paths = [folder / name.replace("__", ".") for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, newline="")
    return lint_paths(paths[:1]).findings


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.key: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("setting", "level"),
    [
        ("use_lora: true", None),  # of a script, and no misspelling of use_rslora
        ("fg_desirable_weight: 1.0", None),
        ("loss_weight: 0.5", "warning"),  # a letter away from loss_weights, but a script may have it
        ("loss_weight: 0.5\nfg_beta: 0.1", "note"),  # it has settings of its own
        ("num_train_epoch: 1", "error"),  # a misspelling of an argument of transformers
        ("max_seq_length: 512", "error"),  # a setting of older versions
    ],
)
def test_a_setting_of_a_script_that_trains_with_trl_is_no_error(
    setting: str, level: str | None, tmp_path: Path
) -> None:
    findings = lint(tmp_path, a__yaml=f"{TRL}{setting}\n")
    assert levels(findings).get(setting.partition(":")[0]) == level


def test_a_switch_that_the_parser_of_transformers_turns_off_is_known(tmp_path: Path) -> None:
    command = "torchrun dpo.py --model_name_or_path a/b --dataset_name c/d --output_dir out --beta 0.1 --bf16"
    findings = lint(tmp_path, a__sh=f"{command} --no_remove_unused_columns --no_gradient_checkpointing\n")
    assert [each for each in levels(findings) if "column" in each or "checkpointing" in each] == []


def test_settings_of_another_version_or_a_fork_are_warnings_and_old_names_have_the_new_ones(tmp_path: Path) -> None:
    one = lint(tmp_path, a__yaml=f"{FACTORY}evaluation_strategy: steps\nptx_coef: 0.1\n")
    assert levels(one) == {"evaluation_strategy": "error", "ptx_coef": "warning"}  # a fork may have the second
    assert next(each.fix for each in one if each.key == "evaluation_strategy") == "`eval_strategy`"
    fork = lint(tmp_path, a__sh=f"{SWIFT} --sglang_tp 1 --rollout_backend x --presence_penalty 0.1 --torch_dtpye x\n")
    assert {level for key, level in levels(fork).items() if key != "torch_dtpye"} == {"warning"}
    assert levels(fork)["torch_dtpye"] == "error"  # a misspelling


@pytest.mark.parametrize(
    ("how", "level"), [("openmpi", "error"), ("mpich", "error"), ("nossh", "note"), ("pdsh", "note")]
)
def test_accelerate_cannot_start_deepspeeds_mpi_launchers(tmp_path: Path, how: str, level: str) -> None:
    options = f"--use_deepspeed --num_machines 2 --deepspeed_hostfile h --deepspeed_multinode_launcher {how}"
    found = [
        each
        for each in lint(tmp_path, a__sh=f"accelerate launch {options} x.py\n")
        if each.rule == "deepspeed-without-standard"
    ]
    assert [(each.level, how in each.message) for each in found] == [(level, True)]


@pytest.mark.parametrize("word", ["src/train.py", "$SCRIPT", "--bf16"])
def test_a_blank_behind_a_backslash_loses_any_line(tmp_path: Path, word: str) -> None:
    def lost(script: str) -> list[int | None]:
        return [each.line for each in lint(tmp_path, a__sh=script) if each.rule == "lost-line"]

    assert lost(f"deepspeed --num_gpus 8 \\ \n  {word} \\\n  --bf16\n") == [2]
    assert lost("deepspeed --num_gpus 8 \\\n  src/train.py \\ \n\n# done \\ \nls out\n") == []
    assert lost(f"deepspeed --num_gpus 8 \\\n  {word} \\\n  --bf16\n") == []


@pytest.mark.parametrize(
    ("command", "is_read"),
    [
        ("python train.py --do_train --output_dir out --fp16 --bf16", True),
        ("CUDA_VISIBLE_DEVICES=0 nohup python3.11 -u src/train.py --do_train --logging_steps 1 --fp16 --bf16 &", True),
        ("python prepare.py --fp16 --bf16x --output_dir out", False),  # one argument alone is anybody's
        ("python train.py --num_warmup_steps 5 --fp16 --bf16 --do_train", False),  # of a parser of its own
        ("torchrun python train.py --help", False),
    ],
)
def test_a_script_without_a_launcher_is_read_where_its_arguments_are_the_trainers(
    command: str, is_read: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.sh").write_text(command + "\n")
    rules = [each.rule for each in lint_paths([tmp_path / "a.sh"], skips_others=True).findings]
    assert ("fp16-and-bf16" in rules) == is_read


def test_python_starts_no_launcher_of_a_job(tmp_path: Path) -> None:
    job = "#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --time=1:00:00\n"
    command = "srun python train.py --do_train --bf16 --output_dir out --deepspeed ds.json\n"
    assert {each.level for each in lint(tmp_path, a__sbatch=job + command)} <= {"note"}


def test_the_jobs_of_a_list_count_their_nodes(tmp_path: Path) -> None:
    job = (
        "apiVersion: batch/v1\nkind: Job\nspec: {completionMode: Indexed, parallelism: 2, template: {spec: {containers:"
    )
    job += " [{name: a, command: [torchrun, --nproc-per-node, '8', train.py]}]}}}\n"
    lines = "".join(f"  {line}\n" for line in job.splitlines())
    (tmp_path / "a.yaml").write_text(job)
    alone = [each.rule for each in lint_paths([tmp_path / "a.yaml"]).findings]
    (tmp_path / "a.yaml").write_text("apiVersion: v1\nkind: List\nitems:\n-" + lines[1:])
    assert "each-node-alone" in alone
    assert [each.rule for each in lint_paths([tmp_path / "a.yaml"]).findings] == alone


def test_a_condition_names_the_argument_fsdp_itself(tmp_path: Path) -> None:
    command = "swift sft --model a/b --dataset c/d --tuner_type full --fsdp fsdp2 --save_only_model"
    assert levels(lint(tmp_path, a__sh=f"{command} true\n")) == {"save_only_model": "error"}
    assert lint(tmp_path, a__sh=f"{command} false\n") == []


@pytest.mark.parametrize(
    ("options", "rules"), [("--num_processes 7", ["uneven-processes"]), ("--num_processes 6", []), ("", [])]
)
def test_the_processes_of_a_command_win_over_those_of_the_file(options: str, rules: list[str], tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\n")
    found = lint(tmp_path, a__sh=f"accelerate launch --config_file two.yaml --machine_rank 0 {options} x.py --seed 1\n")
    assert [each.rule for each in found if each.rule == "uneven-processes"] == rules


def test_windows_line_ends_break_a_script_without_continued_lines_too(tmp_path: Path) -> None:
    script = "#!/bin/bash\r\ntorchrun x.py --bf16\r\n"
    assert [each.rule for each in lint(tmp_path, a__sh=script) if each.level == "error"] == ["lost-line"]
    assert lint(tmp_path, a__sh=script.replace("\r", "")) == []


@pytest.mark.parametrize("dash", ["—-", "–-", "–"])
def test_a_typographic_dash_in_front_of_an_option_is_found(dash: str, tmp_path: Path) -> None:
    rules = [each.rule for each in lint(tmp_path, a__sh=f"torchrun x.py {dash}config a.yaml --seed 1\n")]
    assert rules == ["typographic-quotes"]


@pytest.mark.parametrize(("engine", "is_said"), [("", True), ("--use_deepspeed", False), ("--multi_gpu", False)])
def test_one_process_of_accelerate_has_no_rank(engine: str, is_said: bool, tmp_path: Path) -> None:
    command = f"accelerate launch --num_processes 1 {engine} x.py --deepspeed z.json --bf16 --do_train\n"
    found = [each.rule for each in lint(tmp_path, a__sh=command)]
    assert ("deepspeed-without-launcher" in found) == is_said


@pytest.mark.parametrize(("source", "count"), [("", 1), ("net = PipelineModule(layers, num_stages=2)\n", 0)])
def test_stages_of_a_pipeline_are_no_processes_of_a_batch(source: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "train_batch_size": 9}')
    (tmp_path / "x.py").write_text(source)
    found = lint(tmp_path, a__sh="deepspeed --num_gpus 2 x.py --deepspeed --deepspeed_config ds.json\n")
    assert len([each for each in found if each.rule == "batch-arithmetic-of-pair"]) == count


def test_line_ends_of_windows_are_one_finding(tmp_path: Path) -> None:
    script = "#!/bin/bash\r\naccelerate launch train.py \\\r\n  --bf16 \\\r\n  --output_dir out\r\n"
    findings = [each for each in lint(tmp_path, a__sh=script) if each.rule == "lost-line"]
    assert [(each.line, "dos2unix" in each.fix) for each in findings] == [(3, True)]


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        ("a.yaml", "base_model: a/b\nmicro_batch_size: 4\nadapter: lora\nbf16: auto\ndeepspeed: ds.json\n", []),
        ("a.yaml", "output_dir: out\nper_device_train_batch_size: 4\nbf16: true\ndeepspeed: ds.json\n", []),
        ("a.yaml", "base_model: a/b\nmicro_batch_size: 2\nadapter: lora\nbf16: false\ndeepspeed: ds.json\n",
         ["train_micro_batch_size_per_gpu", "bf16.enabled"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_json_is_compared_with_the_file_that_names_it(
    name: str, text: str, keys: list[str], whole_folder: bool, tmp_path: Path
) -> None:
    settings = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    (tmp_path / name).write_text(text)
    findings = lint_paths([tmp_path if whole_folder else tmp_path / name]).findings
    assert sorted(each.key for each in findings if each.rule == "not-auto") == sorted(keys)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun augment.py --model a/b --dataset_dir data --output_dir out --num_beams 2\n",  # LLaMA-Factory's word
        "N=$(scontrol show hostnames | wc -l)\nN=1\naccelerate launch --num_machines=$N --main_process_ip=$A x.py\n",
        # one node: its rank is 0
        "#!/bin/sh\n#SBATCH -N1\n#SBATCH --ntasks-per-node=1\nexport R=$SLURM_NODEID\naccelerate launch"
        " --num_machines 1 --machine_rank $R --main_process_ip $A x.py\n",
        # patterns of a `case`
        'while [ $# -gt 0 ]; do\ncase "$1" in\n--batch_size=*)\nB="${1#*=}"\n;;\nesac\ndone\ntorchrun x.py\n',
        # `eval_and_save_ratio` decides both, in a dataclass of the script
        "torchrun train.py --bf16 --output_dir out --report_to none --load_best_model_at_end --save_strategy steps"
        " --eval_strategy steps --logging_steps 3 --eval_and_save_ratio 0.1\n",
    ],
)
def test_a_script_of_its_own_and_a_job_of_one_node_have_no_error(text: str, tmp_path: Path) -> None:
    assert [each.rule for each in lint(tmp_path, a__sh=text) if each.level == "error"] == []


def test_an_assignment_in_a_condition_does_not_decide(tmp_path: Path) -> None:
    script = 'N=4\nif [ -n "$ONE" ]; then\nN=1\nfi\naccelerate launch --num_machines=$N --main_process_ip=$A x.py\n'
    assert "node-rank-missing" in {each.rule for each in lint(tmp_path, a__sh=script)}


@pytest.mark.parametrize(
    "text",
    [
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nmixed_precision: fp16\n",
        "base_model: a/b\nmicro_batch_size: 1\nfsdp: ${FSDP}\ndeepspeed: ${DEEPSPEED}\n",
    ],
)
def test_another_environment_and_a_template_have_no_error(text: str, tmp_path: Path) -> None:
    assert [each for each in lint(tmp_path, a__yaml=text) if each.level == "error"] == []


@pytest.mark.parametrize(("params", "said"), [('"betas": [0.9, 0.95]', ["warning"]), ('"lr": "auto"', [])])
def test_an_optimizer_of_the_json_without_a_rate_has_its_own(params: str, said: list[str], tmp_path: Path) -> None:
    text = f'{{"zero_optimization": {{"stage": 2}}, "optimizer": {{"type": "AdamW", "params": {{{params}}}}}}}'
    script = "torchrun run_clm.py --deepspeed a.json --do_train --output_dir o --logging_steps 1\n"
    found = lint(tmp_path, b__sh=script, a__json=text)
    assert [each.level for each in found if each.key == "optimizer.params"] == said


def test_a_python_file_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="is Python, of which lint reads nothing"):
        lint(tmp_path, a__py="args = TrainingArguments('out')\n")


@pytest.mark.parametrize(
    "text",
    [
        "algo: x\ntask: y\nsave_dir: z\noptimizer: {type: AdamW, params: {}}\nlog_level: info\n",
        "lora_r: 8\nlora_alpha: 16\ntarget_modules: [q_proj]\n",  # of a LoraConfig
        # of GPT-NeoX, which reads DeepSpeed's blocks among its own
        "num_layers: 2\nhidden_size: 8\nnum_attention_heads: 2\nnorm: rms\npos_emb: rotary\ndata_impl: mmap\n"
        "train_iters: 9\nlr_decay_iters: 9\nseq_length: 64\nzero_optimization: {stage: 1}\n",
    ],
)
def test_an_optimizer_or_a_stage_among_settings_of_a_script_is_not_deepspeeds(text: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="is neither"):
        lint(tmp_path, a__yaml=text)


def test_a_script_with_a_template_is_not_of_a_program(tmp_path: Path) -> None:
    assert lint(tmp_path, a__sh="torchrun eval.py --template chat --ckpt_path a --result_dir b --config c\n") == []


OWN_DATACLASS = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\ntorch_dtype: bfloat16\njudge_folder: x\n"


def test_a_file_of_a_script_with_dataclasses_of_its_own_has_a_note_and_is_not_renamed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OWN_DATACLASS)
    levels = {each.key: each.level for each in lint_paths([file]).findings if each.rule == "unknown-trl-setting"}
    assert levels["torch_dtype"] == "note"
    assert fixed_text(file) == OWN_DATACLASS


def test_batch_sizes_alone_make_no_deepspeed_file(tmp_path: Path) -> None:
    own = {"train_micro_batch_size_per_gpu": 4, "amp": True, "data_dir": "d", "vocab": "v", "depth": 12, "width": 768}
    assert detect_kind(own) != "deepspeed"
    assert detect_kind({"train_batch_size": 8, "gradient_clipping": 1.0}) == "deepspeed"
    assert detect_kind({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}) is None
    assert detect_kind({"curriculum_learning": {"enabled": True}}) is None  # a part, which a script reads
    assert detect_kind({"defaults": ["actor"], "strategy": "fsdp", "fsdp_config": {"fsdp_size": -1}}) is None  # Hydra's
    assert detect_kind({"seed": {"name": "SEEDTask", "dataset": {"root": "data"}}}) is None
    script = tmp_path / "grpo.sh"
    script.write_text("accelerate launch --num_processes 3 grpo.py --config r.yaml --num_generations 8 --beta 0.1\n")
    assert "refused-by-grpo" not in [each.rule for each in lint_paths([script]).findings]


@pytest.mark.parametrize("line", ["# frozen (it's better)", "--seed $((1 + 2))", "--seed $(date +%s)", "--seed <SEED>"])
def test_a_bracket_in_an_array_closes_no_array(tmp_path: Path, line: str) -> None:
    array = f"TRAIN=(\n    swift sft\n    --model a/b\n    {line}\n    --freeze_vit true --plugn 1\n)\n"
    found = lint(tmp_path, a__sh=f'{array}"${{TRAIN[@]}}"\n')
    assert [each.key for each in found] == ["plugn"]


def test_arrays_with_comments_and_arithmetic_are_arguments(tmp_path: Path) -> None:
    array = "A=(\n  # sizes\n  data.train_batch_size=16\n  data.max_response_length=$((2 * n))\n\n"
    array += "  actor_rollout_ref.actor.ppo_mini_batch_size=SIZE\n)\n"
    for size, level in ((8, []), (32, ["error"])):
        script = f'{array.replace("SIZE", str(size))}python -m verl.trainer.main_ppo "${{A[@]}}" $MORE\n'
        assert [each.level for each in lint(tmp_path, a__sh=script) if "below" in each.message] == level


def test_what_a_command_and_its_file_both_show_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"fsdp_offload_params": true, "min_num_params": 0, "xla": false}')
    (tmp_path / "a.sh").write_text("torchrun x.py --bf16 --output_dir o --fsdp full_shard --fsdp_config fsdp.json\n")
    found = [each for each in lint_paths([tmp_path]).findings if each.rule == "unknown-fsdp-config-key"]
    assert [(each.key, each.level) for each in found] == [("fsdp_config.fsdp_offload_params", "warning")]


def test_a_file_with_a_base_model_is_not_accelerates(tmp_path: Path) -> None:
    text = "base_model: a/b\nsequence_len: 512\nmicro_batch_size: 1\ndeepspeed_config:\n  zero_stage: 2\n"
    assert [each.rule for each in lint(tmp_path, a__yaml=text)] == ["unknown-axolotl-setting"]


@pytest.mark.parametrize(
    "text",
    [
        "stage: cpt\nnum_epochs: 3\nper_device_batch_size: 16\nlr_scheduler: cosine\nwarmup_ratio: 0.05\nbf16: true\n",
        "base_model: a/b\npeft: {type: lora}\nquantization: {load_in_4bit: true}\ndata: {}\ntraining: {bf16: true}\n",
    ],
)
def test_a_file_of_a_script_is_of_no_program(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert [
        each.rule for each in lint_paths([tmp_path / "a.yaml"], skips_others=True).findings if "unknown" in each.rule
    ] == []


def test_words_that_a_script_was_given_belong_to_no_option(tmp_path: Path) -> None:
    command = 'torchrun run_clm.py --output_dir out --do_train --logging_steps 10 "$@"\n'
    assert lint(tmp_path, a__sh=command) == []


def test_a_variable_that_is_an_option_somewhere_is_not_the_script(tmp_path: Path) -> None:
    set_twice = 'if [ "$N" = 1 ]; then\n  MULTI=""\nelse\n  MULTI="--multi_gpu"\nfi\n'
    command = "accelerate launch --num_processes 2 $MULTI --main_process_port 1234 train.py --config a.yaml\n"
    assert lint(tmp_path, a__sh=set_twice + command) == []


@pytest.mark.parametrize(("source", "rules"), [("", ["number-as-text"]), ("float(cfg.get('learning_rate', 2e-5))", [])])
def test_text_that_a_script_converts_is_a_number(source: str, rules: list[str], tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text(source)
    findings = lint(tmp_path, a__yaml="learning_rate: 2e-4\nnum_train_epochs: 1\noutput_dir: out\n")
    assert [each.rule for each in findings] == rules


def test_what_needs_a_decision_is_not_fixed(tmp_path: Path) -> None:
    for zero in (
        {"stage": 2, "overlap_comm": True},  # it is faster, and may be wrong
        {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False, "reduce_bucket_size": "auto"},
        {"stage": 3, "stage3_max_live_parameters": 0, "sub_group_size": 0},  # for the least memory
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},  # where DeepSpeed's Adam does not compile
    ):
        text = json.dumps({"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False})
        (tmp_path / "a.json").write_text(text)
        assert fixed_text(tmp_path / "a.json") == text


def test_a_misspelt_switch_is_not_renamed_to_a_block(tmp_path: Path) -> None:
    for name in ("cpu_offload_params", "offload_params"):
        (tmp_path / "a.json").write_text(text := f'{{"zero_optimization": {{"stage": 3, "{name}": true}}}}')
        assert fixed_text(tmp_path / "a.json") == text


def test_a_block_of_deepspeeds_json_in_the_yaml_is_sent_to_a_json(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_optimization:\n    stage: 3\n"
    finding = next(each for each in lint(tmp_path, a__yaml=text) if each.rule == "unknown-nested-key")
    assert "deepspeed_config_file" in finding.fix


@pytest.mark.parametrize("launcher", ['"$VENV/bin/llamafactory-cli" train', "bin/llamafactory-cli train"])
def test_a_program_in_quotes_or_with_its_path_is_started(launcher: str, tmp_path: Path) -> None:
    findings = lint(tmp_path, a__sh=f"{launcher} --stage sft --model_name_or_path a/b --template qwen --lora_ranks 8\n")
    assert [each.key for each in findings] == ["lora_ranks"]


@pytest.mark.parametrize(
    ("source", "level"),
    [
        ("args = TrainingArguments(warmup_ratio=cfg['warmup_ratio'])", "warning"),
        ("known = inspect.signature(TrainingArguments.__init__).parameters", "note"),
        ("known = {each.name for each in dataclasses.fields(SFTConfig)}", "note"),
        ("known = dataclasses.fields(SFTConfig)\nHfArgumentParser((SFTConfig,)).parse_yaml_file(name)", "warning"),
    ],
)
def test_a_script_that_drops_what_its_version_does_not_have_is_not_refused(
    source: str, level: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("transformers, trl\n")
    (tmp_path / "train.py").write_text(source)
    text = "seed: 1\nmy_rows: 5\nmy_cap: 2\nmy_words: 3\nbf16: true\nreport_to: none\nwarmup_ratio: 0.1\n"
    assert levels(lint(tmp_path, a__yaml=text))["warmup_ratio"] == level


def test_a_setting_that_a_script_reads_by_its_name_is_not_misspelt(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("size = config.per_device_batch_size\n")
    text = "learning_rate: 0.1\nnum_train_epochs: 1\nbeta: 0.1\nper_device_batch_size: 2\nlogging_stepss: 2\n"
    assert [each.key for each in lint(tmp_path, a__yaml=text)] == ["logging_stepss"]


@pytest.mark.parametrize(
    ("parser", "keys"),
    [("ArgumentParser()", []), ("HfArgumentParser((TrainingArguments,))", ["optimizer.params.weight_decay"])],
)
def test_a_parser_that_a_script_only_imports_reads_nothing(parser: str, keys: list[str], tmp_path: Path) -> None:
    imports = "from transformers import (\n    HfArgumentParser,\n    TrainingArguments,\n)\n"
    (tmp_path / "train.py").write_text(f"{imports}parser = {parser}\n")
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **adam}))
    command = "deepspeed train.py --output_dir out --bf16 --save_total_limit 1 --deepspeed ds.json\n"
    findings = lint(tmp_path, a__sh=command)
    assert [each.key for each in findings if each.rule == "not-auto" and each.level == "warning"] == keys


@pytest.mark.parametrize("folder", ["", "/home/author/project/"])
@pytest.mark.parametrize(("module", "keys"), [("parameters", []), ("of_another_script", ["warmup_ratio"])])
def test_an_argument_of_a_module_that_the_script_imports_is_its_own(
    folder: str, module: str, keys: list[str], tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "src").mkdir()
    fields = "    warmup_ratio: float = 0.1\n    own_rows: int = 1\n"
    (tmp_path / f"src/{module}.py").write_text(f"@dataclass\nclass Mine(GRPOConfig):\n{fields}")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/train.py").write_text("from src.parameters import Mine\nparser = HfArgumentParser((Mine,))\n")
    arguments = "--model_name_or_path a/b --dataset_name c/d --output_dir out --beta 0.1 --bf16"
    command = f"torchrun {folder}jobs/train.py {arguments}"
    findings = lint(tmp_path, a__sh=f"{command} --own_rows 2 --warmup_ratio 0.1\n")
    assert [each.key for each in findings if each.key in ("warmup_ratio", "own_rows")] == keys


@pytest.mark.parametrize(
    ("flag", "blocks"), [("", ["deepspeed_config"]), ("--use_deepspeed", ["fsdp_config"]), ("--use_fsdp", [])]
)
def test_the_engine_that_a_command_names_wins_over_its_file(flag: str, blocks: list[str], tmp_path: Path) -> None:
    engine = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
    if flag == "--use_fsdp":
        engine = engine.replace("type: FSDP", "type: MULTI_GPU")
    deepspeed = "" if flag == "--use_fsdp" else "deepspeed_config:\n  zero_stage: 2\n"
    config = f"compute_environment: LOCAL_MACHINE\n{engine}{deepspeed}"
    findings = lint(tmp_path, a__sh=f"accelerate launch --config_file a.yaml {flag} train.py --lr 1\n", a__yaml=config)
    assert [each.key for each in findings if each.rule == "block-not-in-force"] == blocks


def test_a_string_inside_of_a_string_stays_a_part_of_its_word(tmp_path: Path) -> None:
    options = '--nnodes=\\"\\${SLURM_NNODES}\\" --nproc_per_node 8 --rdzv-id=\\"a b\\"'
    text = f'srun bash -c "\n  torchrun {options} train.py --output_dir \\"my out\\" --bf16\n"\n'
    (call,) = read_script(text).launches
    assert call.options == {"nnodes": "${SLURM_NNODES}", "nproc-per-node": "8", "rdzv-id": "a b"}
    assert {name: value for name, (value, _) in call.arguments.items()} == {"output_dir": "my out", "bf16": None}
    assert [each.rule for each in lint(tmp_path, a__sh=text) if each.rule == "behind-the-script"] == []


HF = "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser((TrainingArguments,))\n"
WITH_LORA = (
    "class A:\n    use_lora: bool = False\nif args.use_lora:\n    config = 1\n\n    model = get_peft_model(model)\n"
)
TRAINS_ALONE = "from trl import PPOConfig, PPOTrainer\nPPOTrainer(PPOConfig())\n"


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        (HF, ["warmup_ratio"]),
        ("from arguments import parse\n", ["warmup_ratio"]),  # a module of the project, with the parser
        ("import argparse\nparser = argparse.ArgumentParser()\n", []),
        (TRAINS_ALONE, []),  # which reads no argument, beside a script that does
    ],
)
def test_the_parser_of_another_script_beside_it_reads_nothing(script: str, keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "arguments.py").write_text(HF)
    (tmp_path / "train.py").write_text(script)
    command = "torchrun train.py --output_dir out --bf16 --save_strategy no --warmup_ratio 0.1\n"
    assert [each.key for each in lint(tmp_path, a__sh=command)] == keys


LOOP = "from accelerate import Accelerator\naccelerator = Accelerator()\nclass Trainer:\n    pass\n"


@pytest.mark.parametrize(
    ("near", "is_said"),
    [(LOOP, False), (LOOP + HF, True), ("from transformers import (\n    A,\n    Trainer,\n)", True)],
)
def test_nothing_is_said_of_a_trainer_in_a_project_that_has_none(near: str, is_said: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "other.py").write_text(HF)  # of another part of the project
    (tmp_path / "part/configs").mkdir(parents=True)
    (tmp_path / "part/train.py").write_text(near)
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "bf16": {"enabled": "auto"}}
    zero = {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}
    findings = lint(tmp_path / "part/configs", ds__json=json.dumps(adam | zero))
    found = {each.rule: each.level for each in findings}
    assert ("not-auto" in found, "optimizer-of-json" in found) == (is_said, is_said)
    assert found["stage-3-without-gather"] == ("warning" if is_said else "note")
    yaml = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 1.0\n"
    assert [each.rule for each in lint(tmp_path / "part/configs", a__yaml=yaml)] == ["yaml-not-auto"] * is_said


@pytest.mark.parametrize(("gpus", "nodes", "level"), [("0,", 1, None), ("0,1,2", 1, "note"), ("0,1,2", 2, "warning")])
def test_gpus_without_a_process_may_be_for_others(gpus: str, nodes: int, level: str | None, tmp_path: Path) -> None:
    text = f"distributed_type: MULTI_GPU\nnum_machines: {nodes}\nnum_processes: {nodes}\ngpu_ids: '{gpus}'\n"
    found = [each.level for each in lint(tmp_path, a__yaml=text) if each.rule == "uneven-processes"]
    assert found == ([level] if level else [])


def test_a_file_that_is_parsed_in_parts_may_be_changed_in_between(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers, trl\n")
    once = "parser = TrlParser((ModelConfig, Mine))\nmine = parser.parse_args_and_config()[1]\n"
    text = f"{TRL}warmup_ratio: 0.1\ntorch_dtype: auto\nmy_rows: 1\n"
    for source, level in ((once, "warning"), (once + once, "note")):
        (tmp_path / "train.py").write_text(source)
        forget_projects()
        found = levels(lint(tmp_path, a__yaml=text))
        assert (found["warmup_ratio"], found["torch_dtype"]) == (level, level)


def test_a_key_that_is_commented_out_by_its_name_is_not_misspelt(tmp_path: Path) -> None:
    text = "output_dir: out\nnum_train_epochs: 1\n_gradient_checkpointing: true\n"
    assert lint(tmp_path, a__yaml=text) == []


def test_accumulation_in_a_yaml_is_not_removed(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 1\n"
    (tmp_path / "a.yaml").write_text(text)  # without it, a script's Accelerator(gradient_accumulation_steps=N) applies
    assert fixed_text(tmp_path / "a.yaml") == text


@pytest.mark.parametrize(
    ("text", "is_ignored"),
    [
        ("CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2 train.py\n", True),
        ("export CUDA_VISIBLE_DEVICES=2,3\ndeepspeed --num_gpus 2 train.py\n", True),
        ("CUDA_VISIBLE_DEVICES=2,3 python prepare.py\ndeepspeed --num_gpus 8 train.py\n", False),
        ("export CUDA_VISIBLE_DEVICES=2,3\ndeepspeed --include localhost:2,3 train.py\n", False),
    ],
)
def test_devices_of_another_command_are_not_ignored(text: str, is_ignored: bool, tmp_path: Path) -> None:
    assert ("visible-devices-ignored" in [each.rule for each in lint(tmp_path, a__sh=text)]) == is_ignored


@pytest.mark.parametrize(
    ("source", "level"),
    [("sys.argv[1].endswith('.yaml')", "warning"), ("parser.add_argument('file')", None), ("", "note")],
)
def test_a_file_behind_the_local_rank_is_lost_where_the_script_looks_for_it_first(
    source: str, level: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(source)
    found = [each.level for each in lint(tmp_path, a__sh="deepspeed train.py my.yaml\n")]
    assert found == ([level] if level else [])


def test_srun_of_another_command_starts_no_launcher(tmp_path: Path) -> None:
    job = "#!/bin/bash\n#SBATCH --ntasks-per-node=4\n#SBATCH --signal=TERM@90\n#SBATCH --no-requeue\n"
    for command, rules in (("srun hostname\ntorchrun a.py", []), ("srun torchrun a.py", ["launcher-per-gpu"])):
        found = [each.rule for each in lint(tmp_path, a__sh=f"{job}{command}\n")]
        assert [each for each in found if each == "launcher-per-gpu"] == rules


def test_a_number_that_omegaconf_reads_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("settings = OmegaConf.load(name)\n")
    findings = lint(tmp_path, a__yaml="learning_rate: 2e-4\nnum_train_epochs: 1\noutput_dir: out\n")
    assert [(each.rule, each.level) for each in findings] == [("number-as-text", "note")]


@pytest.mark.parametrize(
    ("field", "level"), [("", ["error"]), ('    eval_strategy: str = field(default="steps")\n', [])]
)
def test_a_default_of_the_scripts_own_dataclass_is_not_transformers(
    field: str, level: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"{HF}class Mine(TrainingArguments):\n    rows: int = 1\n{field}")
    command = "torchrun train.py --output_dir out --bf16 --save_strategy steps --load_best_model_at_end\n"
    assert [each.level for each in lint(tmp_path, a__sh=command)] == level


def test_an_old_switch_that_is_off_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 2, "cpu_offload": false}}')
    assert [(each.level, each.fix) for each in lint_paths([tmp_path]).findings] == [("note", "remove it")]
    assert fixed_text(tmp_path / "a.json") == '{"zero_optimization": {"stage": 2}}'


@pytest.mark.parametrize("source", ["", "dtype = model_args.torch_dtype\n"])
def test_a_name_that_the_script_reads_is_not_renamed(source: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("trl>=1.16\n")
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "a.yaml").write_text(f"{TRL}torch_dtype: auto\n")
    assert ("torch_dtype" in fixed_text(tmp_path / "a.yaml")) == bool(source)


def test_an_argument_of_the_projects_own_copy_of_trl_is_known(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "trl/trainer").mkdir(parents=True)
    command = "accelerate launch trl/scripts/sft.py --model_name_or_path a/b --dataset_name c/d --torch_dtype auto\n"
    assert [each.key for each in lint(tmp_path, a__sh=command)] == ["torch_dtype"]
    (tmp_path / "trl/trainer/model_config.py").write_text("class ModelConfig:\n    torch_dtype: str = 'auto'\n")
    forget_projects()
    assert lint(tmp_path, a__sh=command) == []


def test_a_key_that_the_file_has_already_is_no_fix_of_another(tmp_path: Path) -> None:
    text = '{"zero_optimization": {"stage": 2}, "zero_optimisation": {"stage": 3}}'
    assert [(each.key, each.fix) for each in lint(tmp_path, a__json=text)] == [("zero_optimisation", "remove it")]


def test_another_setting_with_words_in_common_is_no_misspelling(tmp_path: Path) -> None:
    yaml = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_pin_memory: true\n"
    names = {"memory_optimization": {}, "monitor_config": {}, "micro_batch_size_per_gpu": 1}
    findings = lint(
        tmp_path, a__json=json.dumps({**names, "zero_optimizations": {"stage": 2}, "fp16": {"enabled": True}})
    )
    assert {each.key: each.fix for each in findings if "unknown" in each.rule} == {
        "memory_optimization": "remove it",
        "monitor_config": "remove it",
        "micro_batch_size_per_gpu": "`train_micro_batch_size_per_gpu`",
        "zero_optimizations": "`zero_optimization`",
    }
    assert "remove it" in [each.fix for each in lint(tmp_path, a__yaml=yaml)]
    assert fixed_text(tmp_path / "a.yaml") == yaml


def test_settings_of_a_loop_of_its_own_are_notes(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text(LOOP)
    text = "output_dir: o\nbf16: true\nwarmup_ratio: 0.1\nfsdp: true\nfsdp_config: {offload_params: true}\n"
    assert {each.level for each in lint(tmp_path, a__yaml=text)} == {"note"}
    (tmp_path / "train.py").write_text(
        f"{LOOP}c = yaml.safe_load(f)\nAdamW(model.parameters(), lr=c['learning_rate'])\n"
    )
    (tmp_path / "a.yaml").write_text("output_dir: o\nbf16: true\nlearning_rate: 1e-5\n")
    (found,) = lint(tmp_path, a__sh="accelerate launch --num_processes 2 train.py a.yaml\n")
    assert (found.rule, found.level) == ("number-as-text", "warning")  # but for what its optimizer gets


@pytest.mark.parametrize(("hostfile", "level"), [("", "error"), ("--deepspeed_hostfile hosts", "note")])
def test_a_hostfile_that_is_named_is_chosen(hostfile: str, level: str, tmp_path: Path) -> None:
    text = f"accelerate launch --use_deepspeed --num_machines 2 --main_process_ip h --machine_rank $R {hostfile} x.py\n"
    assert levels(lint(tmp_path, a__sh=text))["--deepspeed_multinode_launcher"] == level


@pytest.mark.parametrize(("source", "levels"), [("", {"warning", "error"}), ("rows = s.starting_rows\n", {"note"})])
def test_a_file_of_axolotl_with_settings_that_a_script_reads_has_notes(
    source: str, levels: set[str], tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "evaluate.py").write_text(source)
    text = "base_model: a/b\nsequence_len: 512\nmicro_batch_size: 1\nstarting_rows: 1\nour_limit: 2\nother_share: 3\n"
    text += "batch_size: 8\ngradient_accumulation_steps: 2\n"  # which axolotl refuses together
    assert {each.level for each in lint(tmp_path, a__yaml=text)} == levels


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        (
            '{"zero_optimization": {"stage": 2}, "overlap_comm": true}',
            "overlap_comm",
            "move it into `zero_optimization`",
        ),
        ('{"fp16": {"enabled": true}, "loss_scale": 0, "zero_optimization": {}}', "loss_scale", "move it into `fp16`"),
        ('{"zero_optimization": {"overlap_comm": true}, "overlap_comm": true}', "overlap_comm", "remove it"),
        (
            '{"zero_optimization": {"stage": 2}, "pin_memory": true}',
            "pin_memory",
            "move it into `zero_optimization.offload_optimizer` or into `zero_optimization.offload_param`",
        ),
        ("distributed_type: DEEPSPEED\nzero_stage: 3\n", "zero_stage", "move it into `deepspeed_config`"),
    ],
)
def test_a_key_outside_of_its_block_is_sent_there(text: str, key: str, fix: str, tmp_path: Path) -> None:
    name = "a__json" if text.startswith("{") else "a__yaml"
    assert {each.key: each.fix for each in lint(tmp_path, **{name: text})}[key] == fix
    assert fixed_text(tmp_path / name.replace("__", ".")) == text


def test_a_run_without_another_word_is_its_name(tmp_path: Path) -> None:
    text = "base_model: a/b\nsequence_len: 512\nmicro_batch_size: 1\nadapter: lora\nwandb_run: first\n"
    assert {each.key: each.fix for each in lint(tmp_path, a__yaml=text)} == {"wandb_run": "`wandb_name`"}


@pytest.mark.parametrize("word", ["NO", "no", '"no"'])
def test_a_block_of_an_engine_that_is_off_has_no_effect(word: str, tmp_path: Path) -> None:
    text = f"distributed_type: {word}\ndeepspeed_config:\n  zero_stage: 2\n"
    assert "block-not-in-force" in [each.rule for each in lint(tmp_path, a__yaml=text)]


@pytest.mark.parametrize("source", ["", "cfg.our_folder", "config['our_folder']"])
def test_a_setting_beside_deepspeeds_that_a_script_reads_is_a_note(source: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text(f"folder = {source}\n")
    text = '{"zero_optimization": {"stage": 2}, "our_folder": "rows", "our_limit": 3}'
    found = levels(lint(tmp_path, a__json=text))
    assert found == {"our_folder": "note" if source else "warning", "our_limit": "warning"}


@pytest.mark.parametrize(("names", "kind"), [(["num_proceses"], "accelerate"), (["model", "raw_data"], None)])
def test_a_file_of_a_script_may_have_a_block_named_as_one_of_accelerates(names: list[str], kind: str | None) -> None:
    assert detect_kind({"deepspeed_config": {"zero_stage": 2}, **dict.fromkeys(names, "a")}) == kind


def test_kubernetes_files_without_a_launcher_are_passed_over_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# ours\napiVersion: v1\nkind: ConfigMap\n---\napiVersion: v1\nkind: Service\n")
    (tmp_path / "b.sh").write_text("torchrun --nproc-per-node 8 train.py\n")
    result = lint_paths([tmp_path])
    assert (result.findings, result.unreadable) == ([], [])


def test_a_hostfile_that_is_no_text_leaves_the_rest_of_a_folder_to_be_linted(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a.sh").write_text("deepspeed --hostfile hosts x.py\n")
    (tmp_path / "b.yaml").write_text("distributed_type: FDSP\nnum_processes: 2\n")
    result = lint_paths([tmp_path])
    assert not result.unreadable
    assert [finding.rule for finding in result.findings if finding.file.endswith("b.yaml")]


@pytest.mark.parametrize(
    ("requirement", "level"),
    [
        ("transformers==4.37.2", "note"),
        ("transformers[torch] >= 4.31, < 5  # why", "note"),
        ("transformers~=4.40", "note"),
        ("transformers @ git+https://github.com/huggingface/transformers@v4.50.0", "note"),
        ("transformers @ git+https://github.com/huggingface/transformers@c04e84c4545acf", "note"),
        ("transformers>=4.37", "warning"),
        ("transformers==5", "error"),
        ("transformers\npeft==0.3", "warning"),
        ("sentence-transformers==2.2", "note"),
    ],
)
def test_a_removal_is_a_note_where_the_project_asks_for_an_older_version(
    requirement: str, level: str, tmp_path: Path
) -> None:
    (tmp_path / ".git").touch()
    (tmp_path / "requirements.txt").write_text(f"{requirement}\n")
    (tmp_path / "run").mkdir()
    text = "python -m torch.distributed.run run_clm.py --output_dir o --do_train --per_gpu_train_batch_size 4\n"
    found = lint(tmp_path / "run", a__sh=text)
    assert levels(found)["per_gpu_train_batch_size"] == level
    assert ("the project asks for" in found[0].message) == (level == "note" and requirement.startswith("transformers"))


@pytest.mark.parametrize(
    "text",
    ["[project]\ndependencies = ['transformers==4.40.0']\n", '[tool.poetry.dependencies]\ntransformers = "^4.40"'],
)
def test_an_older_version_is_not_fixed_for_a_newer_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    yaml = f"{TRL}evaluation_strategy: steps\nmax_seq_length: 512\n"
    assert set(levels(lint(tmp_path, a__yaml=yaml)).values()) == {"note"}
    assert fixed_text(tmp_path / "a.yaml") == yaml


def test_an_old_deepspeed_takes_keys_and_numbers_that_later_ones_refuse(tmp_path: Path) -> None:
    text = '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1.5, "no_such_key": 1,'
    text += '"stage3_gather_fp16_weights_on_model_save": true}}'
    assert "error" in levels(lint(tmp_path, a__json=text)).values()
    (tmp_path / "requirements.txt").write_text("deepspeed==0.4.3\n")
    assert set(levels(lint(tmp_path, a__json=text)).values()) == {"note"}
    assert fixed_text(tmp_path / "a.json") == text
    text = '{"zero_optimization": {}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, '
    text += '"warmup_max_lr": 1}}}'
    (found,) = (each for each in lint(tmp_path, a__json=text) if each.rule == "unknown-parameter")
    assert (found.level, found.fix) == ("error", "remove it: it is the optimizer's lr")  # in each version with it


def test_a_file_that_nothing_names_with_many_other_keys_may_be_a_scripts_own(tmp_path: Path) -> None:
    other = '"model": "a", "rows": "b", "epochs": 3, "seq_len": 4'
    text = f'{{"zero_optimization": {{"stage": 2, "offload_param": {{"device": "cpu"}}}}, {other}}}'
    assert set(levels(lint(tmp_path, a__json=text)).values()) == {"note"}
    script = "deepspeed run_clm.py --do_train --output_dir o --deepspeed a.json\n"
    assert levels(lint(tmp_path, b__sh=script, a__json=text))["rows"] == "warning"


def test_a_common_word_in_a_project_is_no_reading_of_a_setting(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("from transformers.utils import logging\nlogging.seed()\nx = ['seed', 'a']\n")
    text = '{"zero_optimization": {"stage": 2}, "seed": 1, "logging": true}'
    assert levels(lint(tmp_path, a__json=text)) == {"seed": "warning", "logging": "warning"}
    (tmp_path / "train.py").write_text("def f(cfg):\n    return cfg.train.seed, cfg.get('logging')\n")
    assert levels(lint(tmp_path, a__json=text)) == {"seed": "note", "logging": "note"}


def test_a_folder_passes_over_yaml_of_other_programs_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("a: 1\n---\nb: 2\n")
    (tmp_path / "template.yaml").write_text("name: {{ .Values.name }}\nimage: {{ .Values.image }}\n")
    (tmp_path / "ours.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2\n"
    )
    (tmp_path / "wide.sh").write_text("torchrun x.py --bf16\n", encoding="utf-16")  # which bash cannot run
    for name, text in {"a.sh": "torchrun x.py \\\n--bf16\n", "a.json": '{"zero_optimization": {}}\n'}.items():
        (tmp_path / name).write_text(f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> main\n")
    result = lint_paths([tmp_path])
    named = [error.message.removeprefix(f"{tmp_path}/")[:14] for error in result.unreadable]
    assert named == ["a.json, line 1", "a.sh, line 1: ", "ours.yaml is n"]
    assert [line.partition(":")[0] for line in result.not_checked] == ["skipped, as another program's"] * 2 + [
        "skipped"
    ]


def test_a_script_that_drops_other_keys_does_not_raise_for_them(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("args = HfArgumentParser(C).parse_dict(cfg, allow_extra_keys=True)\n")
    text = f"{TRL}overwrite_output_dir: true\noutput_dir: o\n"
    assert levels(lint(tmp_path, a__yaml=text))["overwrite_output_dir"] == "note"
    assert fixed_text(tmp_path / "a.yaml") == text


def test_an_option_with_a_path_is_no_file_in_the_first_place(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("args = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()\n")
    found = lint(tmp_path, a__sh='deepspeed train.py --deepspeed="ds.json" --do_train --output_dir o\n')
    assert "file-not-read" not in [each.rule for each in found]


def test_a_launcher_without_a_script_is_sent_none_of_its_options_behind_a_value(tmp_path: Path) -> None:
    found = lint(tmp_path, a__sh="deepspeed --model a/b --rows one two three\n")
    assert {each.fix for each in found if each.rule == "unknown-launcher-option"} == {"the script in front of it"}


def test_padding_free_of_grpo_is_not_judged_as_that_of_dpo(tmp_path: Path) -> None:
    text = f"{TRL}padding_free: true\nnum_generations: 4\nper_device_train_batch_size: 4\n"
    assert "padding-free-ignored" not in [each.rule for each in lint(tmp_path, a__yaml=text)]
    assert "padding-free-ignored" in [each.rule for each in lint(tmp_path, a__yaml=f"{TRL}padding_free: true\n")]


@pytest.mark.parametrize(("base", "level"), [("Trainer", "note"), ("GRPOTrainer", "error")])
def test_groups_of_a_trainer_of_its_own_may_be_others(base: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"class OurGRPOTrainer({base}):\n    pass\nparser = TrlParser((C, ModelConfig))\n"
    )
    words = "--model_name_or_path a/b --output_dir o --num_generations 16 --per_device_train_batch_size 1"
    text = f"accelerate launch --num_processes 7 train.py {words} --gradient_accumulation_steps 12 --bf16 true\n"
    assert levels(lint(tmp_path, a__sh=text))["num_generations"] == level


@pytest.mark.parametrize("bucket", ["0", '"auto"'])
def test_a_prefetch_that_is_off_by_choice_is_no_finding(bucket: str, tmp_path: Path) -> None:
    keys = f'"stage": 3, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": {bucket}'
    rules = [each.rule for each in lint(tmp_path, a__json=f'{{"zero_optimization": {{{keys}}}}}')]
    assert ("max-live-parameters-zero" in rules) == (bucket != "0")


def test_a_process_that_lives_long_looks_at_a_changed_project(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers>=5\n")
    text = f"{TRL}evaluation_strategy: steps\n"
    assert levels(lint(tmp_path, a__yaml=text))["evaluation_strategy"] == "error"
    (tmp_path / "train.py").write_text("accelerator = Accelerator()\n")
    assert levels(lint(tmp_path, a__yaml=text))["evaluation_strategy"] == "note"


def test_a_launcher_that_an_editor_writes_is_not_started_and_prose_is_no_command(tmp_path: Path) -> None:
    text = "sed -i 's/accelerate launch --num_cpu_threads_per_process=6/accelerate launch x.py --num_processes 2/' a\n"
    assert read_script(text).launches == ()
    found = lint(tmp_path, a__sh="torchrun x.py --bf16 True\nsdxl, it says “Warning”\n")
    assert "typographic-quotes" not in [each.rule for each in found]
    found = lint(tmp_path, a__sh="torchrun x.py --name “a”\n")
    assert "typographic-quotes" in [each.rule for each in found]


@pytest.mark.parametrize("word", ["???", "..."])
def test_a_word_that_stands_for_a_value_is_not_judged(word: str, tmp_path: Path) -> None:
    text = f"{TRL}learning_rate: '{word}'\nsave_strategy: '{word}'\n"
    assert not {"learning_rate", "save_strategy"} & levels(lint(tmp_path, a__yaml=text)).keys()


OLD_NAME = f"{TRL}per_gpu_train_batch_size: 4\n"  # gone since 5.0


@pytest.mark.parametrize(
    ("name", "text", "level"),
    [
        ("requirements.txt", "trl==0.15.2\n", "note"),  # which transformers 5 does not work with
        ("requirements.txt", "torch==2.1.0\ntorchvision==0.16\n", "note"),
        ("requirements.txt", "transformers\ntorch>=2.1\ntorchvision==0.16\nhuggingface-hub==1.2\n", "warning"),
        ("uv.lock", '[[package]]\nname = "transformers"\nversion = "4.51.3"\n', "note"),
        ("handbook/setup.py", '"huggingface-hub>=0.19.2,<1.0"\n', "note"),  # a part of the project
        ("README.md", "First: pip install transformers==4.44\n", "note"),
        ("README.md", "pip install transformers\nIt is like transformers 4.44\n", "warning"),
        ("setup.py", '"trl @ git+https://github.com/huggingface/trl.git@69ad852e5654"\n', "note"),  # some version
    ],
)
def test_what_a_project_installs_may_exclude_a_version(name: str, text: str, level: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    (finding,) = [each for each in lint(tmp_path, a__yaml=OLD_NAME) if each.rule == "removed-training-argument"]
    is_fixed = "per_gpu_train_batch_size" not in fixed_text(tmp_path / "a.yaml")
    assert (finding.level, is_fixed) == (level, level == "error")


@pytest.mark.parametrize(
    ("module", "level"), [("src/llamafactory/hparams/model_args.py", "note"), ("src/other/model_args.py", "error")]
)
def test_a_recipe_is_read_by_the_copy_of_a_program_in_its_tree(module: str, level: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("We train with LLaMA-Factory.\n")
    (tmp_path / module).parent.mkdir(parents=True)
    (tmp_path / module).touch()
    *others, finding = lint(tmp_path, a__yaml=f"{FACTORY}evaluation_strategy: steps\n".replace("qwen3", "mine"))
    assert (finding.level, "own llamafactory decides" in finding.message) == (level, level == "note")
    assert [each.key for each in others] == ["template"] * (level == "error")  # which the copy may register


@pytest.mark.parametrize(("pin", "level"), [("==0.15.4", "note"), ("==0.18.0", "error"), ("", "warning")])
def test_precision_blocks_of_deepspeed_are_strict_in_later_versions(pin: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"deepspeed{pin}\n")
    findings = lint(tmp_path, ds__json=json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"auto_cast": True}}))
    assert levels(findings)["bf16.auto_cast"] == level


@pytest.mark.parametrize(
    ("strategy", "script", "is_said"),
    [
        ("no", HF, False),
        ("no", f"{HF}trainer.save_model()\n", True),
        ("steps", HF, True),
        ("steps", f"{HF}class Mine(Trainer):\n    def save_model(self, folder): ...\n", False),
        ("steps", f"{HF}class Mine(Trainer):\n    def _save(self, folder, state=None): ...\n", True),
        ("steps", f"{HF}class Mine(Trainer):\n    def _save(self, folder): get_state_zero3(self)\n", False),
        ("steps", f"{HF}{WITH_LORA}", True),  # which the command does not turn on
        ("steps --use_lora true", f"{HF}{WITH_LORA}", False),
        ("steps", f"{HF}{WITH_LORA.replace('False', 'True')}", False),
        ("steps", f"{HF}{WITH_LORA}model = get_peft_model(model)\n", False),
    ],
)
def test_weights_are_missed_only_where_a_trainer_saves_them(
    strategy: str, script: str, is_said: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))
    command = f"deepspeed train.py --deepspeed ds.json --output_dir out --bf16 --save_strategy {strategy}\n"
    assert ("stage-3-without-gather" in {each.rule for each in lint(tmp_path, a__sh=command)}) == is_said


@pytest.mark.parametrize("last", [4, 2])
def test_a_json_is_judged_with_each_command_that_names_it(last: int, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {}, "train_micro_batch_size_per_gpu": 4}')
    for name, size in {"a.sh": 6 - last, "b.sh": last}.items():
        command = f"deepspeed run_clm.py --deepspeed ds.json --bf16 --do_train --per_device_train_batch_size {size}\n"
        (tmp_path / name).write_text(command)
    found = [each for each in lint_paths([tmp_path]).findings if each.rule == "not-auto"]
    assert [each.level for each in found] == ["warning"]  # of the command that has 2


@pytest.mark.parametrize(
    ("line", "tools"),
    [
        ('OPTIONS="--backend deepspeed --zero_stage 3"', []),
        ("cat <<EOF\ntorchrun --nproc_per_node 8 train.py\nEOF", []),  # a text for people
        ("cat > job.sh <<EOF\ntorchrun --nproc_per_node 8 train.py\nEOF", ["torchrun"]),
        ('bash -c "deepspeed --num_gpus 2 train.py"', ["deepspeed"]),
    ],
)
def test_options_in_a_string_and_a_text_for_people_start_nothing(line: str, tools: list[str]) -> None:
    assert [call.tool for call in read_script(f"{line}\n").launches] == tools


@pytest.mark.parametrize(
    ("line", "is_said"), [("args.lr_scheduler_kwargs = {}", False), ("x['lr_scheduler_kwargs']", True)]
)
def test_what_a_script_sets_itself_is_not_missing(line: str, is_said: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{HF}{line}\n")
    command = "torchrun train.py --output_dir out --bf16 --lr_scheduler_type cosine_with_min_lr\n"
    assert ("refused-alone" in {each.rule for each in lint(tmp_path, a__sh=command)}) == is_said


@pytest.mark.parametrize(("block", "is_said"), [({}, True), ({"optimizer": {"type": "AdamW"}}, False)])
def test_an_optimizer_of_the_json_is_deepspeeds_own_where_it_is_offloaded(
    block: dict[str, object], is_said: bool, tmp_path: Path
) -> None:
    zero = {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    findings = lint(tmp_path, ds__json=json.dumps(zero | block))
    assert ("offload-without-cpu-adam" in {each.rule for each in findings}) == is_said


@pytest.mark.parametrize(
    ("name", "options", "level"),
    [
        ("a__sbatch", "", "error"),
        ("a__sh", "", "note"),
        ("a__sh", "--rdzv-backend c10d --master-addr $HEAD", "error"),
        ("a__sh", '--master-addr="" --node-rank $R', "note"),
        ("a__sh", "--master-port=29500 --node-rank $R", "note"),
        ("a__sbatch", "--master-port=29500 --node-rank $R", "error"),
    ],
)
def test_a_platform_may_name_the_head_outside_of_slurm(name: str, options: str, level: str, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun --nnodes=2 {options} train.py\n"
    findings = lint(tmp_path, **{name: text if "sbatch" in name else text.replace("#SBATCH --nodes=2", "")})
    (found,) = (each for each in findings if each.rule == "no-rendezvous")
    assert (found.level, "--master-port is empty" in found.message) == (level, False)


@pytest.mark.parametrize(("version", "level"), [("1.11.0", "note"), ("2.6.0", "error")])
def test_a_library_older_than_what_the_rules_know_makes_an_error_a_note(
    version: str, level: str, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"conda install pytorch=={version}\n")
    (tmp_path / "main.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank')\np.parse_args()\n"
    )
    findings = lint(tmp_path, a__sh="python -m torch.distributed.launch --nproc_per_node 8 main.py\n")
    assert levels(findings) == {"--local-rank": level}


@pytest.mark.parametrize(("option", "level"), [("--config_file", "note"), ("--data", "warning")])
def test_an_option_that_a_script_has_too_may_stand_behind_its_name(option: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import argparse\nargparse.ArgumentParser().add_argument('{option}')\n")
    findings = lint(tmp_path, a__sh="accelerate launch train.py --config_file models/a.yaml\n")
    assert levels(findings)["--config_file"] == level


def test_lines_that_are_lost_together_are_one_finding(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun train.py\n--bf16 true\n--fp16 false\necho done\n--tf32 true\n")
    found = [finding for finding in lint_paths([script]).findings if finding.rule == "lost-line"]
    assert [finding.line for finding in found] == [2, 5]


def test_what_transformers_5_needs_excludes_no_older_version(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("tokenizers==0.13.3\n")
    assert pinned_below(tmp_path, "transformers", "5.0.0") == "tokenizers ==0.13.3"
    assert pinned_below(tmp_path, "transformers", "4.31.0") is None


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("x = model_args.torch_dtype", "`dtype`, and the same in your code; or an older TRL"),
        ("x = load(torch_dtype=1)", "`dtype`"),
    ],
)
def test_a_name_that_the_code_reads_from_its_arguments_is_renamed_there_too(
    code: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("trl>=1.16\n")
    (tmp_path / "train.py").write_text(f"parser = TrlParser((SFTConfig, ModelConfig))\n{code}\n")
    findings = lint(tmp_path, a__yaml=f"{TRL}torch_dtype: bfloat16\n")
    assert [each.fix for each in findings if each.key == "torch_dtype"] == [fix]
    assert (fixed_text(tmp_path / "a.yaml") == (tmp_path / "a.yaml").read_text()) == ("older" in fix)


@pytest.mark.parametrize("name", ["transformer_cls_names_to_wrap", "cpu_offload"])
def test_a_field_of_the_fsdp_plugin_has_another_name_in_the_file(name: str, tmp_path: Path) -> None:
    findings = lint(tmp_path, a__yaml=f"distributed_type: FSDP\nfsdp_config:\n  fsdp_{name}: a\n")
    fixes = {"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap", "cpu_offload": "offload_params"}
    assert [each.fix for each in findings if name in each.key] == [f"`fsdp_{fixes[name]}`"]


@pytest.mark.parametrize("name", ["eval_dataset", "eval_datasets"])
def test_axolotls_name_for_rows_to_evaluate_is_named(name: str, tmp_path: Path) -> None:
    rows = "\n  - {path: v.jsonl, type: alpaca}\n"
    findings = lint(tmp_path, a__yaml=f"base_model: a/b\nmicro_batch_size: 1\ndatasets:{rows}{name}:{rows}")
    assert [each.fix for each in findings if each.key == name] == ["`test_datasets`, without `val_set_size`"]


def test_a_json_to_which_the_projects_code_adds_the_batch_size_needs_none(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("deepspeed: ds.json\noutput_dir: out\nper_device_train_batch_size: 1\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    (tmp_path / "setup.py").touch()
    found = [each.rule for each in lint_paths([tmp_path / "train.yaml"]).findings]
    (tmp_path / "trainer.py").write_text(
        'config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size\n'
    )
    assert "no-batch-size" in found
    assert "no-batch-size" not in [each.rule for each in lint_paths([tmp_path / "train.yaml"]).findings]


def test_auto_that_the_projects_code_may_fill_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("deepspeed: ds.json\noutput_dir: out\nper_device_train_batch_size: 1\n")
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 3, "sub_group_size": "auto"}}'
    )
    (tmp_path / "setup.py").touch()
    levels = [f.level for f in lint_paths([tmp_path / "train.yaml"]).findings if f.rule == "auto-is-kept"]
    (tmp_path / "own.py").write_text('config["zero_optimization"]["sub_group_size"] = args.size\n')
    filled = [f.level for f in lint_paths([tmp_path / "train.yaml"]).findings if f.rule == "auto-is-kept"]
    assert (levels, filled) == (["error"], ["note"])


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("use_fast: true", "`tokenizer_use_fast` if you mean that, or remove it"),
        (
            "quantization_config: {}",
            "`model_quantization_config` if you mean that, or remove it",
        ),  # refused with 4 bits
        ("preprocess: true", "remove it"),  # `is_preprocess` is what axolotl's command notes for itself
        ("lora_target_module: [q_proj]", "`lora_target_modules`"),
        ("lora_r: 8\nlora_rank: 8", "remove it: `lora_r` is set"),
    ],
)
def test_a_name_with_a_word_more_is_offered_and_not_told(setting: str, fix: str, tmp_path: Path) -> None:
    recipe = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\nnum_epochs: 1\nadapter: lora\n"
    (found,) = lint(tmp_path, a__yaml=f"{recipe}{setting}\n")
    assert found.fix == fix


def test_a_variable_that_the_script_itself_reads_by_name_is_no_mistake(tmp_path: Path) -> None:
    reader = "FSDP_STR=full python3 - <<'EOF'\nimport os\nprint(os.environ['FSDP_STR'])\nEOF\n"
    script = "export FSDP_OTHER=1\naccelerate launch train.py\n"
    findings = lint(tmp_path, a__sh=f"#!/bin/bash\n{reader}{script}")
    assert "FSDP_STR" not in levels(findings)
    assert levels(findings)["FSDP_OTHER"] == "warning"


def test_a_commit_of_a_library_is_a_pin_however_its_name_is_spelt(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("ms_swift @ git+https://example.org/ms-swift.git@aa29050e2b7f\n")
    assert pinned_below(tmp_path, "ms-swift", "4.6.0") == "ms_swift aa29050e2b7f"
    assert levels(lint(tmp_path, a__sh=f"{SWIFT} --train_type lora\n"))["train_type"] == "note"


def test_a_removed_argument_that_the_code_reads_from_its_arguments_is_not_removed_alone(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers>=5.15\n")
    train = "from transformers import HfArgumentParser, TrainingArguments\n"
    train += "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    (tmp_path / "train.py").write_text(f"{train}steps = args.warmup_ratio * 100\n")
    script = "torchrun train.py --output_dir out --bf16 true --warmup_ratio 0.0\n"
    (found,) = [each for each in lint(tmp_path, a__sh=script) if each.key == "warmup_ratio"]
    assert found.level == "error"
    assert "the same in your code" in found.fix
    assert fixed_text(tmp_path / "a.sh") == script


def test_a_removed_argument_that_a_script_works_out_itself_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("steps = int(cfg['warmup_ratio'] * 10)\nTrainingArguments(warmup_steps=steps)\n")
    text = "output_dir: out\nper_device_train_batch_size: 1\nsave_strategy: steps\nwarmup_ratio: 0.1\n"
    assert levels(lint(tmp_path, a__yaml=text))["warmup_ratio"] == "note"


def test_a_precision_in_accelerates_block_is_what_mixed_precision_says(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
    text += "deepspeed_config:\n  zero_stage: 2\n  bf16: {enabled: true}\n"
    assert [(each.level, each.fix) for each in lint(tmp_path, a__yaml=text)] == [("note", "remove it")]


@pytest.mark.parametrize(
    ("stage", "words", "level"),
    [
        (2, "stage3_max_reuse_distance: 5", "note"),  # which a JSON of this stage passes over too
        (3, "stage3_max_reuse_distance: 5", "warning"),
        (3, "reduce_bucket_size: 5e8", "note"),  # DeepSpeed's default
        (3, "overlap_comm: true", "note"),
        (2, "overlap_comm: true", "warning"),
        (2, "tensor_parallel_size: 1", "note"),
        (2, "pipeline_parallel_size: 4", "warning"),  # a name that no library knows
        (2, "offload_optimizer: {device: none}", "note"),
        (2, "offload_optimizer: {device: cpu}", "warning"),
        (2, "gradient_clip: 0.5", "error"),
        (2, "bf16: {enabled: true}", "error"),  # computes in fp32
        (3, "zero3_save_16bit_model: true\n  stage3_gather_16bit_weights_on_model_save: true", "note"),
        (3, "stage3_gather_16bit_weights_on_model_save: true", "warning"),
        (2, "steps_per_print: 100", "note"),
        (2, "gradient_clip: 1", "error"),  # no Trainer has 1 by default here
    ],
)
def test_what_accelerate_ignores_is_an_error_only_where_the_run_is_another(
    stage: int, words: str, level: str, tmp_path: Path
) -> None:
    text = f"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: {stage}\n  {words}\n"
    assert [each.level for each in lint(tmp_path, a__yaml=text) if each.rule == "unknown-nested-key"] == [level]


def test_the_beginning_of_an_option_is_the_option(tmp_path: Path) -> None:
    command = "llamafactory-cli train --stage sft --model_name_or_path a/b --template qwen"
    (tmp_path / "b.yaml").write_text(f"{FACTORY}lora_r: 8\n")
    assert lint(tmp_path, a__sh=f"{command} --lora_r 8\n") == []  # argparse takes it for --lora_rank
    assert levels(lint_paths([tmp_path / "b.yaml"]).findings) == {"lora_r": "error"}


def test_an_exponent_on_a_command_line_is_no_text_of_yaml(tmp_path: Path) -> None:
    text = "output_dir: out\nper_device_train_batch_size: 1\nsave_strategy: steps\nlearning_rate: 1e-4\n"
    (tmp_path / "train.py").write_text("HfArgumentParser(TrainingArguments).parse_yaml_file(name)\n")
    command = "torchrun train.py c.yaml --learning_rate 2e-4\n"
    findings = lint(tmp_path, a__sh=command, c__yaml=text)
    assert [each for each in findings if each.rule == "number-as-text" and each.file.endswith("a.sh")] == []


def test_a_setting_that_scripts_which_read_others_never_name_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    train = "TrainingArguments(output_dir=cfg['output_dir'], bf16=cfg['bf16'])\n"
    (tmp_path / "train.py").write_text(train)
    text = "output_dir: out\nbf16: true\nsave_strategy: steps\nevaluation_strategy: steps\n"
    assert levels(lint(tmp_path, a__yaml=text))["evaluation_strategy"] == "note"


def test_a_recipe_with_strange_settings_is_axolotls_where_something_names_it(tmp_path: Path) -> None:
    text = "base_model: a\nnum_epochs: 3\nlearning_rate: 2.0e-5\nlr_scheduler: cosine\nweight_decay: 0.1\n"
    text += "gradient_accumulation_steps: 4\nsave_steps: 500\nwarmup_ratio: 0.03\nmax_seq_length: 4096\n"
    text += "training_type: full\ndata: a.jsonl\nbatch_size: 4\neffective_batch_size: 16\nbest_checkpoint: 3000\n"
    assert set(levels(lint(tmp_path, a__yaml=text)).values()) <= {"note"}
    (tmp_path / "README.md").write_text("axolotl train a.yaml\n")
    forget_projects()
    assert "warning" in levels(lint(tmp_path, a__yaml=text)).values()


def test_a_setting_that_accelerates_older_version_does_not_read_has_no_type(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_ignored_modules: [a, b]\n"
    (tmp_path / "requirements.txt").write_text("accelerate==0.33.0\n")
    assert levels(lint(tmp_path, a__yaml=text))["fsdp_config.fsdp_ignored_modules"] == "note"


def test_a_command_in_an_array_of_several_lines_is_read(tmp_path: Path) -> None:
    array = "CMD=(\n  swift sft  # with adapters\n  --model a/b\n  --train_type lora\n)\n"
    (found,) = lint(tmp_path, a__sh=f'{array}"${{CMD[@]}}"\n')
    assert (found.key, found.line) == ("train_type", 4)
    continued = "CMD=(swift sft --model a/b \\\n  --num_train_epochs 3 \\\n  --train_type lora \\\n)\n"
    assert [each.key for each in lint(tmp_path, a__sh=f'{continued}"${{CMD[@]}}"\n')] == ["train_type"]


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("eval_strategy: step", "--eval_strategy step"),
        ("lr_scheduler_type: cosin", "--lr_scheduler_type cosin"),
        ("logging_steps: ten", "--logging_steps ten"),
        ("warmup_steps: -1", "--warmup_steps -1"),
    ],
)
def test_a_fault_has_one_level_in_a_file_and_on_a_command_line(yaml: str, words: str, tmp_path: Path) -> None:
    factory = "llamafactory-cli train --stage sft --model_name_or_path a/b --finetuning_type lora"
    files = {
        "a__yaml": f"{TRL.replace('beta: 0.1', '')}{yaml}\n",
        "b__yaml": f"{FACTORY}{yaml}\n",
        "c__sh": f"torchrun run_clm.py --do_train --output_dir out {words}\n",
        "d__sh": f"{factory} {words}\n",
        "e__sh": f"{SWIFT} {words}\n",
    }
    key = yaml.partition(":")[0]
    assert {levels(lint(tmp_path, **{name: text})).get(key) for name, text in files.items()} == {"error"}
    own = lint(tmp_path, f__sh=f"torchrun mine.py --do_train --output_dir out --bf16 {words}\n")
    assert levels(own)[key] == ("error" if "warmup" in yaml else "warning")  # it may have words of its own


def test_flags_are_judged_with_the_file_of_accelerate_that_they_complete(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n")
    command = "accelerate launch --config_file acc.yaml --main_process_ip a --machine_rank $1 --num_processes"
    assert "num_processes" not in levels(lint(tmp_path, a__sh=f"{command} 6 x.py\n"))
    (found,) = [each for each in lint(tmp_path, a__sh=f"{command} 5 x.py\n") if each.rule == "uneven-processes"]
    assert (Path(found.file).name, found.line, found.level) == ("a.sh", 1, "error")
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: d.json}\n"
    )
    flags = lint(
        tmp_path, a__sh="accelerate launch --config_file acc.yaml --mixed_precision bf16 --zero_stage 2 x.py\n"
    )
    assert {"precision-owned-by-json", "key-owned-by-json"}.isdisjoint(
        each.rule for each in flags
    )  # flags may repeat it


def test_a_file_of_accelerate_that_is_not_here_may_say_the_engine(tmp_path: Path) -> None:
    command = "accelerate launch {} --zero_stage 2 --offload_param_device cpu x.py\n"
    assert lint(tmp_path, a__sh=command.format("--config_file $ENGINE.yaml")) == []
    assert levels(lint(tmp_path, a__sh=command.format(""))) == {"deepspeed_config": "note"}  # the default file may too


def test_a_recipe_that_the_projects_code_reads_by_names_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("LoraConfig(target_modules=cfg['lora_target_modules'])\n")
    text = f"{FACTORY}lora_target_modules: [q_proj]\n"
    assert levels(lint(tmp_path, a__yaml=text)) == {"lora_target_modules": "note"}


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("from transformers import AdamW\n", "note"),  # gone since 5.0
        ("from transformers import (\n    AutoModel,\n    AdamW,\n)\n", "note"),
        ("from trl.commands.cli_utils import TrlParser\n", "note"),  # a TRL that cannot be with transformers 5
        ("try:\n    from transformers import AdamW\nexcept ImportError:\n    pass\n", "error"),
        ("from torch.optim import AdamW\n", "error"),
    ],
)
def test_code_that_imports_what_a_version_no_longer_has_needs_an_older_one(
    text: str, level: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text("transformers>=5.15\n")
    (tmp_path / "old.py").write_text(text)
    command = "torchrun -m axes --output_dir out --bf16 true --overwrite_output_dir true"
    (tmp_path / "axes.py").write_text("HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n")
    assert levels(lint(tmp_path, a__sh=f"{command}\n"))["overwrite_output_dir"] == level


@pytest.mark.parametrize(("version", "level"), [("5.5.0", "note"), ("5.15.0", "error")])
def test_an_argument_is_gone_from_the_version_that_dropped_it(version: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"transformers=={version}\n")
    (tmp_path / "train.py").write_text("HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n")
    command = "torchrun train.py --output_dir out --bf16 true --warmup_ratio 0.1 --overwrite_output_dir\n"
    found = levels(lint(tmp_path, a__sh=command))
    assert (found["warmup_ratio"], found["overwrite_output_dir"]) == (level, "error")


def test_a_key_of_fsdp_that_the_projects_code_reads_itself_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "misspelt_requirments.txt").write_text("transformers\n")
    (tmp_path / "setup.py").touch()
    (tmp_path / "train.py").write_text("TrainingArguments(fsdp=cfg['fsdp_config'].get('fsdp'))\n")
    text = "output_dir: out\nper_device_train_batch_size: 1\nsave_strategy: steps\nfsdp_config:\n  fsdp: full_shard\n"
    assert levels(lint(tmp_path, a__yaml=text))["fsdp_config.fsdp"] == "note"


def test_a_script_that_returns_the_words_it_does_not_know_drops_them(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers, trl\n")
    (tmp_path / "train.py").write_text("TrlParser(Mine).parse_args_and_config(return_remaining_strings=True)\n")
    assert levels(lint(tmp_path, a__yaml=f"{TRL}warmup_ratio: 0.1\n"))["warmup_ratio"] == "warning"
    text = "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(return_remaining_strings=True)\n"
    (tmp_path / "train.py").write_text(text)
    command = "torchrun train.py --output_dir out --bf16 true --warmup_ratio 0.1\n"
    assert levels(lint(tmp_path, b__sh=command))["warmup_ratio"] == "warning"


def test_torchrun_counts_the_gpus_for_auto(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: auto\n"
    assert lint(tmp_path, a__yaml=text) == []


def test_accumulation_on_a_launchers_line_asks_for_no_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    command = "accelerate launch --config_file c.yaml --gradient_accumulation_steps 4 train.py\n"
    assert [each for each in lint(tmp_path, a__sh=command) if each.rule == "block-not-in-force"] == []


@pytest.mark.parametrize(
    ("asked", "has_code", "level"),
    [
        ("", True, "note"),
        ("transformers", True, "warning"),
        ("transformers>=4.45", True, "warning"),  # the newest one, where nothing holds it back
        ("transformers>=5.15,<6", True, "error"),
        ("transformers==5.23.0", True, "error"),
        ("", False, "error"),  # a file alone is of the newest version
    ],
)
def test_what_a_version_removed_is_said_with_the_version_where_the_project_says_none(
    asked: str, has_code: bool, level: str, tmp_path: Path
) -> None:
    if has_code:
        (tmp_path / "requirements.txt").write_text(f"{asked}\n")
        (tmp_path / "train.py").write_text("HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n")
    text = f"{OLD_NAME}warmup_ratio: 0.1\ngradient_checkpointing: true\n"
    found = {each.key: each for each in lint(tmp_path, a__yaml=text)}
    assert (found["warmup_ratio"].level, found["per_gpu_train_batch_size"].level) == (level, level)
    is_conditional = found["warmup_ratio"].fix.startswith("if you run transformers 5.15.0 or newer: ")
    assert is_conditional == (level != "error")
    assert ("gradient_checkpointing" in found) == (level == "error")  # whose new name older versions do not have
    assert ("per_gpu_train_batch_size" in fixed_text(tmp_path / "a.yaml")) == is_conditional


@pytest.mark.parametrize(
    ("text", "named", "level"),
    [
        (f"{FACTORY}train_type: lora\n", "", "note"),
        (f"{FACTORY}train_type: lora\n", "See LLaMA-Factory.\n", "warning"),
        (f"# llamafactory-cli train a.yaml\n{FACTORY}train_type: lora\n", "", "warning"),
    ],
)
def test_a_file_is_of_a_program_that_its_project_names(text: str, named: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "README.md").write_text(named)
    (tmp_path / "own.py").write_text("yaml.safe_load(open('a.yaml'))\n")
    assert levels(lint(tmp_path, a__yaml=text))["train_type"] == level


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("distributed_type: MULTI_GPU\ngpu_ids: 0\n", '`gpu_ids: "0"`, in quotes'),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: ./z3.json\n",
         "`deepspeed_config: {deepspeed_config_file: ./z3.json}`"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_shown_as_the_key_takes_it(text: str, fix: str, tmp_path: Path) -> None:
    assert fix in [each.fix for each in lint(tmp_path, a__yaml=text) if each.rule == "wrong-type"]


def test_an_escaped_space_is_no_value_of_the_option_before_it(tmp_path: Path) -> None:
    command = "torchrun train.py --output_dir out --bf16 true --warmup_steps 500 \\ \n  --fp16 true\n"
    assert [each.rule for each in lint(tmp_path, a__sh=command)] == ["lost-line"]


def test_the_folder_of_temporary_files_is_nobodys_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements.txt").write_text("transformers==4.0\n")
    folder = tmp_path / "job"
    folder.mkdir()
    forget_projects()
    assert pinned_below(folder, "transformers", "4.40") == "transformers ==4.0"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    forget_projects()
    assert pinned_below(folder, "transformers", "4.40") is None


@pytest.mark.parametrize(
    ("command", "level"), [("accelerate launch own.py a.yaml", "note"), ("llamafactory-cli train a.yaml", "warning")]
)
def test_a_command_of_the_program_says_whose_a_file_is(command: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "own.py").write_text("yaml.safe_load(open(sys.argv[1]))\n")
    (tmp_path / "a.yaml").write_text(f"{FACTORY}train_type: lora\n")
    found = levels(lint_paths([tmp_path / "a.yaml"]).findings) | levels(lint(tmp_path, a__sh=f"{command}\n"))
    assert found["train_type"] == level


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 2}, "comment": "for 8 GPUs", "description": "stage 2"}'),
        ("a.yaml", f"{TRL}gradient_checkpointing: unsloth\n"),
    ],
)
def test_a_comment_and_a_word_of_unsloth_are_no_mistakes(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert [each for each in lint_paths([tmp_path / name]).findings if each.level == "error"] == []


@pytest.mark.parametrize(
    ("value", "fix"), [("true", "`zero_allow_untested_optimizer`"), ('"for the large runs"', "remove it")]
)
def test_a_key_is_not_taken_for_one_that_cannot_have_its_value(value: str, fix: str, tmp_path: Path) -> None:
    text = f'{{"zero_optimization": {{"stage": 2}}, "zero_allow_untested_optimizers": {value}}}'
    found = [each for each in lint(tmp_path, a__json=text) if each.rule == "unknown-deepspeed-key"]
    assert [each.fix for each in found] == [fix]


@pytest.mark.parametrize(("flag", "level"), [("", "warning"), (" --use_vllm true", "note")])
def test_an_allocator_that_vllm_may_refuse_is_not_told_to_be_exported(flag: str, level: str, tmp_path: Path) -> None:
    script = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    script += f"accelerate launch train.py --output_dir out --bf16 true{flag}\n"
    assert levels(lint(tmp_path, a__sh=script))["PYTORCH_CUDA_ALLOC_CONF"] == level


@pytest.mark.parametrize(("beside", "is_lost"), [("return_remaining_strings=True", True), ("", False)])
def test_an_argument_is_lost_where_all_scripts_drop_what_they_do_not_know(
    beside: str, is_lost: bool, tmp_path: Path
) -> None:
    parse = "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses({})\n"
    (tmp_path / "train.py").write_text(parse.format(beside))
    (tmp_path / "other.py").write_text(parse.format("return_remaining_strings=True"))
    command = "torchrun train.py --output_dir out --bf16 true --warmup_ratio 0.1\n"
    (found,) = [each for each in lint(tmp_path, a__sh=command) if each.key == "warmup_ratio"]
    assert ("drops it without a word" in found.message) == is_lost


def test_requirements_that_windows_wrote_are_read(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("dependencies:\n  - transformers==4.42.3\n", encoding="utf-16")
    assert pinned_below(tmp_path, "transformers", "5.15.0") == "transformers ==4.42.3"


def test_code_of_an_older_swift_needs_its_names(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("ms-swift\n")
    (tmp_path / "plugin.py").write_text("from swift.llm import TrainArguments\n")
    assert levels(lint(tmp_path, a__sh=f"{SWIFT} --train_type lora\n"))["train_type"] == "note"


BRANCHES = """CMD=()
if [ -z "$GPUS" ]; then
  CMD+=(--num_gpus=4)
  CMD+=(--master_port 1)
{else_}
  CMD+=(--include=localhost:0)
fi
deepspeed "${{CMD[@]}}" train.py --bf16
"""


@pytest.mark.parametrize(("else_", "rules"), [("else", []), ("fi; if true; then", ["include-with-count"])])
def test_words_of_two_branches_are_not_on_one_command_line(else_: str, rules: list[str], tmp_path: Path) -> None:
    findings = lint(tmp_path, a__sh=BRANCHES.format(else_=else_.replace("; ", "\n")))
    assert [each.rule for each in findings if each.rule == "include-with-count"] == rules


@pytest.mark.parametrize(("options", "is_said"), [("$SRUN_ARGS", False), ("--kill-on-bad-exit=1", True)])
def test_the_options_of_srun_may_be_in_a_variable(options: str, is_said: bool, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun {options} torchrun --nnodes=2 train.py\n"
    assert ("launcher-per-gpu" in {each.rule for each in lint(tmp_path, a__sbatch=text)}) == is_said


@pytest.mark.parametrize(
    ("module", "level"), [("p.add_argument('--local-rank')\n", None), ("p.add_argument('--lr')\n", "note")]
)
def test_the_parser_of_a_launched_script_may_be_in_its_project(module: str, level: str | None, tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "arguments.py").write_text(f"p = argparse.ArgumentParser()\n{module}p.parse_args()\n")
    (tmp_path / "train.py").write_text("from megatron import initialize\ninitialize()\n")
    findings = lint(tmp_path, a__sh="python -m torch.distributed.launch --nproc_per_node 8 train.py\n")
    assert levels(findings) == ({} if level is None else {"--local-rank": level})


@pytest.mark.parametrize(("source", "rules"), [("import hydra\n", []), ("import yaml\n", ["wrong-deepspeed-type"])])
def test_hydra_reads_an_exponent_without_a_dot_as_a_number(source: str, rules: list[str], tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text(source)
    text = "train_batch_size: 8\nzero_optimization:\n  stage: 2\n  reduce_bucket_size: 5e8\n"
    assert [each.rule for each in lint(tmp_path, ds__yaml=text) if each.level == "error"] == rules


@pytest.mark.parametrize(("mark", "level"), [(None, "error"), (".gitignore", "note"), ("LICENSE", "note")])
def test_a_copy_of_a_project_without_its_history_may_run_an_older_version(
    mark: str | None, level: str, tmp_path: Path
) -> None:
    if mark:
        (tmp_path / mark).touch()
    (tmp_path / "recipes").mkdir()
    assert levels(lint(tmp_path / "recipes", a__yaml=f"{TRL}warmup_ratio: 0.1\n"))["warmup_ratio"] == level


def test_a_word_that_a_job_replaces_has_no_wrong_type(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: CONFIG_HOST_NUM\nnum_processes: 8\n"
    assert not levels(lint(tmp_path, a__yaml=text))


@pytest.mark.parametrize(("pin", "level"), [("accelerate==0.33.0", "note"), ("accelerate", "warning"), ("", "warning")])
def test_a_key_that_accelerate_took_for_another_is_ignored_since_a_version(
    pin: str, level: str, tmp_path: Path
) -> None:
    if pin:
        (tmp_path / "requirements.txt").write_text(f"{pin}\n")
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
    assert levels(lint(tmp_path, a__yaml=text))["fsdp_config.fsdp_backward_prefetch_policy"] == level


def test_settings_that_a_script_takes_by_name_are_not_those_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("# like LLaMA-Factory\nconfig['cutoff_len'], config.get('finetuning_type')\n")
    text = f"{FACTORY}cutoff_len: 512\neval_strategy: epoch\n"
    assert {each.level for each in lint(tmp_path, a__yaml=text)} <= {"note"}


def test_a_script_that_is_named_after_a_launcher_is_none() -> None:
    assert read_script('bash -c "run/torchrun-script.sh 16 a"\ntorchrun train.py --bf16\n').launches[0].line == 2


def test_a_comment_between_continued_lines_is_what_ends_a_command(tmp_path: Path) -> None:
    (finding,) = lint(tmp_path, a__sh="torchrun x.py \\\n    --seed 1 \\\n#    --bf16 \\\n    --fp16 true\n")
    assert (finding.rule, "no comment between" in finding.fix) == ("lost-line", True)


def test_a_fix_for_an_older_version_says_from_which_one_on_it_is_right(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers==4.49.0\n")
    fixes = {each.key: each.fix for each in lint(tmp_path, a__yaml=f"{TRL}warmup_ratio: 0.1\n")}
    assert fixes["warmup_ratio"].startswith("from transformers 5.15.0 on: `warmup_steps: 0.1`")


def test_a_deepspeed_json_with_a_key_of_accelerate_is_deepspeeds() -> None:
    assert detect_kind({"zero_optimization": {"stage": 2}, "distributed_type": "DEEPSPEED"}) == "deepspeed"


def test_a_setting_that_axolotl_dropped_and_that_is_off_changes_nothing(tmp_path: Path) -> None:
    text = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\ndatasets: []\nflash_attn_fuse_qkv: "
    for value, level in (("true", "warning"), ("false", "note")):
        assert levels(lint(tmp_path, a__yaml=f"{text}{value}\n"))["flash_attn_fuse_qkv"] == level


def test_the_number_for_a_text_is_one_in_yaml_too(tmp_path: Path) -> None:
    text = "optimizer: {type: AdamW, params: {lr: 6e-5}}\nzero_optimization: {stage: 2}\ntrain_batch_size: 8\n"
    fixes = [each.fix for each in lint(tmp_path, ds__yaml=text) if each.rule == "wrong-deepspeed-type"]
    assert fixes == ["`6.0e-05`, without quotes"]


@pytest.mark.parametrize(
    ("model", "layer", "is_said"),
    [
        ("meta-llama/Llama-3.1-8B", "Qwen2DecoderLayer", True),
        ("/data/Qwen2.5-1.5B", "LlamaDecoderLayer", True),
        ("Qwen/Qwen3-8B", "Qwen3DecoderLayer", False),
        ("me/fine-tune", "LlamaDecoderLayer", False),
        ("me/fine-tune", "LlamaDecoderLayer,LlamaBlock", True),  # of no model
        ("me/fine-tune", "MyBlock", False),
    ],
)
def test_a_layer_class_is_that_of_the_model_that_the_command_names(
    model: str, layer: str, is_said: bool, tmp_path: Path
) -> None:
    words = f"--model_name_or_path {model} --output_dir o --bf16 true"
    text = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: {layer}\n"
    (tmp_path / "f.yaml").write_text(text)
    for command in (
        f"accelerate launch --config_file f.yaml train.py {words}\n",
        f"torchrun train.py {words} --fsdp full_shard --fsdp_transformer_layer_cls_to_wrap {layer}\n",
    ):
        rules = {each.rule for each in lint(tmp_path, a__sh=command)}
        assert ("layer-class-of-another-model" in rules) == is_said


def test_a_yaml_of_braces_is_a_json_by_another_name(tmp_path: Path) -> None:
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}'
    assert "wrong-deepspeed-type" not in {each.rule for each in lint(tmp_path, ds__yaml=text)}


def test_deepspeeds_configuration_is_known_without_a_zero_block_and_inside_of_a_scripts_own() -> None:
    blocks = {"optimizer": {"type": "Adam", "params": {}}, "fp16": {"enabled": True}}
    assert detect_kind({"train_batch_size": 8, **blocks}) == "deepspeed"
    assert detect_kind({"deepspeed_config": {"zero_optimization": {"stage": 2}, **blocks}}) is None
    assert detect_kind({"fsdp": {"sharding_strategy": "FULL_SHARD"}, **blocks}) is None  # that of nobody
    assert detect_kind({"fsdp": {}, "train_batch_size": 8, "gradient_accumulation_steps": 1, **blocks}) == "deepspeed"


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ('"dtype": "bf16"', '`"bf16": {"enabled"'),
        ('"zero_optimization": {"stage": 2, "offload_param": false}', "remove it: "),
    ],
)
def test_what_means_nothing_in_its_place_is_removed(setting: str, fix: str, tmp_path: Path) -> None:
    rest = "" if "zero_optimization" in setting else '"zero_optimization": {"stage": 2}, '
    text = f'{{{rest}"train_batch_size": 8, {setting}}}'
    assert any(each.fix.startswith(fix) for each in lint(tmp_path, ds__json=text))


@pytest.mark.parametrize(("source", "is_said"), [("Trainer(model)\n", True), ("SFTTrainer(peft_config=lora)\n", False)])
def test_adapters_are_gathered_from_stage_3_without_its_flag(source: str, is_said: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text(source)
    findings = lint(tmp_path, ds__json='{"zero_optimization": {"stage": 3}, "train_batch_size": 8}')
    assert ("stage-3-without-gather" in {each.rule for each in findings}) == is_said


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("base_model: a/b\nmicro_batch_size: 1\nsequence_len: 8\nwandb_watch: false\n", '`"false"`, in quotes'),
        (f"{FACTORY}model_type: qwen2\n", "remove it, or the version that has it"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_backward_prefetch_policy: a}\n", "remove it"),
    ],
)  # fmt: skip
def test_what_has_no_other_name_is_removed_and_a_word_is_quoted(text: str, fix: str, tmp_path: Path) -> None:
    assert fix in {each.fix for each in lint(tmp_path, a__yaml=text)}


def test_hydra_reads_an_exponent_and_a_blank_behind_a_backslash_loses_what_was_assigned(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "train.py").write_text("import hydra\nTrainer()\n")
    text = "per_device_train_batch_size: 1\nlearning_rate: 1e-5\noutput_dir: out\n"
    assert "learning_rate" not in levels(lint(tmp_path, a__yaml=text))
    found = lint(tmp_path, a__sh="HF_HOME=x \\ \nNPROC_PER_NODE=8 \\\nswift sft --model a/b --max_length 8\n")
    assert any("its variables do not reach" in each.message for each in found if each.rule == "lost-line")


def test_what_a_script_wrote_about_a_model_is_no_file_of_axolotl() -> None:
    answers = '{"base_model": "a/b", "adapter": "out/last", %s: [{}]}'
    assert [read_text(answers % key, "a.json").kind for key in ('"questions"', '"datasets"')] == [None, "axolotl"]


@pytest.mark.parametrize("named", ["$ROOT/ds.json", '"${1:-ds.json}"', "$(pwd)/ds.json", "$OUT/ds.json"])
def test_a_file_that_a_variable_names_is_read(named: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}')
    words = "--bf16 true --output_dir o --gradient_accumulation_steps 4"
    findings = lint(tmp_path, a__sh=f"DS={named}\ntorchrun x.py --deepspeed $DS {words}\n")
    is_read = named[:4] != "$OUT"  # which the run may have written
    assert ("differs-from-json" in {each.rule for each in findings}) == is_read


def test_a_key_that_the_command_overrides_is_not_the_files(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: 127.0.0.1\n")
    for words, is_said in (("--machine_rank $R", True), ("--main_process_ip $HEAD --machine_rank $R", False)):
        findings = lint(tmp_path, a__sh=f"accelerate launch --config_file c.yaml {words} x.py --lr 1\n")
        assert ("head-is-localhost" in {each.rule for each in findings}) == is_said


def test_a_lost_log_is_a_warning_and_the_options_behind_it_an_error(tmp_path: Path) -> None:
    findings = lint(tmp_path, a__sh="torchrun x.py \\\n  --seed 1\n2>&1 | tee log\n  --bf16\n")
    assert levels(findings) == {"2>&1": "warning", "--bf16": "error"}


@pytest.mark.parametrize(
    ("name", "text", "key", "said"),
    [
        ("a.json", '{"zero_optimization": {"stage": 2}, "checkpointing": {"profile": true}}', "checkpointing",
         "warning: remove it"),
        ("a.yaml", f"{AXOLOTL}datasets: [{{path: x, type: json}}]\n", "datasets", "error: the form of the rows"),
        ("a.yaml", f"{AXOLOTL}datasets: []\nppo: {{rate: null}}\n", "ppo", "note: remove it"),
        ("a.yaml", f"{AXOLOTL}datasets: []\ntokenizer_type: llama\n", "tokenizer_type", "warning: remove it, or the"),
    ],
)  # fmt: skip
def test_a_fix_is_no_guess_by_a_name_alone(name: str, text: str, key: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (finding,) = [each for each in lint_paths([tmp_path / name]).findings if each.key == key]
    assert f"{finding.level}: {finding.fix}".startswith(said)


def test_words_behind_a_script_that_is_not_here_are_not_those_of_swift(tmp_path: Path) -> None:
    command = "torchrun tune.py --train_type lora --check_dataset_strategy none --output_dir o --bf16 true"
    assert "unknown-swift-setting" not in {each.rule for each in lint(tmp_path, a__sh=f"{command}\n")}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve a/b\ntorchrun train.py\n", ["vllm serve"]),
        ("vllm serve a/b & PID=$!\ntorchrun train.py\n", []),
        ("python -m verl.trainer.main_ppo --algorithm grpo data.x=1\n", ["--algorithm"]),
        ("python -m verl.trainer.main_ppo data.x=1 | tee --append log\n", []),
        ("torchrun -m scripts/train\n", ["-m scripts/train"]),
        ("torchrun -m scripts/train.py\n", ["scripts/train.py"]),  # once
        ("torchrun train.py --master_port 99999\n", []),  # the script's own
    ],
)
def test_what_a_command_ends_or_starts_is_read_to_its_end(command: str, said: list[str], tmp_path: Path) -> None:
    rules = ("shell-slip", "server-in-front", "no-such-port")
    assert [each.key for each in lint(tmp_path, a__sh=command) if each.rule in rules] == said
