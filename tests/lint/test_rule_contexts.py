"""Files that have a rule's condition, where its statement needs another version or setting: what lint says of each."""

import json
from pathlib import Path

import pytest

from toolkit.lint.check import fixed_text, lint_paths
from toolkit.lint.findings import Finding

DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n"
WITH_JSON = f"{DEEPSPEED}  deepspeed_config_file: ds.json\n"
FSDP2 = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
TRAINER = "output_dir: out\nper_device_train_batch_size: 1\nbf16: true\nsave_strategy: steps\n"
TRL = "model_name_or_path: a/b\ndataset_name: c/d\n"
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\ndatasets: [{path: x}]\n"
TWO_NODES = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
GROUPS = "num_generations: 8\nper_device_train_batch_size: 1\n"
C10D = "--rdzv_backend c10d --rdzv_endpoint $HEAD:$PORT"
HF = "HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()\n"
SHARDED = "distributed_type: FSDP\nfsdp_config:\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
SHARDED_RUN = "accelerate launch --config_file a.yaml x.py --output_dir out --bf16 --do_train --save_strategy steps\n"
BEST = f"{TRAINER}load_best_model_at_end: true\n"
BY_NAME = "kwargs = {'load_best_model_at_end': config.get('load_best_model_at_end', True)}\n"
PARSE = "TrlParser((ModelConfig, SFTConfig)).parse_args_and_config"
RUN = "accelerate launch --num_processes 2"
FEW = "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 1\n"
TEXT = f"{TRAINER}learning_rate: 2e-5\n"
FACTORY = f"{TEXT}model_name_or_path: a/b\nflash_attn: true\nlora_rank: 8\ncutoff_len: 512\nmy_own: 1\n"
YAML = "HfArgumentParser((Mine, TrainingArguments)).parse_yaml_file(sys.argv[2])\n"
ON_NODES = "accelerate launch --config_file a.yaml --num_machines $N x.py\n"
OWN_LOOP = "engine = deepspeed.initialize(args)\n"


def zero(**more: object) -> str:
    return json.dumps({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}} | more)


SFT = "SFTTrainer(args=SFTConfig(output_dir='o')).train()\n"
LOOP = "Accelerator()\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
LOOP_RUN = "accelerate launch --use_deepspeed --deepspeed_config_file ds.json x.py\n"
OPTIMIZER = zero(optimizer={"type": "AdamW", "params": {"lr": 1}})
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
VERL, LOGS = "python -m verl.trainer.main_ppo", "#SBATCH --output=logs/o\n"
OFFLOAD = zero(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})


def found(folder: Path, rule: str, files: dict[str, str]) -> list[Finding]:
    """Lint the first of a project's files, and return the findings of a rule."""
    (folder / ".git").mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return [each for each in lint_paths([folder / next(iter(files))]).findings if each.rule == rule]


