"""Files from the field, rebuilt: each has one fault that a person met, or none, and lint says what its README said.

A row names the findings that a file must have, as `rule` or `rule:line`; a file without a row has none that is an error
or a warning. What may stand beside them is said in ALSO.
"""

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import run_command
from launching import nightly

from toolkit.errors import ToolkitError
from toolkit.lint.check import fixed_text, lint_paths
from toolkit.lint.findings import Finding

CASES = Path(__file__).with_name("cases")
# Case -> findings of level error or warning, in the order of their lines.
EXPECTED = {
    # the library finds no such class in another model; accelerate asks the model itself
    "c01_fsdp_doc_layer_class.yaml": "fsdp1-by-omission unknown-nested-key:5",
    "c02_ds_total_steps_zero.json": "optimizer-of-json:3 not-auto:5",
    "c03_ds_capital_auto.json": "optimizer-of-json:3 optimizer-of-json:4 not-auto:6 not-auto:6 not-auto:6"
    " wrong-deepspeed-type:8 not-auto:9 wrong-deepspeed-type:9",
    "c04_args_without_fp16.yaml": "differs-from-json not-auto:2",
    "c04_ds_fp16_fixed.json": "not-auto:2",
    "c05_ds_scheduler_overrides.json": "optimizer-of-json:3",
    # `deepspeed` puts --local_rank=N before the YAML, which LLaMA-Factory wants as its first word
    "c07_deepspeed_launcher_yaml_arg.sh": "file-behind-local-rank:2",
    "c09_stage2_offload_param.json": "offload-param-below-stage-3:8",
    "c101_unknown_top_key.yaml": "yaml-not-auto:4 unknown-key:6",
    # a DeepSpeed key in accelerate's YAML: its YAML name is zero3_save_16bit_model
    "c102_json_key_in_yaml.yaml": "unknown-nested-key:7",
    # FULL keeps the Trainer's final save; with SHARDED it writes no weights
    "c103_sharded_final_save.yaml": "sharded-final-save:7",
    "c21_fsdp1_orig_params_false.yaml": "sharded-final-save:9",
    "c104_two_nodes_pdsh.yaml": "pdsh-by-default yaml-not-auto:4",
    "c10_gas_in_yaml.yaml": "yaml-not-auto:4",
    # num_processes // num_machines is 0, or leaves a GPU idle; more processes per node than gpu_ids
    "c11_two_machines_one_process.yaml": "uneven-processes:5 never-taken:11",
    "c11b_uneven_processes.yaml": "uneven-processes:4 uneven-processes:9",
    "c13_fsdp_qlora_trl.yaml": "4bit-not-sharded:6 fsdp-as-words:8",
    "c13b_fsdp_qlora_launch.sh": "4bit-not-sharded:3",
    "c15_best_model_steps.yaml": "refused-by-trainer:6",
    "c15c_best_model_evaluation_strategy.yaml": "removed-training-argument:2",
    "c17b_grpo_one_generation.yaml": "refused-by-grpo:4",
    # text for PyYAML; parse_dict converts nothing
    "c18_learning_rate_text.yaml": "number-as-text:3 number-as-text:5",
    "c19_ds_activation_checkpointing.json": "checkpointing-block-unread:4",
    "c20_deepspeed_visible_devices.sh": "visible-devices-ignored:2",
    # the line before has no backslash: --bf16 and what follows is lost
    "c22_missing_backslash.sh": "lost-line:8",
    "c23_env_not_exported.sh": "not-exported:3 not-exported:4 not-exported:5 not-exported:7",
    "c23c_llamafactory_not_exported.sh": "not-exported:2 not-exported:3 not-exported:4 not-exported:5 not-exported:6",
    "c24_reentrant_indent.yaml": "not-indented:6",
    "c28_fsdp_env_torchrun.sh": "typographic-quotes:3 unknown-variable:6 unknown-variable:7",
    "c30_torchrun_per_task.sbatch": "launcher-per-gpu:4",
    "c30c_torchrun_per_task_alias.sbatch": "launcher-per-gpu:4 waits-for-lost-node:7",
    "c31_two_launches_in_sequence.sbatch": "no-rendezvous:6 waits-for-lost-node:6 no-rendezvous:7",
    "c34_args_after_script.sh": "behind-the-script:3",
    "c34b_launcher_args_after_script.sh": "behind-the-script:2 behind-the-script:2 behind-the-script:2",
    "c34c_torchrun_args_after_script.sh": "behind-the-script:2 behind-the-script:2 behind-the-script:2",
    "c39_stage3_no_gather.json": "stage-3-without-gather:4",
    # accelerate takes any compute_environment but LOCAL_MACHINE for SageMaker
    "c47_compute_environment.yaml": "unknown-word:1",
    "c52_stage_list.json": "wrong-deepspeed-type:3",
    # the JSON that fsdp_config names is read with the YAML, and alone
    "c56_args_with_fsdp_file.yaml": "fsdp-as-words:3 fsdp1-key-of-trainer:3 unknown-fsdp-config-key:4"
    " fsdp1-key-of-trainer:5",
    "c56_trainer_fsdp_config.json": "fsdp1-key-of-trainer:3 unknown-fsdp-config-key:4 fsdp1-key-of-trainer:5",
    # four removed arguments, bf16 with fp16, best model without evaluation
    "c61_args_in_script.sh": "fp16-and-bf16:5 removed-training-argument:7 removed-training-argument:8"
    " removed-training-argument:9 removed-training-argument:11 refused-by-trainer:12",
    "c63_yaml_rdzv_backend.yaml": "never-taken:8",
    # c10d without an endpoint: each node waits for itself
    "c64_c10d_without_endpoint.sbatch": "no-rendezvous:7",
    "c74_zero3_no_16bit_save.yaml": "stage-3-without-gather:7",
    "c83_max_steps_and_epochs.yaml": "max-steps-and-epochs:3",
    "c86_words_of_arguments.yaml": " ".join(f"unknown-word:{line}" for line in range(3, 8)),
    "c87_words_of_accelerate.yaml": "unknown-word:2 unknown-word:3",
    "c88_words_of_fsdp.yaml": " ".join(f"unknown-word:{line}" for line in range(6, 10)),
    "c90_ds_shapes.json": "not-auto:4 stage-3-without-gather wrong-deepspeed-type:2 unknown-word:3"
    " wrong-deepspeed-type:3 wrong-deepspeed-type:3 wrong-deepspeed-type:3 wrong-deepspeed-type:4",
    "c93_grad_ckpt_both.yaml": "checkpointing-twice:3",
    "c94_ds_zero_int.json": "not-auto:1 not-auto:1 wrong-deepspeed-type:1",
    "c98_crlf.yaml": "unquoted-no:3",
    "zero3_bf16.json": "sub-group-size-zero:6 max-live-parameters-zero:10 not-auto:15",
}
# Refused in one line: comments, tabs, nothing, a list, a template.
REFUSED = {
    "c95_ds_comments.json": "line 1: not JSON",
    "c97_tabs_crlf.yaml": "is not YAML",
    "c99_empty.yaml": "contains NoneType",
    "c99b_list.yaml": "contains list",
    "c99c_template.yaml": "a key that is not a string, on line 3",
}
# Settings that TRL and axolotl no longer have, which the schemas of these programs know.
OF_SCHEMAS = {
    "c16_sft_max_seq_length.yaml": {"torch_dtype", "use_flash_attention_2", "max_seq_length"},
    "c17_grpo.yaml": {"vllm_device", "max_prompt_length"},
    "c71_max_length_old_name.yaml": {"max_seq_length"},
    "c72_axolotl_fsdp_and_deepspeed.yaml": {"deepspeed"},
    "p03_grpo.yaml": {"max_prompt_length"},
}
# Notes where nobody is known to read the file.
DEPENDS_ON_READER = {
    *("not-auto", "optimizer-of-json", "yaml-not-auto", "sharded-final-save", "fsdp1-by-omission", "fsdp-as-words"),
    *("waits-for-lost-node", "checkpointing-block-unread", "stage-3-without-gather"),
}
AXOLOTL = ("c72_axolotl_fsdp_and_deepspeed.yaml", "p04_axolotl_70b_4x3090.yaml", "p04b.yaml")
NAMES = sorted(path.name for path in CASES.iterdir())


