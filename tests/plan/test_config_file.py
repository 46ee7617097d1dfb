"""`toolkit plan --config FILE`: the job of a file of another tool or of ours, and flags that win."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG, ROOT

from toolkit.convert.programs import program_of
from toolkit.errors import ToolkitError
from toolkit.plan.config_file import configured_plan
from toolkit.plan.options import PlanOptions
from toolkit.versions import attention_names

FIXTURES = ROOT / "tests" / "fixtures"

AXOLOTL = """base_model: MODEL
datasets: [{path: rows.jsonl, type: chat_template}]
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
adapter: lora
lora_r: 8
gradient_checkpointing: true
deepspeed: {zero_optimization: {stage: 3}}
"""
QLORA = AXOLOTL.replace("adapter: lora", "adapter: qlora") + "load_in_4bit: true\n"
LLAMA_FACTORY = """model_name_or_path: MODEL
stage: sft
finetuning_type: lora
lora_rank: 8
template: qwen3
dataset: identity
cutoff_len: 512
per_device_train_batch_size: 2
enable_liger_kernel: true
"""
FACTORY_COMMAND = """M=MODEL
accelerate launch --config_file zero2.yaml --num_processes 2 src/train.py --stage sft --do_train --template qwen3 \\
  --model_name_or_path $M --dataset identity --finetuning_type lora --lora_rank 16 --cutoff_len ${LENGTH:-512} \\
  --per_device_train_batch_size 2 --quantization_bit 4