@pytest.mark.parametrize(
    ("rule", "file", "old", "new"),
    [
        ("fsdp2-strategy-ignored", f"{FSDP2}  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "accelerate==1.5.2", "1.6.0"),
        ("fsdp2-reshard-word", f"{FSDP2}  fsdp_reshard_after_forward: FULL_SHARD\n", "accelerate==1.5.2", "1.6.0"),
        ("refused-by-accelerate", f"{FSDP2}  fsdp_state_dict_type: LOCAL_STATE_DICT\n", "accelerate==1.6.0", "1.8.0"),
        ("fsdp1-key-of-trainer", f"{TRAINER}fsdp: true\nfsdp_config: {{use_orig_params: true}}\n",
         "transformers==5.9.0", "5.10.0"),
        ("refused-by-trainer", f"{TRAINER}fsdp: hybrid_shard\n", "transformers==5.9.0", "5.10.0"),
        ("removed-training-argument", f"{TRAINER}evaluation_strategy: steps\n", "transformers==4.50.3", "4.51.0"),
        ("removed-training-argument", f"{TRAINER}split_batches: true\n", "transformers==4.50.3", "4.56.1"),
        ("removed-training-argument", f"{TRAINER}dispatch_batches: true\n", "transformers\ntokenizers==0.20.3",
         "0.21.0"),
        ("removed-training-argument", f"{TRAINER}use_ipex: true\n", "transformers==4.56.2", "4.57.0"),
        ("removed-training-argument", f"{TRAINER}sharded_ddp: simple\n", "transformers==4.34.0", "4.35.0"),
        ("unknown-trl-setting", f"{TRL}max_seq_length: 512\n", "trl==0.19.1", "0.20.0"),
        ("unknown-trl-setting", f"{TRL}vf_coef: 0.1\n", "trl==0.29.0", "1.16.0"),
        ("padding-free-ignored", f"{TRL}beta: 0.1\npadding_free: true\n", "trl==0.28.0", "0.29.0"),
        ("padding-free-refused", f"{TRL}packing: false\npadding_free: true\n", "trl==0.29.0", "1.0.0"),
        ("refused-by-trl", f"{TRL}num_generations: 8\nauto_find_batch_size: true\n", "trl==1.8.0", "1.9.0"),
        ("refused-by-deepspeed", zero(fp16={"enabled": True, "min_loss_scale": 0}), "deepspeed==0.19.2", "0.19.3"),
        ("refused-by-deepspeed", zero(fp16={"enabled": True, "loss_scale": -1}), "deepspeed==0.18.7", "0.18.8"),
    ],
)  # fmt: skip
def test_a_rule_holds_from_the_version_in_which_its_library_began(
    rule: str, file: str, old: str, new: str, tmp_path: Path
) -> None:
    name = "a.json" if file.startswith("{") else "a.yaml"
    before = found(tmp_path, rule, {name: file, "requirements.txt": old})
    library = old.partition("==")[0]
    after = found(tmp_path, rule, {name: file, "requirements.txt": f"{library}=={new}"})
    assert [each.level for each in before] == ["note"]
    assert [each.level != "note" for each in after] == [True]


@pytest.mark.parametrize(
    ("line", "key", "level"),
    [
        ("from transformers import is_torch_tpu_available\n", "evaluation_strategy", "note"),  # both left with 4.51
        ("from transformers import AutoModelWithLMHead\n", "evaluation_strategy", "warning"),  # that 4.57 still has
        ("from transformers import AutoModelWithLMHead\n", "no_cuda", "note"),
    ],
)
def test_an_import_excludes_the_versions_without_the_name(line: str, key: str, level: str, tmp_path: Path) -> None:
    files = {"a.yaml": f"{TRAINER}{key}: x\n", "x.py": f"{line}{HF}", "requirements.txt": "transformers\n"}
    assert [each.level for each in found(tmp_path, "removed-training-argument", files)] == [level]


def test_a_project_without_a_version_is_told_from_which_one_on_an_argument_is_refused(tmp_path: Path) -> None:
    files = {"a.yaml": f"{TRAINER}evaluation_strategy: steps\n", "x.py": "HfArgumentParser(TrainingArguments)\n"}
    findings = found(tmp_path, "removed-training-argument", files)
    expected = [("note", "if you run transformers 4.51.0 or newer: ")]
    assert [(each.level, each.fix.partition("`")[0]) for each in findings] == expected
    for pin in ("transformers", "transformers>=4.53"):
        files = {"a.sh": f"{RUN} no.py --bf16 --output_dir o --evaluation_strategy a\n", "requirements.txt": pin}
        (finding,) = found(tmp_path / pin, "removed-training-argument", files)
        assert ("older versions have it" in finding.message) == (pin == "transformers")


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        ("precision-owned-by-json", {"a.yaml": f"{DEEPSPEED}  deepspeed_config_file: none\nmixed_precision: bf16\n"}),
        ("sharded-final-save", {"a.yaml": f"{FSDP2}  fsdp_state_dict_type: SHARDED_STATE_DICT\n", "train.py":
                                'trainer.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")\n'}),
        ("refused-by-trainer", {"a.yaml": f"{TRAINER}load_best_model_at_end: true\nsave_strategy: steps\n", "train.py":
                                'kwargs["eval_strategy"] = "steps"\nTrainingArguments(**kwargs)\n'}),
        ("precision-owned-by-json", {"a.yaml": f"{DEEPSPEED}  deepspeed_config_file: null\nmixed_precision: bf16\n"}),
        ("key-owned-by-json", {"a.yaml": f"{DEEPSPEED}  deepspeed_config_file: none\n  zero_stage: 2\n"}),
        # without quotes or with them it is refused for another reason
        ("unquoted-no", {"a.yaml": f"{WITH_JSON}mixed_precision: no\n", "ds.json": zero()}),
        ("wrong-type", {"a.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\nfsdp_config: []\n"}),
        ("wrong-argument-type", {"a.yaml": f"{TRAINER}learning_rate: {{min: 0.1}}\n", "space.py":
                                 "@dataclass\nclass Space:\n    learning_rate: dict = None\n"}),
        ("batch-arithmetic-of-pair", {"a.yaml": 'distributed_type: "NO"\nnum_processes: 3\ndeepspeed_config:\n'
                                      "  deepspeed_config_file: ds.json\n",
                                      "ds.json": zero(train_batch_size=8, train_micro_batch_size_per_gpu=8)}),
        ("more-processes-than-gpus", {"a.sh": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 a.py && \\\n"
                                      "torchrun --nproc_per_node 8 b.py\n"}),
        ("starts-one-process", {"a.sh": "mpirun -np 4 accelerate launch --config_file a.yaml x.py --seed 1\n",
                                "a.yaml": "distributed_type: MULTI_CPU\nnum_processes: 4\n"}),
        ("uneven-processes", {"a.yaml": 'distributed_type: "NO"\nnum_processes: 4\ngpu_ids: "0,1"\n'}),
        ("uneven-processes", {"a.yaml": f"{DEEPSPEED}  deepspeed_inclusion_filter: a@b\nnum_machines: 3\n"}),
        ("fsdp2-obsolete-key", {"a.yaml": f"{FSDP2}  fsdp_sync_module_states: false\n"}),
        ("differs-from-json", {"a.yaml": f"{TRAINER}deepspeed: ds.json\nwarmup_steps: 0.03\n",
                               "ds.json": zero(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}})}),
        ("jit-checkpoint", {"a.sh": "torchrun --nproc_per_node 1 x.py --enable_jit_checkpoint --bf16 --do_train\n"}),
        ("deepspeed-without-launcher", {"a.sh": "python x.py --deepspeed ds.json --bf16 --do_train --output_dir o\n",
                                        "x.py": 'os.environ["RANK"] = "0"\nHfArgumentParser(TrainingArguments)\n'}),
        ("refused-by-axolotl", {"a.yaml": f"{AXOLOTL}rl: kto\nremove_unused_columns: false\n"}),
        ("refused-by-axolotl", {"a.yaml": f"{AXOLOTL}rl: kto\nskip_prepare_dataset: true\n"}),
        ("not-exported", {"a.sh": "OMP_NUM_THREADS=4\nenv OMP_NUM_THREADS=$OMP torchrun x.py\n"}),
        ("one-process-for-gpus", {"a.sh": "export CUDA_VISIBLE_DEVICES=0,1\n"
                                  "CUDA_VISIBLE_DEVICES=0 swift sft --model a --deepspeed zero2\n"}),
        ("more-processes-than-gpus", {"a.sh": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node $N x.py\n"}),
        ("more-processes-than-gpus", {"a.sh": "CUDA_VISIBLE_DEVICES=7 vllm serve & \\\n"
                                      "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 x.py\n"}),
        ("each-node-alone", {"a.sbatch": "#SBATCH --nodes=4\nsrun -w $NODE torchrun --nproc_per_node 8 x.py &\n"}),
        ("each-node-alone", {"a.sbatch": '#SBATCH --nodes=4\nsrun bash -c "\n  R=\\"\n  --nnodes=\\$N \\\n  \\"\n'
                             '  torchrun \\${R} x.py\n"\n'}),
        ("each-node-alone", {"a.sbatch": '#SBATCH --nodes=4\nsrun bash -c "torchrun \\${RUN_ARGS} x.py"\n'}),
        ("head-is-localhost", {"a.sbatch": f"{TWO_NODES}N=${{SLURM_JOB_NODELIST:-localhost}}\n"
                               f"srun torchrun --nnodes 2 {C10D} x.py\n"}),
        ("head-is-localhost", {"a.sh": "torchrun --nnodes 2 --node_rank 0 --master_addr localhost x.py &\n"
                               "torchrun --nnodes 2 --node_rank 1 --master_addr localhost x.py\n"}),
        ("head-is-localhost", {"a.sh": "if $ONE; then\n  A=localhost\n  N=1\nelse\n  N=2\nfi\n"
                               "torchrun --nnodes $N --node_rank $R --master_addr $A x.py\n"}),
        ("refused-value", {"a.sh": "PORT=YOUR_PORT\ntorchrun --nproc_per_node 2 --master_port $PORT x.py\n"}),
        ("refused-nested-key", {"a.json": zero(activation_checkpointing={"_comment": "of a loop"})}),
        ("folder-made-too-late", {"a.sbatch": "#SBATCH --output=logs/o\nmkdir -p logs\ntorchrun x.py\n",
                                  "README.md": "First `mkdir -p logs out`.\n"}),
        ("max-steps-and-epochs", {"a.yaml": f"{TRAINER}max_steps: 300\nnum_train_epochs: 1000\n"}),
        ("refused-by-llama-factory", {"a.sh": "llamafactory-cli train $C output_dir=o\n"}),
        ("unknown-word", {"a.yaml": f"{TRL}loss_type: sigmoid\nmax_length: 9\nmax_completion_length: 9\n"}),
        ("blank-in-assignment", {"a.sh": "torchrun x.py\ngpu = 8 bs 1:\n"}),
        ("wrong-argument-type", {"a.sh": "torchrun x.py --output_dir o --bf16 --fsdp \"\" --seed 1\n", "x.py": HF}),
        ("refused-by-grpo", {"a.yaml": f"{TRL}num_generations: 1\nmax_completion_length: 9\n",
                             "x.py": "from trl.experimental.minillm import MiniLLMConfig\n"}),
        ("unknown-word", {"a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
                          "  zero_stage: 2\n  offload_optimizer_device: None\n"}),
        ("checkpointing-block-unread", {"ds.json": zero(train_batch_size="auto", activation_checkpointing={
            "partition_activations": True}), "setup.py": "", "x.py": f"model.gradient_checkpointing_enable()\n{HF}"}),
        ("each-node-alone", {"a.sbatch": "#SBATCH --nodes=4\n"
                             'srun bash -c "torchrun \\\\\n  --nnodes 4 \\\\\n  x.py"\n'}),
        ("refused-by-llama-factory", {"a.yaml": f"defaults: [_self_]\n{FACTORY}eval_strategy: steps\n",
                                      "x.py": "import hydra\n"}),
        ("no-such-port", {"a.sh": "torchrun --standalone --nproc_per_node 2 --master_port 123456 x.py\n"}),
        ("only-first-node", {"a.sbatch": f"{TWO_NODES}export DLTS_HOSTFILE=hosts\npython deepy.py train.py x.yml\n"}),
        ("folder-made-too-late", {"a.sbatch": "#SBATCH --output=logs/o\nmkdir -p logs\ntorchrun x.py\n",
                                  "setup.sh": "mkdir -p logs\n"}),
        ("launcher-per-gpu", {"a.sbatch": "#SBATCH --ntasks-per-node=8\n"
                              f"srun torchrun --nproc_per_node 1 --nnodes 8 {C10D} x.py\n"}),
        ("no-head", {"a.sh": "accelerate launch --use_deepspeed --num_machines 2 x.py\n"}),
        ("fixed-rendezvous-id", {"a.sbatch": f"{TWO_NODES}#SBATCH --requeue\nPORT=$((20000 + RANDOM % 999))\n"
                                 f"srun torchrun --nnodes 2 {C10D} x.py\n"}),
        ("refused-by-llama-factory", {"a.sh": "USE_RAY=1 CUDA_VISIBLE_DEVICES=0 llamafactory-cli train --stage sft "
                                      "--deepspeed z.json\n"}),
        ("deepspeed-file-no-json", {"a.yaml": f"{TRAINER}deepspeed: z.json\n"}),
        ("byte-order-mark", {"a.json": zero()}),
        ("number-as-text", {"a.sh": f"{RUN} x.py a.yaml\n", "a.yaml": TEXT, "b.py": "AdamW(lr=c['learning_rate'])\n",
                            "x.py": "c = yaml.safe_load(f)\nAdamW(lr=float(c['learning_rate']))\n"}),
        ("unknown-word", {"a.yaml": f"{TRL}attn_implementation: kernels-community/flash-attn@main:f\n"}),
        ("unknown-word", {"a.sh": "torchrun x.py --loss_type grpo --output_dir o --bf16 --learning_rate 1e-5\n",
                          "x.py": "from trl import GRPOTrainer\nHfArgumentParser(GRPOConfig)\nGRPOTrainer()\n"}),
        ("unknown-word", {"a.yaml": f"{TRL}attn_implementation: mine\n", "x.py": "register('mine', f)\n"}),
        ("unknown-llama-factory-setting", {"a.sh": "llamafactory-cli train --stage sft --num_train_epochs3 --bf16\n"}),
        ("not-exported", {"a.sh": "WANDB_API_KEY=$2\nexport WANDB_DISABLED=true\ntorchrun x.py\n"}),
        ("number-as-text", {"a.yaml": TEXT, "x.py": "c = yaml.safe_load(f)\nAdamW(lr=float(c.learning_rate))\n"}),
        ("number-as-text", {"a.yaml": TEXT, "x.py": "def number(x):\n    if isinstance(x, str) and RE.match(x):\n"
                            "        return float(x)\nc = walk(yaml.safe_load(f), number)\n"}),
        ("number-as-text", {"a.yaml": TEXT, "x.py": "L.add_implicit_resolver(TAG, RE, '-+0')\nyaml.load(f, L)\n"}),
        ("unknown-llama-factory-setting", {"a.sh": f"{RUN} x.py --config a.yaml\n", "a.yaml": FACTORY, "x.py": YAML}),
        ("unknown-trl-setting", {"a.sh": f"{RUN} x.py --config a.yaml\n", "a.yaml": f"{TEXT}dataset_mixer_list: a\n",
                                 "x.py": YAML}),  # of open-instruct
        ("uneven-processes", {"a.sh": ON_NODES,
                              "a.yaml": "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\n"}),
        ("refused-by-trainer", {"a.yaml": BEST, "x.py": f'{BY_NAME}kwargs["eval_strategy"] = "steps"\n'}),
        ("refused-by-trainer", {"a.yaml": BEST, "x.py": f'{BY_NAME}kwargs |= {{"evaluation_strategy": "steps"}}\n'}),
        ("refused-by-trainer", {"a.yaml": BEST, "x.py": f"{BY_NAME}SFTConfig(eval_strategy='steps', **kwargs)\n"}),
        ("refused-by-trainer", {"a.yaml": f"{TRL}eval_strategy: epoch\nload_best_model_at_end: true\n",
                                "x.py": f"{BY_NAME}SFTConfig(save_strategy='epoch', **kwargs)\n"}),
        ("refused-by-grpo", {"a.yaml": f"{TRL}{GROUPS}", "x.py": "from unsloth import FastLanguageModel\n"}),
        ("refused-by-grpo", {"a.yaml": f"{TRL}max_completion_length: 9\nper_device_train_batch_size: 1\n",
                             "x.py": "class A:\n    max_completion_length: int\nTrlParser([A])\n"}),
        ("removed-training-argument", {"a.yaml": f"{TRAINER}evaluation_strategy: steps\n",
                                       "x.py": "class A:\n    evaluation_strategy: str\nTrlParser([A])\n"}),
        ("sharded-final-save", {"a.sh": SHARDED_RUN, "x.py": f"{HF}plugin.set_state_dict_type('FULL_STATE_DICT')\n",
                                "a.yaml": SHARDED}),
        ("sharded-final-save", {"a.yaml": SHARDED, "x.py": f"{HF}with FSDP.state_dict_type(\n    model, "
                                "StateDictType.FULL_STATE_DICT\n): trainer.save_model()\n"}),
        ("sharded-final-save", {"a.sh": f"{SHARDED_RUN}", "x.py": f"from ends import finish\n{HF}", "a.yaml": SHARDED,
                                "ends.py": "plugin.state_dict_type = StateDictType.FULL_STATE_DICT\n"}),
        ("flag-with-value", {"a.sh": 'L="accelerate launch \\\r\n --tee 3 \\\r\n"\r\nbash -c "$L x.py"\r\n'}),
        ("more-processes-than-gpus", {"a.sh": "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file a.yaml x.py\n",
                                      "a.yaml": "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 4\n"}),
        ("refused-by-llama-factory", {"b/a.yaml": f"{FACTORY}finetuning_type: lora\nstage: sft\ndo_train: true\n"
                                      "dataset: mine\n", "b/data/dataset_info.json": '{"mine": {}}',
                                      "data/dataset_info.json": '{"other": {}}'}),
        ("unknown-trl-setting", {"a.sh": "torchrun x.py --config b.yaml\n", "b.yaml": f"{TRL}max_length: 9\nmy: 1\n",
                                 "x.py": "from mine import SFTConfig\nTrlParser(SFTConfig).parse_args_and_config()\n"}),
        ("unknown-script-option", {"a.sh": "torchrun x.py --config b.yaml\n", "x.py": "@dataclass\nclass Own:\n"
                                   "    a: int\nTrlParser((Own, TrainingArguments)).parse_args_and_config()\n"}),
        ("unknown-trl-setting", {"a.sh": "torchrun x.py --model_name_or_path m --dataset d --max_length 5 --do_train "
                                 "--output_dir o\n"}),
        ("checkpointing-block-unread", {"a.yaml": f"{TRAINER}gradient_checkpointing: true\ndeepspeed: a.json\n",
                                        "a.json": zero(activation_checkpointing={"cpu_checkpointing": True})}),
        ("offload-without-cpu-adam", {"a.json": zero(zero_force_ds_cpu_optimizer=False, zero_optimization={
            "stage": 2, "offload_optimizer": {"device": "cpu"}}), "x.py": "optimizer = DeepSpeedCPUAdam(weights)\n"}),
        ("local-rank-with-dash", {"a.sh": "python -m torch.distributed.launch x.py\n",
                                  "x.py": "initialize_megatron(extra_args_provider=mine)\n"}),
        ("sharded-final-save", {"a.sh": f"{SHARDED_RUN}", "a.yaml": SHARDED,
                                "x.py": f"{HF}state = accelerator.get_state_dict(model)\n"}),
        ("deepspeed-file-missing", {"a.sh": "cd src\ntorchrun x.py --deepspeed ds.json --bf16 --output_dir o\n",
                                    "src/ds.json": zero()}),
        ("deepspeed-file-missing", {"a.sh": 'C=/tmp/c.yaml\ncat > "$C" << EOF\nnum_machines: 1\nEOF\n'
                                    'accelerate launch --config_file "$C" x.py\n'}),
    ],
)  # fmt: skip
def test_a_setting_that_makes_a_rule_moot_is_looked_at(rule: str, files: dict[str, str], tmp_path: Path) -> None:
    assert found(tmp_path, rule, files) == []