def found(name: str) -> list[Finding]:
    return lint_paths([Path(name)]).findings


@pytest.fixture(autouse=True)
def in_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REFUSED, *AXOLOTL, *OF_SCHEMAS)])
def test_a_case_has_the_findings_of_its_fault_and_no_other(name: str) -> None:
    # What schemas of programs say has tests of its own.
    findings = [each for each in found(name) if each.level != "note" or each.rule in DEPENDS_ON_READER]
    findings = [each for each in findings if not each.rule.endswith("-setting")]
    rows = [each.rule if each.line is None else f"{each.rule}:{each.line}" for each in findings]
    assert sorted(rows) == sorted(EXPECTED.get(name, "").split())


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_a_file_that_nobody_can_read_is_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(ToolkitError, match=why):
        found(name)


@pytest.mark.parametrize(("name", "keys"), OF_SCHEMAS.items())
def test_a_setting_that_the_program_no_longer_has_is_an_error(name: str, keys: set[str]) -> None:
    assert {each.key for each in found(name) if each.level == "error"} == keys


@pytest.mark.parametrize(
    ("name", "needs"), [("c17_grpo.yaml", 8), ("p03_grpo.yaml", 8), ("c24_reentrant_indent.yaml", 3)]
)
def test_the_smallest_number_of_processes_that_makes_full_groups_is_named(name: str, needs: int) -> None:
    (finding,) = [each for each in found(name) if each.rule == "refused-by-grpo"]
    assert (finding.level, f"it needs {needs} processes" in finding.message) == ("note", True)