"""
OWN_SCRIPT = """deepspeed --num_gpus 4 train.py --model_name_or_path Qwen/Qwen3-8B --model_max_length 512 \\
 --lora_r 8 --bf16 True --per_device_train_batch_size 2 --gradient_checkpointing True --deepspeed zero3.json \\
 --optim adamw_torch --tune_head"""
TRL = """accelerate launch --config_file zero2.yaml --num_processes 4 sft.py --model_name_or_path MODEL
 --dataset_name trl-lib/Capybara --max_length 512 --per_device_train_batch_size 2"""
FULL_FACTORY, OFT = (LLAMA_FACTORY.replace(": lora", f": {kind}") for kind in ("full", "oft"))
OURS = "model_name_or_path: MODEL\nmax_seq_length: 512\nper_device_train_batch_size: 2\nlora_r: 8\n"


def planned(folder: Path, name: str, text: str, *given: str, **options: object) -> PlanOptions:
    file = folder / name
    file.write_text(text.replace("\n --", " --"))
    found = configured_plan(file, None, PlanOptions(**options), given=given)  # type: ignore[arg-type]
    assert found.model == "MODEL"
    return found.options


def test_a_trl_yaml_is_of_the_method_that_the_command_line_names(tmp_path: Path) -> None:
    text = "model_name_or_path: MODEL\ndataset_name: trl-lib/ultrafeedback_binarized\nbeta: 0.0\n"
    options = planned(tmp_path, "rloo.yaml", text, "method", method="rloo")
    assert (options.method, options.beta) == ("rloo", 0.0)


FULL = AXOLOTL.replace("adapter: lora\nlora_r: 8\n", "")
GRPO = "model_name_or_path: MODEL\ndataset_name: a/b\nnum_generations: 4\nmax_completion_length: 100\n"


STAGE = LLAMA_FACTORY.replace("stage: sft", "stage: STAGE")
ROWS = "--model_name_or_path MODEL --per_device_train_batch_size 2"
SIZES = {"max_seq_length": 512, "per_device_train_batch_size": 2}
SIZES |= {"activation_checkpointing": True, "gradient_as_bucket_view": False}
OURS_ALONE = {"lora_r": 8, "activation_checkpointing": False, "gradient_as_bucket_view": None, "program": None}
LOW_RANK = f"{FULL_FACTORY}bf16: true\n"
IMAGES = f"{LLAMA_FACTORY}image_max_pixels: 262144\n"
NF4 = "quantization_method: bnb\nquantization_type: nf4\n"  # nothing is quantized without quantization_bit
SWIFT = "model: MODEL\ntuner_type: lora\nlora_rank: 4\nmax_length: 2048\n"
SWIFT_COMMAND = "NPROC_PER_NODE=2 swift sft --model MODEL --tuner_type full --max_length 4096 --packing true"


@pytest.mark.parametrize(
    ("name", "text", "setting", "option"),
    [
        ("a.yaml", f"{AXOLOTL}optimizer: came_pytorch\n", "optimizer 'came_pytorch'", "optim"),
        ("a.yaml", f"{AXOLOTL}optimizer: galore_adamw\n", "and GaLore projects matrices", "optim"),
        ("a.yaml", f"{AXOLOTL}xformers_attention: true\n", "xformers_attention True", "attn_implementation"),
        ("a.yaml", f"{AXOLOTL}lora_modules_to_save: [embed_tokens]\n", "modules_to_save", "lora_r 8"),
        ("a.yaml", f"{AXOLOTL}context_parallel_size: 2\n", "context_parallel_size 2", "cp"),
        ("a.yaml", f"{AXOLOTL}max_seq_length: 4096\n", "max_seq_length is not planned: axolotl 0.19.0 has no such",
         "max_seq_length"),
        ("a.yaml", f"{FULL}bf16: false\n", "bf16 (off)", "preset"),
        ("l.yaml", f"{FULL_FACTORY}fp8: true\nfp8_backend: te\n", "fp8 True", "fp8"),
        ("l.yaml", OFT + "oft_rank: 8\n", "finetuning_type 'oft'", "lora_r"),
        ("l.yaml", LLAMA_FACTORY.replace(": lora", ": freeze"), "finetuning_type 'freeze'", "lora_r"),
        ("l.yaml", f"{FULL_FACTORY}bf16: true\nuse_galore: true\ngalore_layerwise: true\n",
         "use_galore", "optim"),
        ("l.yaml", f"{LLAMA_FACTORY}bf16: true\nuse_galore: true\n", "use_galore", "optim"),
        ("l.yaml", f"{FULL_FACTORY}bf16: true\nuse_badam: true\n", "use_badam", "optim"),
        ("l.yaml", f"{LLAMA_FACTORY}quantization_bit: 3\n", "quantization_bit 3", "load_in_4bit"),
        ("l.yaml", f"{LLAMA_FACTORY}max_seq_length: 4096\n", "no such setting, but cutoff_len", "max_seq_length"),
        ("l.yaml", STAGE.replace("STAGE", "ppo"), "trains with 'ppo'", "method"),
        ("t.sh", f"{TRL} --optim lomo", "--optim lomo", "optim"),
        ("ours.yaml", f"{OURS}bf16: false\n", "bf16 false", "preset"),
        ("ours.yaml", "model_name_or_path: MODEL\ntrain_only: [lm_head.*]\n", "train_only", "method"),
        ("s.yaml", SWIFT.replace("max_length: 2048\n", ""), "max_length, which is absent", "max_seq_length"),
        ("s.yaml", SWIFT.replace(": lora", ": adalora"), "tuner_type is not planned", "lora_r"),
        ("s.yaml", f"{SWIFT}sequence_parallel_size: 2\n", "sequence_parallel_size 2", "cp"),
        ("s.yaml", f"{SWIFT}use_galore: true\n", "use_galore True", "optim"),
        ("s.yaml", f"{SWIFT}gradient_accumulation_steps: $(expr 16 / 2)\n", "expr 16 / 2",
         "gradient_accumulation_steps"),
        ("s.yaml", f"{SWIFT}rlhf_type: ppo\n", "trains with 'ppo'", "method"),
    ],
)  # fmt: skip
def test_a_setting_that_decides_the_plan_and_is_not_planned_is_refused_unless_its_option_is_given(
    name: str, text: str, setting: str, option: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError) as refused:
        planned(tmp_path, name, text)
    assert setting in refused.value.message
    assert f"--{option.replace('_', '-')}" in f"{refused.value.message} {refused.value.hint}"
    option = option.removesuffix(" 8")
    values = {"max_seq_length": 64, "lora_r": 4, "preset": ("zero3",), "cp": 2, "load_in_4bit": True, "fp8": True}
    values |= {"method": "sft", "optim": "adafactor", "attn_implementation": "sdpa", "gradient_accumulation_steps": 2}
    assert getattr(planned(tmp_path, name, text, option, **{option: values[option]}), option) == values[option]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", f"{AXOLOTL}rl: dpo\nrl_beta: 0.3\n", {"method": "dpo", "beta": 0.3, "ref_dtype": None}),
        ("a.yaml", AXOLOTL.replace("adapter: lora\nlora_r: 8\n", "rl: dpo\n"), {"ref_dtype": "bfloat16"}),
        ("a.yaml", f"{AXOLOTL}rl: grpo\ntrl: {{num_generations: 4, max_completion_length: 100, use_vllm: true}}\n"
         "vllm: {gpu_memory_utilization: 0.5}\n",
         {"method": "grpo", "num_generations": 4, "max_seq_length": 612, "vllm_gpu_memory_utilization": 0.5}),
        ("a.yaml", f"{AXOLOTL}reward_model: true\n", {"method": "reward"}),
        ("l.yaml", STAGE.replace("STAGE", "dpo") + "pref_beta: 0.2\n", {"beta": 0.2, "lora_r": 8, "ref_dtype": None}),
        ("l.yaml", STAGE.replace("STAGE", "dpo") + "pref_loss: orpo\n", {"method": "orpo", "ref_dtype": None}),
        ("l.yaml", STAGE.replace("STAGE", "rm"), {"method": "reward"}),
        ("l.yaml", STAGE.replace("STAGE", "kto"), {"method": "kto"}),
        ("l.yaml", STAGE.replace("STAGE", "pt"), {"method": "sft", "packing": True}),
        ("t.yaml", GRPO, {"method": "grpo", "max_seq_length": 612, "preset": ()}),
        ("t.yaml", f"{GRPO}max_prompt_length: 200\n", {"method": "grpo", "max_seq_length": 300}),
        ("t.yaml", f"{GRPO}use_vllm: true\nvllm_device: auto\nvllm_gpu_memory_utilization: 0.7\n",
         {"vllm": "server", "vllm_gpu_memory_utilization": None}),
        ("a.yaml", f"{AXOLOTL}rl: grpo\ntrl: {{use_vllm: true, vllm_server_host: 0.0.0.0}}\n"
         "vllm: {gpu_memory_utilization: 0.85}\n", {"vllm": "server", "vllm_gpu_memory_utilization": None}),
        ("a.yaml", f"{AXOLOTL}rl: grpo\ntrl: {{use_vllm: true}}\nvllm: {{host: 0.0.0.0}}\n", {"vllm": "server"}),
        ("t.yaml", f"{GRPO}use_vllm: true\ntorch_dtype: bfloat16\n", {"vllm": "server"}),  # TRL's default before 1.0
        ("t.yaml", f"{GRPO}use_vllm: true\n", {"vllm": "colocate"}),
        ("t.sh", f"accelerate launch src/open_r1/grpo.py --use_vllm true {ROWS}", {"vllm": "server"}),
        ("rloo.yaml", GRPO, {"method": "rloo"}),
        ("dpo/t.yaml", "model_name_or_path: MODEL\ndataset_name: a/b\nbeta: 0.2\nmax_length: 64\n",
         {"method": "dpo", "beta": 0.2, "max_seq_length": 64}),
        ("a.yaml", f"{AXOLOTL}plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n",
         {"loss": "fused"}),
        ("a.yaml", f"{AXOLOTL}plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\n", {"loss": "full"}),
        ("a.yaml", f"{AXOLOTL}plugins: [axolotl.integrations.liger.LigerPlugin]\n"
         "liger_fused_linear_cross_entropy: true\n", {"loss": "fused", "use_liger_kernel": False}),
        ("a.yaml", f"{AXOLOTL}plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true\n"
         "liger_glu_activation: true\n", {"loss": "full", "use_liger_kernel": True}),
        ("a.yaml", f"{AXOLOTL}chunked_cross_entropy: true\n", {"loss": "chunked"}),
        ("a.yaml", AXOLOTL.partition("deepspeed")[0] + "optimizer: ao_adamw_8bit\n", {"optim": "adamw_torch_8bit"}),
        ("t.sh", TRL.replace("max_length", "max_seq_length"), {"max_seq_length": 512, "loss": "full"}),
        ("t.sh", TRL.replace("sft.py", "src/open_r1/sft.py"), {"max_seq_length": 512, "loss": "full"}),
        ("t.sh", f"trl dpo --use_peft --beta 0.2 {ROWS}", {"method": "dpo", "beta": 0.2, "lora_r": 16, "vllm": None}),
        ("t.sh", f"trl kto --precompute_ref_log_probs {ROWS}",
         {"method": "kto", "precompute_ref_log_probs": True, "lora_r": None}),
        ("t.sh", "accelerate launch --num_processes 2 trl/scripts/grpo.py --num_generations 4 --use_vllm"
         f" --vllm_gpu_memory_utilization 0.5 {ROWS}",
         {"method": "grpo", "num_generations": 4, "vllm": "colocate", "vllm_gpu_memory_utilization": 0.5}),
        ("a.yaml", f"{AXOLOTL}load_in_8bit: true\n", {"load_in_8bit": True, "pure_bf16": None}),
        ("l.yaml", f"{LLAMA_FACTORY}quantization_bit: 8\n", {"load_in_8bit": True, "load_in_4bit": False}),
        ("t.sh", f"{TRL} --use_peft --load_in_8bit", {"load_in_8bit": True, "fp32_base": None}),
        ("t.sh", f"{TRL} --use_peft", {"fp32_base": True, "lora_r": 16}),  # ModelConfig's default
        ("t.sh", f"{TRL} --use_peft --load_in_4bit --bnb_4bit_quant_storage bfloat16", {"sharded_4bit": True}),
        ("t.sh", f"{TRL} --use_peft --load_in_4bit", {"sharded_4bit": None}),
        ("a.yaml", f"{QLORA}quantize_moe_experts: true\n", {"experts_in_4bit": True}),
        ("a.yaml", QLORA, {"experts_in_4bit": False, "load_in_4bit": True}),
        ("a.yaml", f"{AXOLOTL}load_in_4bit: true\n", {"load_in_4bit": False}),  # under `qlora` alone
        ("l.yaml", f"{LLAMA_FACTORY}quantization_bit: 4\nquantization_method: bitsandbytes\n", {"load_in_4bit": False}),
        ("t.sh", f"{TRL} --use_peft --dtype bfloat16", {"fp32_base": False}),
        ("a.yaml", FULL.partition("deepspeed")[0], {"pure_bf16": True, "preset": ("ddp",)}),
        ("a.yaml", FULL, {"pure_bf16": None, "preset": ("zero3",)}),  # DeepSpeed keeps fp32 masters
        ("l.yaml", f"{FULL_FACTORY}pure_bf16: true\n", {"pure_bf16": True}),
        ("a.yaml", AXOLOTL.partition("deepspeed")[0] + "optimizer: adamw_bnb_8bit\n", {"optim": "adamw_bnb_8bit"}),
        # axolotl and LLaMA-Factory compute all logits at once unless Liger does not
        ("axolotl.yaml", AXOLOTL, SIZES | {"preset": ("zero3",), "lora_r": 8, "loss": None, "num_train_epochs": 2}),
        ("axolotl.yaml", AXOLOTL, {"program": "axolotl"}),
        ("factory.yaml", LLAMA_FACTORY, SIZES | {"preset": ("ddp",), "loss": "fused", "freeze_vision_tower": False}),
        ("factory.yaml", LLAMA_FACTORY, {"program": "llama-factory"}),
        ("factory.yaml", LLAMA_FACTORY.replace("dataset: identity", "train_file: a"), SIZES | {"loss": "fused"}),
        ("trl.sh", TRL, SIZES | {"preset": ("zero2",), "lora_r": None, "loss": None, "num_processes": (4,)}),
        ("trl.sh", TRL, {"program": "trl"}),
        ("ours.yaml", OURS, SIZES | {"preset": (), "loss": None} | OURS_ALONE),
        ("run.sh", FACTORY_COMMAND, SIZES | {"preset": ("zero2",), "lora_r": 16, "loss": None}),
        ("run.sh", "llamafactory-cli train factory.yaml", SIZES | {"preset": ("ddp",), "lora_r": 8, "loss": "fused"}),
        ("run.sh", "llamafactory-cli train factory.yaml learning_rate=1e-5 cutoff_len=4096", {"max_seq_length": 4096}),
        ("run.sh", "export NPROC_PER_NODE=8\nllamafactory-cli train factory.yaml", {"num_processes": (8,)}),
        ("run.sh", "N=4\nNPROC_PER_NODE=$N llamafactory-cli train factory.yaml", {"num_processes": (4,)}),
        ("run.sh", "NPROC_PER_NODE=8 swift sft --model MODEL --max_length 512", {"num_processes": (8,)}),
        ("run.sh", "llamafactory-cli export x.yaml\nllamafactory-cli train factory.yaml", {"max_seq_length": 512}),
        ("run.sh", FACTORY_COMMAND.replace("--config_file zero2.yaml", "--use_deepspeed --zero_stage 3"),
         {"preset": ("zero3",), "num_processes": (2,)}),
        ("run.sh", f"torchrun --nnodes 2 --nproc_per_node=${{N:-8}} -m trl.scripts.dpo {ROWS}",
         {"num_processes": (16,)}),
        ("run.sh", "#SBATCH --nodes=2\nG=8\nM=$SLURM_NNODES\nN=$((M * ${G:-4}))\naccelerate launch --num_processes $N"
         f" sft.py {ROWS}", {"num_processes": (16,)}),
        ("run.sh", f"torchrun --nproc_per_node=gpu sft.py {ROWS}", {"num_processes": (), "program": "trl"}),
        ("run.sh", "torchrun --nproc_per_node 2 src/train.py factory.yaml",
         {"num_processes": (2,), "program": "llama-factory"}),
        ("run.sh", "accelerate launch --num_processes 4 -m axolotl.cli.train axolotl.yml --micro-batch-size 3",
         {"num_processes": (4,), "per_device_train_batch_size": 3, "preset": ("zero3",), "program": "axolotl"}),
        ("run.sh", "axolotl train axolotl.yml --launcher torchrun -- --nproc_per_node=4", {"num_processes": (4,)}),
        ("run.sh", "accelerate launch scripts/run_dpo.py dpo/t.yaml --beta=0.3",
         {"method": "dpo", "beta": 0.3, "program": "trl"}),
        ("run.sh", "M=${1:-'MODEL'}\nN=${2:-4}\nG=$((64/($N*2)))\ntrl sft --model_name_or_path $M"
         " --gradient_accumulation_steps $G", {"gradient_accumulation_steps": 8}),
        ("a.yaml", f"{AXOLOTL}peft_use_dora: true\n", {"dora": True}),
        ("l.yaml", f"{LLAMA_FACTORY}use_dora: true\n", {"dora": True}),
        ("ours.yaml", f"{OURS}lora_config: [use_dora=true]\n", {"dora": True}),
        ("l.yaml", OFT, {"oft_block_size": 32}),
        ("l.yaml", f"{OFT}oft_block_size: 16\noft_target: q_proj,v_proj\n",
         {"oft_block_size": 16, "lora_target_modules": ("q_proj", "v_proj")}),
        ("l.yaml", f"{FULL}optimizer: dion\ndion_rank_fraction: 0.5\n",  # axolotl passes on `optim_args` alone
         {"optim": "dion", "optim_args": None}),
        ("l.yaml", f"{FULL}optimizer: dion\noptim_args: {{rank_fraction: 0.25}}\n",
         {"optim_args": "rank_fraction=0.25"}),
        ("l.yaml", f"{LOW_RANK}use_galore: true\n",
         {"optim": "galore_adamw", "optim_args": "rank=16,proj_type=std", "optim_target_modules": ["(?!lm_head).*"]}),
        ("l.yaml", f"{LOW_RANK}use_galore: true\ngalore_target: mlp,q_proj\ngalore_rank: 8\noptim: paged_adamw_8bit\n",
         {"optim": "galore_adamw_8bit", "optim_args": "rank=8,proj_type=std",
          "optim_target_modules": ["mlp", "q_proj"]}),
        ("l.yaml", f"{LOW_RANK}use_apollo: true\napollo_rank: 64\n",
         {"optim": "apollo_adamw", "optim_args": "rank=64,proj_type=std,proj=random"}),
        ("a.yaml", f"{FULL}fp8: true\n", {"fp8": True}),
        ("l.yaml", f"{FULL_FACTORY}fp8: true\n", {"fp8": True}),
        ("a.yaml", f"{FULL}bf16: full\n", {"pure_bf16": None, "preset": ("zero3",)}),
        ("l.yaml", IMAGES, {"freeze_vision_tower": True}),
        ("l.yaml", f"{IMAGES}freeze_vision_tower: false\n", {"freeze_vision_tower": False}),
        ("l.yaml", f"{LLAMA_FACTORY}{NF4}", {"load_in_4bit": False}),
        ("l.yaml", f"{LLAMA_FACTORY}{NF4}quantization_bit: 4\n", {"load_in_4bit": True}),
        ("s.yaml", f"{SWIFT}torch_dtype: float32\n", {"fp32_base": True}),
        ("s.yaml", f"{SWIFT}torch_dtype: bfloat16\n", {"fp32_base": None}),
        ("s.yaml", f"{SWIFT}deepspeed: zero2\nrlhf_type: dpo\n",
         {"preset": ("zero2",), "method": "dpo", "lora_r": 4, "max_seq_length": 2048, "program": "ms-swift"}),
        ("s.yaml", f"{SWIFT}rlhf_type: grpo\nuse_vllm: true\nvllm_mode: colocate\nsleep_level: 1\n",
         {"max_seq_length": 2560, "vllm": "colocate", "vllm_gpu_memory_utilization": 0.9, "beta": 0.04,
          "vllm_enable_sleep_mode": True}),
        ("s.sh", f"{SWIFT_COMMAND.replace(' sft', ' rlhf')} --rlhf_type grpo --max_completion_length 1024",
         {"max_seq_length": 5120, "vllm": None, "ref_dtype": "bfloat16"}),
        ("s.yaml", f"{SWIFT}quant_bits: 8\n", {"load_in_8bit": True, "activation_checkpointing": True}),
        ("s.yaml", SWIFT.replace("lora_rank: 4", "quant_bits: 4"), {"load_in_4bit": True, "lora_r": 8}),
        ("s.sh", f"{SWIFT_COMMAND} --attn_impl flash_attn --deepspeed zero3 --dataset x",
         {"lora_r": None, "packing": True, "attn_implementation": "flash_attention_2", "preset": ("zero3",)}),
    ],
)  # fmt: skip
def test_what_a_file_trains_its_loss_and_its_numerics_are_planned(
    name: str, text: str, expected: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "dpo").mkdir()
    (tmp_path / "zero2.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    (tmp_path / "factory.yaml").write_text(LLAMA_FACTORY)
    (tmp_path / "axolotl.yml").write_text(AXOLOTL)
    (tmp_path / "dpo" / "t.yaml").write_text(
        "model_name_or_path: MODEL\ndataset_name: a/b\nbeta: 0.2\nmax_length: 64\n"
    )
    options = planned(tmp_path, name, text)
    assert {key: getattr(options, key) for key in expected} == expected


def test_the_hint_for_sequences_that_ranks_share_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "sample_packing: true\nflash_attention: true\ncontext_parallel_size: 4\n"
    (tmp_path / "a.yaml").write_text(FULL.replace("MODEL", str(LLAMA_8B_CONFIG)) + more)
    command = ["plan", "--config", str(tmp_path / "a.yaml"), "--gpu", "h100", "--num-processes", "8"]
    hint = run_command(command, capsys)[2].split("`")[1::2][-1]
    code, out, err = run_command([*command, *hint.split()], capsys)
    assert (code, "cp 4" in out) == (0, True)
    assert "preset cp (as given)" in err


def test_a_method_that_no_plan_has_is_refused_beside_a_file(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="--method is 'NAME', expected sft, dpo"):
        planned(tmp_path, "l.yaml", STAGE.replace("STAGE", "ppo"), "method", method="NAME")


def test_where_vllm_runs_may_be_said_beside_a_file_that_gives_its_share(tmp_path: Path) -> None:
    text = f"{GRPO}use_vllm: true\nvllm_gpu_memory_utilization: 0.7\n"
    for mode, share in (("server", None), ("none", None), ("colocate", 0.7)):
        options = planned(tmp_path, "t.yaml", text, "vllm", vllm=mode)
        assert (options.vllm, options.vllm_gpu_memory_utilization) == (mode, share)


def test_a_command_of_ms_swift_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(SWIFT)
    assert planned(tmp_path, "s.sh", "swift sft theirs.yaml --max_length 64").max_seq_length == 64


@pytest.mark.parametrize("kind", ["activation_checkpointing_offload", "activation_checkpointing_selective"])
def test_the_kind_of_checkpointing_is_planned_from_a_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"activation_checkpointing: true\n{kind}: true\n")
    found = configured_plan(tmp_path / "job.yaml", str(LLAMA_8B_CONFIG), PlanOptions(), given=())
    assert getattr(found.options, kind)
    assert "not used" not in found.described


def test_a_trl_yaml_that_several_methods_have_names_the_option(tmp_path: Path) -> None:
    text = "model_name_or_path: MODEL\ndataset_name: a/b\nbeta: 0.2\nmax_length: 64\n"
    with pytest.raises(ToolkitError, match="settings of several of TRL's methods") as refused:
        planned(tmp_path, "t.yaml", text)
    assert "`--method dpo`" in str(refused.value.hint)


def test_what_is_not_used_and_what_the_program_does_not_have_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{AXOLOTL}torch_compile: true\nlora_mlp_kernel: true\nadam_eps: 1.0e-8\n")
    (tmp_path / "t.yaml").write_text(f"{GRPO}max_prompt_length: 8\n")
    lines = [
        configured_plan(tmp_path / name, None, PlanOptions(), given=[]).described.splitlines()[1:]
        for name in ("a.yaml", "t.yaml")
    ]
    assert lines[0][0].startswith("not used: torch_compile, lora_mlp_kernel")
    assert [line[-1] for line in lines] == [
        "axolotl 0.19.0 does not have: adam_eps (now adam_epsilon)",
        "TRL 1.16.0 does not have: max_prompt_length",
    ]


def test_a_file_that_is_not_read_is_answered_with_the_command_to_type(tmp_path: Path) -> None:
    text = "model:\n  _component_: torchtune.models.llama3.lora_llama3_8b\n  lora_rank: 8\nbatch_size: 2\n"
    text += "tokenizer: {_component_: x, max_seq_len: 4096}\nenable_activation_checkpointing: true\n"
    words = "--loss chunked_output --per-device-train-batch-size 2 --max-seq-length 4096 --lora-r 8"
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ToolkitError, match=r"is a file of torchtune, which is not read") as refused:
        configured_plan(tmp_path / "theirs.yaml", None, PlanOptions(), given=[])
    assert f"`toolkit plan MODEL {words} --activation-checkpointing`" in str(refused.value.hint)


def test_the_length_of_an_older_trls_command_decides_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 rows of 16,384 tokens ran out of 8 times 96 GB (open-r1, issue 506)."""
    file, where = tmp_path / "r1.sh", ["--gpu", "h100", "--gpu-memory-gib", "96"]
    words = "--packing --max_seq_length 16384 --per_device_train_batch_size 16 --gradient_checkpointing --bf16"
    command = "accelerate launch --config_file=zero3.yaml --num_processes 8 src/open_r1/sft.py"
    file.write_text(f"{command} --model_name_or_path {FIXTURES / 'qwen3-1.7b'} --dataset_name a/b {words}\n")
    code, out, err = run_command(["plan", "--config", str(file), *where, "--json"], capsys)
    assert (code, err.splitlines()[1]) == (0, "TRL 1.16.0 does not have: max_seq_length (now max_length)")
    (plan,) = json.loads(out)["plans"]
    assert (plan["preset"], plan["verdict"]) == ("zero3", "does_not_fit")