@pytest.mark.parametrize(
    ("rule", "files", "part"),
    [
        ("block-not-in-force", {"a.sh": "accelerate launch --zero_stage 2 x.py\n"}, "the default file"),
        ("signal-to-batch-shell", {"a.sbatch": f"{TWO_NODES}#SBATCH --signal=B:USR1@90\nsource traps.sh\n"
                                   f"srun torchrun --nnodes 2 {C10D} x.py\n"}, "sourced file"),
        ("not-exported", {"a.sbatch": "#SBATCH --nodes=1\nCUDA_VISIBLE_DEVICES=0\ntorchrun x.py\n"}, "already"),
        ("each-node-alone", {"a.sbatch": f"{TWO_NODES}srun hostname\ntorchrun --nproc_per_node 8 x.py\n"},
         "the first node alone"),
        ("variable-behind-command", {"a.sh": "torchrun x.py HF_HOME=a\n", "x.py": "import hydra\n"}, "argument"),
        ("byte-order-mark", {"a.json": "\ufeff" + zero()}, "the Trainer"),
        ("node-rank-missing", {"a.sh": "export A=localhost\naccelerate launch --num_machines $N --main_process_ip $A "
                               "x.py\n"}, "rank 0"),
        ("unknown-nested-key", {"a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
                                "deepspeed_config: {zero_stage: 2, bf16: {enabled: true}}\n"}, "no effect"),
        ("removed-training-argument", {"a.yaml": f"{TRAINER}evaluation_strategy: steps\n",
                                       "x.py": "from transformers import AdamW\n",
                                       "requirements.txt": "transformers==4.40.0\n"}, "==4.40.0"),
        ("starts-one-process", {"single_gpu.yaml": "distributed_type: 'NO'\nnum_processes: 8\n"}, "one process"),
        ("unknown-word", {"a.sh": "llamafactory-cli train --stage dpo --template qwen3 --pref_loss nca_pair "
                          "--sequence_parallel_size 8\n"}, "nca_pair"),
        ("unknown-nested-key", {"a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
                                "  zero_stage: 2\n  train_batch_size: auto\n"}, "no effect"),
        ("deepspeed-file-missing", {"a.sh": "accelerate launch --config_file no/a.yaml x.py\n"}, "no/a.yaml"),
        ("not-auto", {"a.sh": "torchrun x.py --deepspeed a.json --bf16 --do_train\n",
                      "a.json": zero(gradient_clipping=0.1),
                      "x.py": f"class A(TrainingArguments):\n    max_grad_norm: float = 0.1\n{HF}"}, "max_grad_norm"),
        ("deepspeed-file-missing", {"a.sh": f"{RUN} x.py --bf16 --output_dir o --fsdp_config no/f.json\n",
                                    "f.json": '{"fsdp_offload_params": true, "min_num_params": 0}'}, "but at "),
        ("shell-slip", {"a.sbatch": '#!/bin/bash\n#SBATCH --nodes=1\necho "on $SLURM_NODENAME"\ntorchrun x.py\n'},
         "it is empty"),
        ("unknown-axolotl-setting", {"a.yaml": f"{AXOLOTL}report_to: none\n"}, "has no `report_to`"),
        ("unknown-word", {"a.json": zero(optimizer={"type": "FusedAdam"}),
                          "x.py": "deepspeed.initialize(model=m, optimizer=own)\n"}, "FusedAdam is not"),
        ("max-steps-and-epochs", {"a.yaml": f"{TRAINER}num_train_epochs: 3\nmax_steps: 9  # overrides the epochs\n"},
         "max_steps wins"),
        ("removed-training-argument", {"a.yaml": f"{TRAINER}evaluation_strategy: steps\n",
                                       "requirements.txt": "transformers=4.50.3=py_0\n"}, "transformers ==4.50.3"),
        ("unknown-variable", {"a.sh": "export NCCL_TIMEOUT=1800\ntorchrun x.py\n", "x.py": "Trainer\n"}, "no library"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_from_the_file_is_a_note_that_says_so(
    rule: str, files: dict[str, str], part: str, tmp_path: Path
) -> None:
    assert [(each.level, part in each.message) for each in found(tmp_path, rule, files)] == [("note", True)]


@pytest.mark.parametrize(
    ("rule", "files", "level"),
    [
        ("unknown-nested-key", {"a.yaml": f"{DEEPSPEED}  zero_stage: 2\n  gradient_clip: 1\n", "x.py": SFT}, "note"),
        ("unknown-nested-key", {"a.yaml": f"{DEEPSPEED}  zero_stage: 2\n  gradient_clip: 2\n", "x.py": SFT}, "error"),
        ("unknown-nested-key", {"a.yaml": f"{DEEPSPEED}  zero_stage: 2\n  gradient_clip: 1\n",
                                "x.py": f"{SFT}max_grad_norm = 2\n"}, "error"),
        ("unknown-nested-key", {"a.yaml": f"{FSDP2}  fsdp_transformer_cls_names_to_wrap: A,B\n"}, "warning"),
        ("unknown-deepspeed-key", {"a.json": zero(**GATHER, zero_optimization={"stage": 3, **GATHER})}, "note"),
        ("unknown-deepspeed-key", {"a.json": zero(**GATHER, zero_optimization={"stage": 3})}, "warning"),
        ("not-exported", {"a.sh": "WANDB_MODE=online\ntorchrun x.py\n"}, "note"),
        ("not-exported", {"a.sh": "WANDB_MODE=offline\ntorchrun x.py\n"}, "warning"),
        ("not-exported", {"a.sh": "NCCL_IB_DISABLE=0\ntorchrun x.py\n"}, "note"),
        ("not-exported", {"a.sh": "NCCL_IB_DISABLE=1\ntorchrun x.py\n"}, "warning"),
        ("deepspeed-file-missing", {"a.yaml": WITH_JSON.replace("ds.", "/no/ds."), "ds.json": zero()}, "note"),
        ("offload-param-below-stage-3", {"a.json": OFFLOAD, "requirements.txt": "deepspeed==0.11.1"}, "warning"),
        ("offload-param-below-stage-3", {"a.json": OFFLOAD, "requirements.txt": "deepspeed==0.9.5"}, "note"),
        ("launcher-per-gpu", {"a.sbatch": "#SBATCH -N2 --ntasks-per-node=4\nsrun deepspeed x.py\n"}, "error"),
        ("launcher-per-gpu", {"a.sbatch": "#SBATCH -N2 # --ntasks-per-node=4\nsrun deepspeed x.py\n"}, None),
        ("optimizer-of-json", {"a.sh": LOOP_RUN, "ds.json": OPTIMIZER, "x.py": LOOP}, "error"),
        ("optimizer-of-json", {"a.sh": LOOP_RUN, "ds.json": OPTIMIZER, "x.py": f"{LOOP}DummyOptim(weights)\n"}, None),
        ("optimizer-of-json", {"a.sh": LOOP_RUN, "ds.json": zero(), "x.py": LOOP}, None),
        ("optimizer-of-json", {"a.sh": LOOP_RUN.replace(" ds.", " ${HERE}/ds."), "ds.json": OPTIMIZER, "x.py": LOOP},
         "error"),
        ("unknown-swift-setting", {"a.sh": "swift sft --model m --check_dataset_strategy none\n"}, "error"),
        ("unknown-swift-setting", {"a.sh": 'S="${S:-/a/bin/swift}"\n"${S}" sft --model m --sft_type full\n'}, "error"),
        ("include-with-count", {"a.sh": 'RUN=(deepspeed)\n"${RUN[@]}" --num_gpus 1 --include a:1 x.py\n'}, "error"),
        ("include-with-count", {"a.sh": 'R=deepspeed\n$R --num_gpus 1 --include a:1 x.py\ntorchrun x.py\n'}, None),
        ("shell-slip", {"a.sh": f"{VERL} data.seed=1 \\\n +trainer.nnodes=2\n"}, "error"),
        ("shell-slip", {"a.sh": f"{VERL} ++trainer.nnodes=2 \\\n +trainer.log_freq=2\n"}, None),
        ("shell-slip", {"a.sh": f"{VERL} --config-name mine +trainer.nnodes=2\n"}, None),
        ("shell-slip", {"a.sh": f"{VERL} +trainer.nnodes=2\n", "verl/trainer/main_ppo.py": ""}, "note"),
        ("folder-made-too-late", {"a.sbatch": f'{LOGS}cd "$P"\nmkdir -p "${{P}}/logs"\ntorchrun x.py\n'}, "warning"),
        ("folder-made-too-late", {"a.sbatch": f'{LOGS}mkdir -p "${{P}}/logs"\ntorchrun x.py\n'}, None),
        ("shell-slip", {"a.sh": 'D=f"{root}/data"\ntorchrun x.py --data "$D"\n'}, "error"),
        ("shell-slip", {"a.sh": 'D=f"${root}/data"\nE=F"{a"\ntorchrun x.py --data "$D"\n'}, None),
    ],
)  # fmt: skip
def test_the_level_of_a_finding_says_what_becomes_of_the_run(
    rule: str, files: dict[str, str], level: str | None, tmp_path: Path
) -> None:
    assert [each.level for each in found(tmp_path, rule, files)] == ([level] if level else [])


@pytest.mark.parametrize(
    ("files", "is_known"),
    [({"a.sh": SHARDED_RUN, "a.yaml": SHARDED, "x.py": HF}, True), ({"a.yaml": SHARDED, "x.py": HF}, False)],
)
def test_a_sharded_save_is_said_without_an_unless_where_the_script_is_known(
    files: dict[str, str], is_known: bool, tmp_path: Path
) -> None:
    (finding,) = found(tmp_path, "sharded-final-save", files)
    assert (finding.level, "unless" in finding.message) == (("warning", False) if is_known else ("note", True))


@pytest.mark.parametrize(
    "script",
    [
        f"{HF}report = dict(eval_strategy='steps')\n",  # its parser passes the file on as it is
        f'{BY_NAME}kwargs["eval_steps"] = 10\nif kwargs["eval_strategy"] == "no": pass\n',
    ],
)
def test_a_best_model_without_an_evaluation_is_refused_where_no_code_sets_one(script: str, tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "refused-by-trainer", {"a.yaml": BEST, "x.py": script})
    assert finding.key == "load_best_model_at_end"


@pytest.mark.parametrize(
    ("script", "words", "level"),
    [
        (f"{PARSE}(return_remaining_strings=True)", "drops it", "warning"),
        (f"{PARSE}()", "raises", "error"),
        (f"args = {PARSE}(return_remaining_strings=True)\nprint(args.warmup_ratio)", "raises", "error"),
        ("HfArgumentParser(SFTConfig).parse_yaml_file(name, allow_extra_keys=True)", "drops it", "note"),
        ("P.parse_dict(c, allow_extra_keys=True)\nTrlParser(SFTConfig).parse_args_and_config()", "and raises", "error"),
        ("HfArgumentParser(SFTConfig).parse_yaml_file(name)", "raises", "error"),
    ],
)  # fmt: skip
def test_a_parser_that_keeps_the_rest_drops_what_is_gone(script: str, words: str, level: str, tmp_path: Path) -> None:
    files = {
        "a.yaml": f"{TRL}bf16: true\nwarmup_ratio: 0.1\n",
        "x.py": script,
        "requirements.txt": "transformers>=5.20",
    }
    (finding,) = found(tmp_path, "removed-training-argument", files)
    assert (finding.level, words in finding.message) == (level, True)


def test_auto_is_an_error_where_a_script_names_the_json_of_a_loop_and_files_behind_a_cd_are_read(
    tmp_path: Path,
) -> None:
    files = {"ds.json": zero(), "x.py": OWN_LOOP, "setup.py": ""}
    assert [each.level for each in found(tmp_path, "auto-is-kept", files)] == ["warning"]
    command = "torchrun x.py --deepspeed ds.json\n"
    assert [each.level for each in found(tmp_path, "auto-is-kept", {**files, "run.sh": command})] == ["error"]
    command = f"cd src\n{command[:-1]} --gradient_accumulation_steps 4 --output_dir o --bf16\n"
    inner = {"src/ds.json": zero(gradient_accumulation_steps=8)}
    assert [each.key for each in found(tmp_path / "b", "differs-from-json", {"a.sh": command, **inner})] != []


def test_a_byte_order_mark_is_an_error_where_a_trainers_file_names_the_json(tmp_path: Path) -> None:
    findings = found(
        tmp_path, "byte-order-mark", {"a.yaml": f"{TRAINER}deepspeed: a.json\n", "a.json": "\ufeff" + zero()}
    )
    assert [each.level for each in findings] == ["error"]


@pytest.mark.parametrize(
    ("rule", "files", "fix"),
    [
        ("starts-one-process", {"a.yaml": 'distributed_type: "NO"\nnum_processes: 4\n'}, "MULTI_GPU"),
        ("uneven-processes", {"a.yaml": FEW}, "a multiple of 2"),
        ("uneven-processes", {"a.sh": ON_NODES, "a.yaml": FEW},
         "a multiple of 2"),
        ("number-as-text", {"a.sh": f"{RUN} x.py --config a.yaml\n", "a.yaml": FACTORY, "x.py": YAML}, "2.0e-5"),
        ("number-as-text", {"a.yaml": TEXT, "x.py": f"if isinstance(x, str): print(float(loss))\n{YAML}"}, "2.0e-5"),
        ("fsdp1-reshard-ignored", {"a.yaml": "distributed_type: FSDP\nfsdp_config: {reshard_after_forward: false}\n"},
         "fsdp_version: 2"),
        ("loading-without-sync", {"a.yaml": f"{FSDP2}  fsdp_sync_module_states: false\n"}, "remove it"),
        ("precision-owned-by-json", {"a.yaml": f"{WITH_JSON}mixed_precision: bf16\n",
                                     "ds.json": zero(bf16={"enabled": "auto"})}, "--mixed_precision bf16"),
        ("precision-owned-by-json", {"a.yaml": f"{WITH_JSON}mixed_precision: bf16\n",
                                     "ds.json": zero(fp16={"enabled": True})}, "fp16 from the JSON"),
        ("key-owned-by-json", {"a.yaml": f"{WITH_JSON}  gradient_accumulation_steps: 8\n", "ds.json": zero()},
         "the JSON's gradient_accumulation_steps"),
        ("never-taken", {"a.yaml": 'distributed_type: MULTI_GPU\nenable_cpu_affinity: "yes"\n'}, "affinity`"),
        ("batch-arithmetic", {"a.json": zero(train_batch_size=10, train_micro_batch_size_per_gpu=4), "x.py": OWN_LOOP,
                              "setup.py": ""}, "a multiple"),
        ("visible-devices-ignored", {"a.sh": "CUDA_VISIBLE_DEVICES=3 deepspeed --num_gpus 8 x.py\n"},
         "no CUDA_VISIBLE_DEVICES, for 8"),
        ("refused-by-trainer", {"a.yaml": f"{TRAINER}logging_steps: 0\n"}, "a number above 0"),
        ("sharded-save-only-model", {"a.yaml": f"{TRAINER}save_only_model: true\nfsdp: true\n"
                                     "fsdp_config: {state_dict_type: SHARDED_STATE_DICT}\n"}, "FULL_STATE_DICT"),
        ("unknown-launcher-option", {"a.sh": f"{RUN} --fsdp_backward_prefetch_policy NO_PREFETCH x.py\n"}, "prefetch`"),
        ("lost-line", {"a.sh": "torchrun x.py --bf16 | tee log\n\n  trainer.nnodes=1 \\\n"}, "move it"),
        ("lost-line", {"a.sh": "torchrun x.py \\\n\n  --bf16\n"}, "end the line before"),
        ("more-processes-than-gpus", {"a.sh": f"CUDA_VISIBLE_DEVICES=0 {RUN} x.py\n"}, "`--num_processes 1`"),
        ("more-processes-than-gpus", {"a.sh": f"CUDA_VISIBLE_DEVICES=0 {RUN} --multi_gpu x.py\n"}, "as many of both"),
        ("wrong-argument-type", {"a.sh": "llamafactory-cli train --stage sft --num_train_epochs3 --bf16\n"},
         "`--num_train_epochs 3`"),
        ("wrong-argument-type", {"a.sh": "torchrun x.py --seed42 --output_dir o --bf16\n", "x.py": HF}, "`--seed 42`"),
        ("unknown-word", {"a.yaml": f"{TRL}attn_implementation: flash-attention-3\n"}, "`flash_attention_3`"),
        ("lost-line", {"a.sh": "python x.py \\\n  # why\n  --bf16 \\\n  --logging_steps 1\n"}, "no comment"),
        ("unknown-script-option", {"a.sh": "torchrun x.py --validation_steps 3\n",
                                   "x.py": "import argparse\np = argparse.ArgumentParser()\n"
                                   "p.add_argument('--validation_step')\np.parse_args()\n"}, "`--validation_step`"),
        ("unknown-deepspeed-key", {"a.json": zero(stage3_gather_16bit_weights_on_model_save=False)}, "remove it"),
        ("refused-by-axolotl", {"a.yaml": f"{AXOLOTL}flash_attn_rms_norm: true\n"}, "remove it"),
        ("lost-line", {"a.sh": "torchrun x.py --bf16 \\\n\n  2>&1 | tee log\n"}, "backslash"),
        ("auto-is-kept", {"a.json": zero(gradient_accumulation_steps=2, train_batch_size=4),
                          "x.py": OWN_LOOP, "setup.py": ""}, "a number"),
        ("refused-by-grpo", {"a.sh": "python x.py --per_device_train_batch_size 2 --gradient_accumulation_steps 1 "
                             "--num_generations 4 --model_name_or_path a --output_dir o\n"}, "multiple of 2"),
        ("unknown-word", {"a.yaml": f"{TRL}loss_type: kto_pair\n"}, "one of these"),
        ("shell-slip", {"a.sh": "accelerate envexport A=b\naccelerate launch x.py\n"}, "accelerate launch"),
        ("refused-by-accelerate", {"a.yaml": "distributed_type: MULTI_GPU\nnum_processes: 0\n"}, "remove it"),
        ("lost-line", {"a.sh": "torchrun x.py \\ # why\n  --bf16\n"}, "end the line before"),
        ("lost-line", {"a.sh": "torchrun x.py \\\n  --seed 1\n  # why\n  --bf16\n"}, "of the line before it"),
        ("refused-nested-key", {"a.json": zero(zero_optimization={"stage": 1, "cpu_offload_params": True})},
         "remove it"),
        ("unknown-word", {"a.yaml": "distributed_type: TPU\nnum_processes: 8\n"}, "`XLA`"),
        ("unknown-axolotl-setting", {"a.yaml": f"{AXOLOTL}datasets_test: []\nval_set_size: 0.1\n"}, "`test_datasets`"),
        ("unknown-fsdp-config-key", {"a.yaml": f"{TRAINER}fsdp: true\nfsdp_config: {{fsdp_offload_params: false}}\n"},
         "remove it"),
        ("unknown-nested-key", {"a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
                                "  zero_optimization: {stage: 1}\n"}, "`zero_stage: 1`"),
        ("deepspeed-file-no-json", {"a.yaml": f"{AXOLOTL}deepspeed: acc.yaml\n", "acc.yaml": DEEPSPEED},
         "accelerate launch"),
        ("flag-with-value", {"a.sh": "accelerate launch --num_processes 2 python src/train.py --bf16\n"},
         "remove `python`"),
        ("unknown-word", {"a.yaml": f"{TEXT}model_name_or_path: Qwen/Qwen3-8B\ncutoff_len: 8\ntemplate: sharegpt\n"},
         "`qwen3`"),
        ("unknown-word", {"a.yaml": f"{TEXT}model_name_or_path: mine\ncutoff_len: 8\ntemplate: sharegpt\n"},
         "remove it: the tokenizer's own"),
        ("unknown-word", {"a.sh": "torchrun x.py --optim adamm --bf16 --output_dir o\n"}, "`adamw_torch`"),
        ("unknown-word", {"a.json": zero(scheduler={"type": "CosineWarmup", "params": {"warmup_min_lr": 0}})},
         "`WarmupCosineLR`, with total_num_steps"),
        ("unknown-word", {"a.yaml": f"{TRAINER}fsdp: true\nfsdp_config: {{reshard_after_forward: shard_grad_op}}\n"},
         "`false`"),
        ("fsdp1-reshard-ignored", {"a.yaml": f"{FSDP2[:-2]}1\n  fsdp_reshard_after_forward: treu\n"}, "remove it"),
        ("wrong-type", {"a.yaml": f"{FSDP2}  fsdp_offload_params: flase\n"}, "`false`"),
        ("script-missing", {"a.sh": "torchrun ppo_train.py --seed 1\n", "train_ppo.py": ""}, "`train_ppo.py`"),
        ("unknown-trl-setting", {"a.sh": "torchrun x.py --config b.yaml\n", "x.py": "import trl\n@dataclass\nclass Own:"
                                 "\n    size: int = 3\na = TrlParser((Own, trl.SFTConfig)).parse_args_and_config()\n",
                                 "b.yaml": f"{TRL}max_length: 9\nsize: 4\nsizes: 4\n"}, "remove it"),
        ("unknown-word", {"a.json": zero(optimizer={"type": "FusedAdam", "params": {"lr": 1}})}, "`AdamW`"),
        ("deepspeed-file-missing", {"a.sh": f"{RUN} --config_file src/zero2.yml x.py\n", "src/zero2.yaml": DEEPSPEED},
         "`src/zero2.yaml`"),
        ("refused-by-llama-factory", {"a.sh": "llamafactory-cli export b.yaml\n", "b.yaml": f"{TEXT}cutoff_len: 8\n"
                                      "model_name_or_path: a\nfinetuning_type: lora\n"}, "`export_dir`"),
        ("unknown-swift-setting", {"a.sh": "swift sft --model m --sft_type full\n", "g.py": "import swift.llm\n"},
         "`train_type`"),
        ("unknown-axolotl-setting", {"a.yaml": f"{AXOLOTL}adapter: lora\nbnb_4bit_compute_dtype: bfloat16\n"},
         "remove it"),
        ("launcher-per-gpu", {"a.sbatch": "#SBATCH --ntasks-per-node=8\nsrun bash -c 'if true; then all_reduce_perf; "
                              "else torchrun x.py; fi'\n"}, "`srun --ntasks-per-node=1` for torchrun alone"),
        ("deepspeed-file-missing", {"a.sh": "cd src\naccelerate launch --config_file b.yaml x.py\n", "src/x.py": "",
                                    "b.yaml": FSDP2}, "`../b.yaml`"),
        ("deepspeed-file-missing", {"a.yaml": WITH_JSON.replace("ds.json", "configs/ds.json"), "ds.json": zero()},
         "`ds.json`"),
    ],
)  # fmt: skip
def test_a_fix_names_what_may_be_meant_and_leads_to_no_other_error(
    rule: str, files: dict[str, str], fix: str, tmp_path: Path
) -> None:
    assert [fix in each.fix for each in found(tmp_path, rule, files)] == [True]


@pytest.mark.parametrize(
    "files",
    [
        {"a.yaml": f"{WITH_JSON}  gradient_accumulation_steps: 8\n", "ds.json": zero()},  # the number would be lost
        {"a.yaml": f"{WITH_JSON}mixed_precision: no\n", "ds.json": zero()},
        {"a.yaml": f"{TRL}beta: 0.1\nuse_peft: true\nprecompute_ref_log_probs: true\n"},  # saves time in more epochs
        {"a.json": zero(train_batch_size=10, train_micro_batch_size_per_gpu=4), "x.py": OWN_LOOP, "setup.py": ""},
    ],
)
def test_what_decides_something_is_not_fixed_by_itself(files: dict[str, str], tmp_path: Path) -> None:
    name = next(iter(files))
    found(tmp_path, "", files)
    assert fixed_text(tmp_path / name) == files[name]


ONE_OPTION = "p = ArgumentParser()\np.add_argument('--lr')\np.parse_args()\n"
BETAS = "torchrun x.py --deepspeed ds.json --bf16 true --output_dir o --adam_beta1 0.9 --adam_beta2 0.95"
OF_SFT = "TrlParser((SFTConfig,)).parse_args_and_config()\n"
SIZES = " ".join(f"actor_rollout_ref.{each}_micro_batch_size_per_gpu=1" for each in ("actor.ppo", "rollout.log_prob"))
PART = AXOLOTL.replace("base_model: a/b", "sequence_len: 8")
ZERO_BLOCK = f"{DEEPSPEED}  zero_stage: 2\n  zero_optimization: {{overlap_comm: 1, stage: "
EMPTY = "compute_environment: LOCAL_MACHINE\ndistributed_type:\nnum_processes: 1\n"
TO_ARGV = "d = yaml.safe_load(f)\nextra = []\nfor k, v in d.items():\n    extra += ['--' + k, str(v)]\n"
TO_ARGV += "sys.argv = sys.argv[:1] + extra\nHfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
RATIO = {"a.yaml": f"{TRAINER}warmup_ratio: 0.1\n", "x.py": HF}
REWARD = {"examples/x.sh": "python ../src/train_bash.py --stage rm --dataset d --finetuning_type lora "
          "--do_train --output_dir o --bf16\n",
          "data/dataset_info.json": '{"d": {"file_name": "d.json"}}', "README.md": "LLaMA-Factory"}  # fmt: skip
EVAL = "CUDA_VISIBLE_DEVICES=0 "
SWIFT = {"run/a.sh": "swift sft --model m --evaluation_strategy steps\n"}
WITHOUT_AUTO = f"\ufeff{json.dumps({'zero_optimization': {'stage': 2}, 'train_micro_batch_size_per_gpu': 1})}"
RECIPE = "model_name_or_path: q\nstage: sft\ndo_train: true\nfinetuning_type: lora\ntemplate: qwen\ndataset: d\n"
CLIPPED = {"a.sh": f"{RUN} --config_file a.yaml run_clm.py --output_dir o --bf16 --do_train --optim sgd\n",
           "a.yaml": f"{DEEPSPEED}  gradient_clipping: 0.5\n  zero_stage: 2\n", "run_clm.py": HF}  # fmt: skip
CLS = '{"fsdp": true, "fsdp_config": {"NAME": "QwenDecoderLayer"}, "output_dir": "o", "save_strategy": "no"}'
BLOCK = f"{DEEPSPEED}  zero_stage: 3\n  zero3_save_16bit_model: true\n"
READS_RECIPES = "from trl import GRPOConfig, ModelConfig\na = TrlParser((GRPOConfig, ModelConfig))\n"
READS_RECIPES += "a.parse_args_and_config()\n"
OWN_RECIPE = {"a.yaml": f"{TRL}num_generations: 8\nmy_datasets: all\n", "grpo.py": READS_RECIPES}
SUBMIT = "M=logs\nmkdir -p $M\ncat > j.sh <<E\n#SBATCH --output=$M/a.out\ntorchrun x.py\nE\nsbatch j.sh\n"


@pytest.mark.parametrize(
    ("rule", "files", "said"),
    [
        ("refused-by-accelerate", {"a.yaml": EMPTY}, []),
        ("refused-by-accelerate", {"a.yaml": EMPTY.replace("distributed_type:\n", "")}, ["error: `distributed_type`"]),
        ("starts-one-process", {"a.yaml": EMPTY.replace("1", "2")}, ["error: `distributed_type: MULTI_GPU`"]),
        ("number-as-text", {"a.yaml": TEXT, "x.py": TO_ARGV}, []),
        ("number-as-text", {"a.yaml": TEXT, "x.py": TO_ARGV.replace("sys.argv =", "print").replace("_args_", "_dict_")},
         ["warning: `2.0e-5`"]),
        ("removed-training-argument", RATIO | {"pyproject.toml": '["transformers (==4.46.3)"]'}, ["note: from"]),
        ("removed-training-argument", RATIO | {"pyproject.toml": '["transformers[torch] (>=4,<5)"]'}, ["note: from"]),
        ("removed-training-argument", RATIO | {"pyproject.toml": 'transformers = {version = "^4.4"}'}, ["note: from"]),
        ("removed-training-argument", RATIO | {"setup.py": "'transformers'", "poetry.lock": 'name = "transformers"\n'
                                               'version = "5.20.0"\nx = ["transformers (==4.3)"]\n'}, ["warning: `w"]),
        ("removed-training-argument", RATIO | {"pyproject.toml": '["transformers (>=5.20)"]'}, ["warning: `w"]),
        ("refused-by-llama-factory", REWARD, ["error: `\"ranking\""]),
        ("refused-by-llama-factory", REWARD | {"src/glmtuner/hparams/finetuning_args.py": ""}, ["note: `\"ranking\""]),
        ("unknown-script-option", {"a.sh": f"{RUN} x.py --s2d $N --fast\n", "x.py": "p = ArgumentParser()\n"
                                   "p.add_argument('--limit_2d')\np.parse_args()\n"},
         ["error: the script's own name", "error: remove it"]),
        ("shell-slip", {"a.sh": f"{RUN} x.py\nllava (a=b), args: ()\n"}, ["error: quotes around it"]),
        ("shell-slip", {"a.sh": f"if true; then\n{RUN} x.py\ndone\n"}, ["error: close what is open"]),
        ("lost-line", {"a.sh": f"{RUN} x.py\n{EVAL}python e.py \\\ns=a \\ \nm=m\n"}, ["runs m=m as a command"]),
        ("lost-line", {"a.sh": f"{EVAL}\\ \nNCCL_DEBUG=INFO \\\n{RUN} x.py\n"}, ["its variables do not reach"]),
        ("unknown-swift-setting", SWIFT, ["error: `eval_strategy`"]),
        ("unknown-swift-setting", SWIFT | {"run/setup.sh": "pip install \\\n  transformers==4.37.2 \\\n  timm\n"},
         ["note: from transformers 4.51.0"]),
        ("wrong-deepspeed-type", {"a.json": zero(activation_checkpointing={"number_checkpoints": False})}, ["note: a"]),
        ("wrong-deepspeed-type", {"a.json": zero(activation_checkpointing={"number_checkpoints": True})}, ["warning:"]),
        ("byte-order-mark", {"a.yaml": f"{RECIPE}deepspeed: z.json\n", "z.json": WITHOUT_AUTO}, ["error: save it"]),
        ("byte-order-mark", {"a.yaml": WITH_JSON, "ds.json": WITHOUT_AUTO}, ["note: save it"]),
        ("yaml-not-auto", CLIPPED, ["error: remove it"]),
        ("yaml-not-auto", CLIPPED | {"run_clm.py": f"class Mine(TrainingArguments):\n    max_grad_norm: int = 1\n{HF}"},
         ["warning: remove it"]),
        ("unknown-fsdp-config-key", {"a.json": CLS.replace("NAME", "transformer_cls_names_to_wrap")},
         ["warning: `transformer_layer_cls_to_wrap`"]),
        ("unknown-fsdp-config-key", {"a.json": CLS.replace("NAME", "transformer_layer_cls_to_wrap")}, []),
        ("unknown-word", {"a.yaml": RECIPE.replace(": q\n", ": openai/gpt-oss-20b\n").replace("qwen", "gpt")},
         ["warning: `gpt_oss`"]),
        ("deepspeed-file-no-json", {"a.sh": f"{RUN} --config_file ds.json x.py\n", "ds.json": zero()},
         ["error: `--use_deepspeed --deepspeed_config_file`"]),
        ("deepspeed-file-no-json", {"a.sh": f"{RUN} --config_file a.yaml x.py\n", "a.yaml": WITH_JSON}, []),
        ("folder-made-too-late", {"a.sh": SUBMIT.replace("$M", "logs")}, []),
        ("folder-made-too-late", {"a.sh": "#SBATCH --output=logs/a.out\nmkdir -p logs\ntorchrun x.py\n"}, ["warning"]),
        ("unknown-parameter", {"a.json": zero(scheduler={"type": "WarmupCosineLR", "params": {
            "total_num_steps": 9, "cos_min_lr": 3e-5}})}, ["error: `cos_min_ratio`, a fraction"]),
        ("unknown-llama-factory-setting", {"a.yaml": f"{RECIPE}system: You are.\n"}, ["error: `default_system`"]),
        ("script-missing", {"a.sh": f"{RUN} src/train.py --lr 1\n", "src/api.py": ""}, []),
        ("script-missing", {"a.sh": f"{RUN} src/grpo_rec.py --lr 1\n", "src/grpo.py": ""}, []),
        ("script-missing", {"a.sh": f"{RUN} src/grpo.py --lr 1\n", "src/grpo_image.py": ""},
         ["warning: a path that exists: `src/grpo_image.py`"]),
        ("not-exported", {"a.sh": f"WANDB_MODE=online\n{RUN} x.py\n"}, ["note: `export"]),
        ("not-exported", {"a.sh": f"WANDB_MODE=offline\n{RUN} x.py\n"}, ["warning: `export"]),
        ("unknown-nested-key", {"a.yaml": f"{BLOCK}  stage3_gather_16bit_weights_on_model_save: true\n"}, ["note: "]),
        ("unknown-nested-key", {"a.yaml": f"{BLOCK}  steps_per_print: 2000\n"}, ["note: remove it"]),
        ("deepspeed-file-missing", {"a.yaml": WITH_JSON.replace("ds.json", "/x/c/ds.json"), "ds.json": zero()},
         ["note: `ds.json`"]),
        ("wrong-deepspeed-type", {"a.yaml": "# of a cluster\n" + zero(optimizer={"type": "AdamW", "params": {"lr": 0}})
                                  .replace('"lr": 0', '"lr": 1e-5')}, []),
        ("launcher-per-gpu", {"a.sbatch": "#SBATCH -N2 --ntasks-per-node=4 # A\nsrun deepspeed x.py\n"}, ["error"]),
        ("launcher-per-gpu", {"a.sbatch": "#SBATCH --exclusive -N2 # --ntasks-per-node=4\nsrun deepspeed x.py\n"}, []),
        ("unknown-trl-setting", OWN_RECIPE | {"setup.py": "'trl @ git+https://github.com/huggingface/trl.git@main'"},
         ["warning: if you run trl 0.19.0 or newer: the script's"]),
        ("unknown-trl-setting", OWN_RECIPE | {"setup.py": "'trl>=1.0'"}, ["warning: the script's own"]),
        ("unknown-trl-setting", OWN_RECIPE | {"setup.py": "'trl==0.18.0'"}, ["note: from trl 0.19.0 on"]),
        ("unknown-trl-setting", OWN_RECIPE | {"sft.py": f"class A:\n    my_datasets: str = 'a'\n{READS_RECIPES}"}, []),
        ("unknown-trl-setting", OWN_RECIPE | {"sft.py": "cfg = yaml.safe_load(f)\nprint(cfg['my_datasets'])\n"}, []),
        ("shell-slip", {"a.sh": f'D=f"{{root}}/data"\n{RUN} x.py --data $D\n'}, ["error: `\"${NAME}\"`"]),
        ("shell-slip", {"a.sh": f'D="${{root}}/data"\n{RUN} x.py --data $D\n'}, []),
        ("unknown-deepspeed-key", {"a.json": zero(mixed_precision="fp16", fp16={"enabled": "true"})}, ["note"]),
        ("unknown-deepspeed-key", {"a.json": zero(mixed_precision="fp16")}, ["error"]),
        ("refused-value", {"a.sh": "H=\nP=\ntorchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint=$H:$P x.py\n"},
         ["error"]),
        ("unknown-script-option", {"a.sh": "deepspeed --launcher OpenMPI x.py --lr 1\n", "x.py": ONE_OPTION}, []),
        ("unknown-script-option", {"a.sh": "deepspeed x.py --lr 1\n", "x.py": ONE_OPTION}, ["deepspeed passes"]),
        ("unknown-script-option", {"a.sh": f"{RUN} x.py --mine 1\n", "x.py": f"from trl import SFTConfig\n{OF_SFT}"},
         ["refuses it"]),
        ("unknown-script-option", {"a.sh": f"{RUN} x.py --mine 1\n", "x.py": f"from trl import SFTConfig\n{OF_SFT}",
                                   "trl/trainer/sft_config.py": "class SFTConfig:\n    mine: int\n"}, []),
        ("each-node-alone", {"a.sbatch": f"{TWO_NODES}srun deepspeed --num_gpus=4 x.py\n"}, ["no hostfile"]),
        ("each-node-alone", {"a.sbatch": f"{TWO_NODES}srun deepspeed --hostfile=h x.py\n"}, []),
        ("shell-slip", {"a.sbatch": "#!/bin/sh\n#SBATCH --container-image=${IMAGE}\ntorchrun x.py\n"}, ["stays as"]),
        ("no-batch-size", {"a.sh": "torchrun x.py --deepspeed a.json --bf16 true --output_dir o --x $Y\n",
                           "a.json": '{"zero_optimization": {"stage": 2}}'}, ["warning"]),
        ("more-processes-than-gpus", {"a.sh": "CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 x.py\n",
                                      "x.py": "Trainer(model)\n"}, ["error"]),
        ("unknown-axolotl-setting", {"a.yaml": f"{AXOLOTL}adapter: qlora\nbnb_4bit_compute_dtype: bfloat16\n"},
         ["note"]),
        ("differs-from-json", {"a/b/c/d/e/f/a.sh": "torchrun x.py --deepspeed c/ds.json --output_dir o --bf16 true\n",
                               "c/ds.json": zero(bf16={"enabled": False})}, ["True here, False"]),
        ("lost-line", {"a.sbatch": "#SBATCH --nodes=1\npython x.py \\ \n  --device auto\n"}, ["runs --device"]),
        ("not-exported", {"a.sh": f"WANDB_MODE=${{WANDB_MODE:-offline}}\n{RUN} x.py\n"}, ["warning"]),
        ("differs-from-json", {"a.sh": "export CUDA_VISIBLE_DEVICES=5,7\ndeepspeed x.py --deepspeed ds.json "
                               "--output_dir o --bf16 true --per_device_train_batch_size 4 "
                               "--gradient_accumulation_steps 4\n",
                               "ds.json": zero(train_batch_size=16)}, ["4 x 4 x 2 here, 16"]),
        ("wrong-argument-type", {"a.yaml": f"{TRAINER}warmup_steps: 0.1\n", "setup.py": "'transformers==4.39.3'"},
         ["error: `warmup_ratio: 0.1`"]),
        ("wrong-argument-type", {"a.yaml": f"{FACTORY}warmup_steps: 0.1  # llamafactory\n",
                                 "setup.py": "'transformers==4.39.3'",
                                 "src/llmtuner/hparams/a.py": "a['lora_rank'], a['cutoff_len']\n"}, ["error"]),
        ("wrong-argument-type", {"a.yaml": f"{TRAINER}warmup_steps: 0.1\n", "setup.py": "'transformers'"}, []),
        ("refused-by-verl", {"a.sh": f"{VERL} {SIZES} actor_rollout_ref.actor.use_kl_loss=True\n"},
         ["ref.log_prob_micro", "critic.ppo_micro"]),
        ("folder-made-too-late", {"a.sh": '#SBATCH --output=logs/a\nif [ -z "$SLURM_JOB_ID" ]; then\nmkdir -p logs; '
                                  'sbatch "$0"; exit\nfi\ntorchrun x.py\n'}, []),
        ("folder-made-too-late", {"a.sbatch": '#SBATCH --output=logs/a\nmkdir -p logs; sbatch "$0"\ntorchrun x.py\n',
                                  "eval/README.md": "sbatch --export=A=1 \\\n  a.sbatch\n"}, ["warning"]),
        ("blank-in-assignment", {"a.sh": f"a = 1\n{RUN} x.py\n"}, ["warning"]),
        ("blank-in-assignment", {"a.sh": f"a = 1\n{RUN} x.py --lr $a\n"}, ["error"]),
        ("not-exported", {"a.sh": f"C=(env\n  OMP_NUM_THREADS=1\n  torchrun x.py)\n{RUN} x.py\n"}, []),
        ("unknown-variable", {"a.sh": f"export ACCELERATE_USE_KT=false\n{RUN} x.py\n"}, []),
        ("only-first-node", {"a.sbatch": f"{TWO_NODES}python -c 'import x'\n"}, []),
        ("only-first-node", {"a.sbatch": f"{TWO_NODES}python x.py\n", "x.py": "subprocess.run(['srun'])\n"}, ["note"]),
        ("only-first-node", {"a.sbatch": f"{TWO_NODES}python x.py\n", "x.py": "train()\n"}, ["warning"]),
        ("unknown-nested-key", {"a.yaml": f"{ZERO_BLOCK}3}}\n"}, ["warning"]),
        ("flag-with-value", {"a.yaml": "jobs:\n- command:\n  - nvidia-smi\n  - |\n    bash -c '\n    accelerate launch "
                             "\\\n         x.py --lr 1\n    '\n"}, []),
        ("not-exported", {"a.sh": "MASTER_PORT=${MASTER_PORT:-1}\nMASTER_PORT=$MASTER_PORT swift sft --model a\n"}, []),
        ("more-processes-than-gpus", {"a.sh": "export A=/m && CUDA_VISIBLE_DEVICES=1 python e.py\n"
                                      "torchrun --nproc_per_node 4 x.py\n"}, []),
        ("more-processes-than-gpus", {"a.sh": "CUDA_VISIBLE_DEVICES=5,6,7 torchrun --nproc_per_node=${N:-4} x.py\n",
                                      "x.py": "Trainer()\n"}, ["warning"]),
        ("local-rank-with-dash", {"a.sh": "python -m torch.distributed.launch x.py\n", "y.py": "p.parse_known_args()\n",
                                  "x.py": ONE_OPTION.replace("--lr", "--local_rank")}, ["--local-rank"]),
        ("shell-slip", {"a.sh": "deepspeed x.py --seed 1 \\\n  --local_rank $LOCAL_RANK\n"}, ["empty in front of"]),
        ("shell-slip", {"a.sh": "LOCAL_RANK=0\ndeepspeed x.py --seed 1 --local_rank $LOCAL_RANK\n"}, []),
        ("blank-in-assignment", {"a.sh": f"{RUN} x.py\nllava (a=b), args: ()\nb = 2\n"}, []),
        ("unknown-script-option", {"a.sh": "cd /b/c\ntorchrun x.py --seed 1\n", "x.py": ONE_OPTION}, ["warning"]),
        ("deepspeed-file-missing", {"a.sh": "accelerate launch --config_file c/z.yaml x.py\n", "b/z.yml": "",
                                    "setup.py": ""}, ["warning: a path that exists: `b/z.yml` is there"]),
        ("deepspeed-file-missing", {"a.sh": f"{BETAS} --deepspeed c/z.json\n", "b/d/z.json": "{}", "setup.py": ""},
         ["warning: a path that exists: `b/d/z.json` is there"]),
        ("only-first-node", {"a.sbatch": f"{TWO_NODES}deepspeed x.py\n"}, ["warning: `--hostfile FILE`"]),
        ("only-first-node", {"a.sbatch": f"{TWO_NODES}deepspeed --hostfile h x.py\n"}, []),
        ("removed-training-argument", {
            "a.yaml": f"{TRL}evaluation_strategy: 'no'\n", "setup.py": "'transformers>=4.53,<4.54'",
            "x.py": "SFTConfig(evaluation_strategy=cfg.get('evaluation_strategy'))\n"}, ["error"]),
        ("option-behind-file", {"a.sh": "llamafactory-cli webchat a.yaml --port 1\n"}, ["`GRADIO_SERVER_PORT`"]),
        ("visible-devices-ignored", {"a.sh": "CUDA_VISIBLE_DEVICES=2,3 deepspeed --include localhost:0,1 x.py\n",
                                     "setup.py": "'deepspeed==0.12.6'"}, ["warning"]),
        ("shell-slip", {"a.sh": "torchrun --nnodes=1 --nproc_per_node 2 \\\n  -m a/b x\n"}, ["error: dots"]),
        ("shell-slip", {"a.sh": "torchrun --standalone x.py -m a/b\npython x.py -m a/b\n"}, []),
        ("shell-slip", {"a.sh": f"{VERL} --algorithm grpo\n"}, ["no option of Hydra"]),
        ("shell-slip", {"a.sh": f"{VERL} --config-name mine\n"}, []),
        ("refused-by-axolotl", {"a.yaml": f"{PART}adapter: qlora\n"}, ["note"]),
        ("not-auto", {"a.sh": f"{BETAS}\n", "ds.json": zero(
            optimizer={"type": "Adam", "params": {"betas": [0.9, 0.95]}})}, []),
        ("optimizer-of-json", {"a.sh": f"{BETAS} --learning_rate 1 --x $Y\n", "ds.json": zero(
            scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})}, ["", "error"]),
        ("unknown-word", {"a.json": zero(scheduler={"type": "cosine", "params": {"warmup_ratio": 0.1}})},
         ["error: remove it, and set `lr_scheduler_type`"]),
    ],
)  # fmt: skip
def test_what_is_said_fits_the_program_and_the_place(
    rule: str, files: dict[str, str], said: list[str], tmp_path: Path
) -> None:
    findings = found(tmp_path, rule, files)
    assert len(findings) == len(said), findings
    for each, part in zip(findings, said, strict=True):
        assert part in f"{each.message}\n{each.level}: {each.fix}"