def test_what_holds_for_one_model_or_some_versions_is_a_note_of_its_own() -> None:
    assert [each.rule for each in found("c73_zero3_init_false.yaml")] == ["whole-model-on-each-rank"]
    notes = [each for each in found("c01_fsdp_doc_layer_class.yaml") if each.level == "note"]
    assert [each.rule for each in notes] == ["fsdp1-by-omission", "layer-class-of-one-model"]


# -- what is certain


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REFUSED, *AXOLOTL)])
def test_a_fix_leaves_a_file_that_loads_and_makes_no_error(name: str) -> None:
    before = {(each.rule, each.key) for each in found(name) if each.level == "error"}
    text = fixed_text(Path(name))
    if name.endswith(".json"):
        json.loads(text)
    elif name.endswith(".yaml"):
        yaml.safe_load(text)
    else:
        assert text == Path(name).read_text()
    assert str(CASES) not in text  # no path of this node
    assert before >= {(each.rule, each.key) for each in found(name) if each.level == "error"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # a script's own argument, which is close to one of the Trainer's
        (
            "output_dir: out\nmax_seq_length: 5\nmax_step: 3\nmy_own: 1\nmore_of_mine: 2\nand_this: 3\nmine_too: 4\n",
            "a.yaml",
        ),
        # the JSON does not exist here, and the precision may be wanted
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
            "  deepspeed_config_file: gone.json\n  zero_stage: 3\n",
            "b.yaml",
        ),
        ("finetuning_type: lora\nwarmup_ratio: 0.1\noverwrite_output_dir: true\n", "c.yaml"),
        ("learning_rate: 1.0e-5\ngradient_checkpointing: true\n", "d.yaml"),
        # of a script that calls DeepSpeed itself: nobody fills in `auto`
        ('{"zero_optimization": {"stage": 3}, "train_batch_size": 8, "gradient_clipping": 1.0}', "e.json"),
        # a feature that the DeepSpeed of this file has
        ('{"zero_optimization": {}, "train_batch_size": "auto", "compression_training": {"a": {}}}', "f.json"),
        # accelerate takes the number from here in a script without a Trainer
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 8\n",
            "g.yaml",
        ),
    ],
)
def test_a_fix_that_is_not_certain_is_not_applied(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert fixed_text(tmp_path / name) == text


def test_notes_alone_exit_0_and_a_level_says_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [
        run_command(["lint", name, "--level", level], capsys)[0]
        for name in ("c73_zero3_init_false.yaml", "c39_stage3_no_gather.json", "c15_best_model_steps.yaml")
        for level in ("error", "warning", "note")
    ]
    assert codes == [0, 0, 1, 0, 1, 1, 1, 1, 1]
    assert run_command(["lint", "c73_zero3_init_false.yaml"], capsys)[0] == 0
    code, _, errors = run_command(["lint", "c73_zero3_init_false.yaml", "--level", "info"], capsys)
    assert (code, "expected error, warning, note" in errors) == (2, True)


def test_clean_says_which_arguments_were_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, errors = run_command(["lint", "c34_args_after_script.sh"], capsys)
    assert "c34_args_after_script.sh:3: 1 argument of src/train.py not checked" in errors


# -- any bytes


@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
def test_no_truncation_and_no_mutation_of_a_case_raises_anything_but_a_refusal(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for name in NAMES:
        text = (CASES / name).read_bytes()
        at, other = chance.randrange(len(text) + 1), chance.choice(NAMES)
        mutated = bytearray(text)
        for _ in range(3):
            if mutated:
                mutated[chance.randrange(len(mutated))] = chance.choice(b"\"'\\{}[]:-,$#\n \t(<`&1aN\x00")
        for changed in (text[:at], text[:at] + (CASES / other).read_bytes(), bytes(mutated)):
            (tmp_path / name).write_bytes(changed)
            with contextlib.suppress(ToolkitError):
                lint_paths([tmp_path / name])
                fixed_text(tmp_path / name)


def test_a_folder_of_a_hundred_files_is_linted_at_once_without_torch(tmp_path: Path) -> None:
    for number in range(100):
        name = NAMES[number % len(NAMES)]
        (tmp_path / f"{number}_{name}").write_bytes((CASES / name).read_bytes())
    code = f"import sys; from toolkit.cli.program import main; sys.argv = ['toolkit', 'lint', {str(tmp_path)!r}]\n"
    code += "import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.strip().endswith("False"), ended.stderr