def test_a_flash_attention_of_the_file_is_planned_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = attention_names()
    monkeypatch.setattr("toolkit.versions._text", lambda *_: "")
    attention_names.cache_clear()
    without = attention_names()
    attention_names.cache_clear()
    assert without == installed
    assert planned(tmp_path, "a.yaml", f"{AXOLOTL}flash_attention: true\n").attn_implementation == "flash_attention_2"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"{AXOLOTL}layer_offloading: true\n", "layer_offloading"),
        (f"{AXOLOTL}overrides_of_model_config: {{rope_theta: 5.0}}\n", "overrides_of_model_config"),
        (f"{LLAMA_FACTORY}resize_vocab: true\n", "resize_vocab"),
        (f"{LLAMA_FACTORY}{NF4}", "quantization_method (without quantization_bit nothing is quantized)"),
        (f"{SWIFT}per_device_eval_batch_size: 9\n", "per_device_eval_batch_size"),
        (f"{SWIFT}device_map: auto\n", "device_map"),
    ],
)
def test_a_setting_that_changes_memory_and_no_plan_is_named(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    described = configured_plan(tmp_path / "theirs.yaml", None, PlanOptions(), given=()).described
    assert name in described.partition("not used: ")[2]


def test_a_command_ends_at_a_pipe_and_has_the_variables_that_its_script_assigns(tmp_path: Path) -> None:
    text = f"BATCH=2\nexport LENGTH=512\n{TRL.replace(' 2', ' ${BATCH}').replace(' 512', ' $LENGTH')} 2>&1 | tee log\n"
    options = planned(tmp_path, "trl.sh", text.replace("--num_processes 4", "--num_processes $GPUS"))
    assert (options.max_seq_length, options.per_device_train_batch_size, options.num_processes) == (512, 2, ())


def test_the_model_of_the_command_line_is_enough(tmp_path: Path) -> None:
    (tmp_path / "sft.sh").write_text("torchrun sft.py --dataset_name a/b --max_length 64\n")
    assert configured_plan(tmp_path / "sft.sh", "MODEL", PlanOptions(), given=[]).model == "MODEL"


def test_a_model_that_nobody_knows_is_answered_with_the_command_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL.replace("MODEL", "/data/Qwen3-8B-medical"))
    code, _, refused = run_command(["plan", "--config", str(file), "--gpu", "h100", "--num-processes", "8"], capsys)
    assert code == 2
    assert "maybe `Qwen/Qwen3-8B`? Or a hub id" in refused
    assert f"`toolkit plan MODEL --config {file}` plans another model" in refused


def test_a_script_of_ones_own_is_answered_with_the_command_that_plans_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "run.sh").write_text(OWN_SCRIPT)
    (tmp_path / "dpo.sh").write_text(OWN_SCRIPT)
    code, _, refused = run_command(["plan", "--config", str(tmp_path / "run.sh"), "--gpu", "h100"], capsys)
    assert code == 2
    assert "run.sh starts train.py: what its settings mean is in its own code" in refused
    words = shlex.split(refused.split("hint: `toolkit ")[1].split("`")[0])
    answer = json_of([*words, "--gpu", "h100"], capsys)
    assert [(plan["preset"], plan["world_size"]) for plan in answer["plans"]] == [("zero3", 4)]
    assert (
        "`toolkit plan Qwen/Qwen3-8B --program trl --method dpo --preset zero3"
        in run_command(["plan", "--config", str(tmp_path / "dpo.sh"), "--gpu", "h100"], capsys)[2]
    )
    assert {"--program", "--activation-checkpointing", "--lora-r", "--max-seq-length", "512"} <= {*words}


def test_flags_of_the_command_line_win(tmp_path: Path) -> None:
    assert planned(tmp_path, "qlora.yaml", QLORA, "lora_r", lora_r=4).load_in_4bit
    assert planned(tmp_path, "a.yaml", AXOLOTL, "program", program="toolkit").program == "toolkit"
    options = planned(tmp_path, "trl.sh", TRL, "max_seq_length", "preset", max_seq_length=64, preset=("fsdp2",))
    assert (options.max_seq_length, options.preset, options.num_processes) == (64, ("fsdp2",), (4,))


def test_a_file_is_planned_like_the_same_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ours.yaml").write_text(OURS.replace("MODEL", str(LLAMA_8B_CONFIG)))
    where = ["--gpu", "h100", "--num-processes", "8", "--preset", "zero3", "--max-seq-length", "1024"]
    flags = ["--per-device-train-batch-size", "2", "--lora-r", "8", "--num-train-epochs", "3"]
    code, out, err = run_command(["plan", "--config", str(tmp_path / "ours.yaml"), *where, "--json"], capsys)
    assert (code, err) == (0, f"{tmp_path / 'ours.yaml'}: our training arguments\n")
    assert json.loads(out) == json_of(["plan", str(LLAMA_8B_CONFIG), *where, *flags], capsys)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ours.yaml", "max_seq_length: 512\n", "names no model"),
        ("trl.yaml", "model_name_or_path: null\ndataset_name: a/b\nuse_peft: true\nmax_length: 9\n", "names no model"),
        ("l.yaml", LLAMA_FACTORY.partition("dataset")[0], "names no dataset to train on: it is for inference"),
        ("rl.yaml", AXOLOTL + "rl: ebft\n", "trains with 'ebft', which is not planned"),
        ("preset.yaml", "distributed_type: FSDP\n", "is not recognised"),
        ("ours.yaml", OURS + "max_seq_lenght: 5\n", "max_seq_lenght"),
        ("trl.sh", "trl dpo --model_name_or_path MODEL --beta much", "beta is 'much', expected a number"),
        ("t.yaml", f"{GRPO}max_prompt_length: long\n", "max_prompt_length is 'long', expected a whole number"),
        ("l.yaml", f"{OFT}oft_block_size: many\n", "oft_block_size is 'many', expected a whole number"),
        ("l.yaml", f"{OFT}oft_block_size: 1\n", "oft_block_size is 1, expected 2 or more"),
    ],
)
def test_a_file_without_a_model_of_something_else_or_with_no_number_is_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError, match=message):
        planned(tmp_path, name, text)


def test_a_trl_file_whose_script_names_the_model_is_planned_with_one(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(GRPO.removeprefix("model_name_or_path: MODEL\ndataset_name: a/b\n"))
    with pytest.raises(ToolkitError, match="names no model") as error:
        configured_plan(file, None, PlanOptions(), given=())
    assert error.value.hint == f"`toolkit plan MODEL --config {file}`"
    found = configured_plan(file, "owner/name", PlanOptions(), given=())
    assert (found.model, found.options.method, found.options.num_generations) == ("owner/name", "grpo", 4)


def test_a_model_of_the_command_line_changes_nothing_of_whose_a_file_is(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    texts = [AXOLOTL + "".join(f"strange_{index}: 1\n" for index in range(count)) for count in range(20)]
    file.write_text([text for text in texts if program_of(yaml.safe_load(text)) == "axolotl"][-1])  # just its file
    assert configured_plan(file, "MODEL", PlanOptions(), given=()).options.program == "axolotl"


def test_the_file_of_a_script_is_answered_with_options_that_plan_its_job(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("model_name: a/b\ntrain_file: t.jsonl\nuse_lora: true\nlora: {rank: 8}\nlearning_rate: 1.0e-4\n")
    with pytest.raises(ToolkitError, match="of no program whose files are read") as error:
        configured_plan(file, None, PlanOptions(), given=())
    assert "`toolkit plan a/b --max-seq-length" in str(error.value.hint)
    file.write_text("model_name_or_path: a/b\nlora_rr: 8\n")  # one of ours, misspelt
    with pytest.raises(ToolkitError, match="unknown argument --lora_rr"):
        configured_plan(file, None, PlanOptions(), given=())


TRL_FILE = "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: a/b\nmax_length: 512\nbf16: true\nmodel_init_kwargs: "


@pytest.mark.parametrize(
    "text",
    ["{use_kernels: true, attn_implementation: eager}", '\'{"use_kernels": true, "attn_implementation": "eager"}\''],
)
def test_what_trl_hands_to_the_loader_is_planned_or_named_with_what_it_does(text: str, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + text)
    plan = configured_plan(tmp_path / "sft.yaml", None, PlanOptions(), given=[])
    assert plan.options.attn_implementation == "eager"
    assert "model_init_kwargs.use_kernels (RMSNorm and linear attention by kernels of the hub" in plan.described
    assert "attn_implementation" not in plan.described


def test_a_quantization_that_trl_hands_to_the_loader_is_refused_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + "{quantization_config: {load_in_4bit: true}}")
    with pytest.raises(ToolkitError, match=r"model_init_kwargs\.quantization_config") as caught:
        configured_plan(tmp_path / "sft.yaml", None, PlanOptions(), given=[])
    assert "--load-in-4bit" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        (f"torchrun --nnodes=2 --nproc_per_node=8 train.py {ROWS} --fsdp 'full_shard auto_wrap'",
         "plan MODEL --program trainer --preset fsdp2 --num-processes 16 --per-device-train-batch-size 2 "),
        (f"python qlora.py {ROWS} --bits 4 --source_max_len 16 --target_max_len 512",
         "--max-seq-length 528 --load-in-4bit`"),
        ("python prepare.py --model b\ndeepspeed finetune.py --base_model a --micro_batch_size 2",
         "plan a --program trainer --preset ddp --per-device-train-batch-size 2 "),
        ("torchrun train.py mine.yaml", "plan --config mine.yaml`"),
    ],
)  # fmt: skip
def test_the_words_of_a_script_that_is_not_known_are_planned_by_their_options(
    command: str, instead: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(command)
    with pytest.raises(ToolkitError) as refused:
        configured_plan(tmp_path / "run.sh", None, PlanOptions(), given=())
    assert instead in str(refused.value.hint)
