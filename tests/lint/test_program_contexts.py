"""Files of TRL, axolotl, LLaMA-Factory and ms-swift in projects that say whose they are, and at which version."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from toolkit.convert.programs import program_schemas
from toolkit.lint.check import lint_paths
from toolkit.lint.findings import Finding

TRL = "model_name_or_path: a/b\ndataset_name: c/d\noutput_dir: o\nuse_peft: true\n"
OLD_TRL = f"{TRL}max_seq_length: 2048\n"
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\nnum_epochs: 1\nadapter: lora\nval_set_size: 0.1\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\ndataset: x\noutput_dir: o\n"
SWIFT = "model: a/b\ndataset: [x]\noutput_dir: o\nsplit_dataset_ratio: 0.01\n"
OLD_SWIFT = f"{SWIFT}train_type: lora\n"
COMMAND = "trl sft --model_name_or_path a/b --dataset_name c --max_seq_length 1024 --output_dir o"
DPO = "--model_name_or_path a/b --dataset_name c/d --beta 0.1 --bf16 --do_train --my_rows x --max_prompt_length 9\n"
PIN = "trl==0.11.4"


def unknown_settings(folder: Path, files: dict[str, str]) -> list[Finding]:
    """Lint a project, and return what is said of settings that a program does not have."""
    for name, text in ({".git/HEAD": ""} | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    found = lint_paths([folder], skips_others=True).findings
    return [each for each in found if each.rule.startswith("unknown-") and each.rule.endswith("-setting")]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("env/docker/requirements.txt", PIN),
        ("a/b/c/requirements-gpu.txt", PIN),
        ("requirements/train.txt", PIN),
        ("constraints.txt", PIN),
        ("conda.yaml", f"dependencies:\n- pip:\n  - {PIN}\n"),
        ("cloud/environments/conda_env.yml", f"dependencies:\n- pip:\n  - {PIN}\n"),
        ("docker/gpu/Dockerfile", f"RUN pip install torch \\\n  {PIN}\n"),
        ("docker/train.Dockerfile", f"RUN pip install {PIN}\n"),
        ("notebooks/train.ipynb", f'{{"cells": [{{"source": ["!pip install -q \\"{PIN}\\" peft"]}}]}}'),
        ("pixi.toml", '[pypi-dependencies]\ntrl = "==0.11.4"\n'),
        ("Pipfile", '[packages]\ntrl = "==0.11.4"\n'),
        ("cog.yaml", "build:\n  python_packages:\n    - trl==0.11.4\n"),
        ("guide/install.md", f"```\npip install {PIN}\n```\n"),
        ("scripts/prepare.sh", f"pip install {PIN}\n"),
        ("setup.sh", "pip install git+https://github.com/huggingface/trl.git@v0.11.4\n"),
        ("setup.sh", "git clone --depth 1 -b v0.11.4 https://github.com/huggingface/trl.git\n"),
    ],
)
def test_a_project_asks_for_an_older_version_in_any_of_its_files(file: str, text: str, tmp_path: Path) -> None:
    findings = unknown_settings(tmp_path, {"configs/a.yaml": OLD_TRL, file: text})
    assert [(each.level, "the project asks for trl" in each.message) for each in findings] == [("note", True)]


@pytest.mark.parametrize(
    "files",
    [
        {"run.sh": f"pip install {PIN}\n{COMMAND}\n"},
        {"task.yaml": f"resources: {{}}\nsetup: pip install {PIN}\nrun: |\n  {COMMAND}\n"},
        {"job.yaml": f"apiVersion: v1\nspec:\n  args:\n  - |\n    pip install {PIN}\n    {COMMAND}\n"},
    ],
)
def test_what_a_script_installs_itself_is_its_version(files: dict[str, str], tmp_path: Path) -> None:
    assert [each.level for each in unknown_settings(tmp_path, files)] == ["note"]


@pytest.mark.parametrize(
    "files",
    [
        {"one/requirements.txt": "trl==1.16.0\n", "two/requirements.txt": PIN},
        {"requirements.txt": f"# {PIN}\ntrl==1.16.0\n"},
        {"requirements.txt": "trl>=1\n", "serve.sh": f"pip install {PIN}\nvllm serve a/b\n"},
        {"requirements.txt": "trl==1.16.0\n", "eval_requirements.txt": PIN},
        {"requirements.txt": "trl>=1.16\n", "bench/client/requirements.txt": PIN},
    ],
)
def test_the_nearest_exact_version_decides_and_a_comment_does_not(files: dict[str, str], tmp_path: Path) -> None:
    assert [each.level for each in unknown_settings(tmp_path, {"one/a.yaml": OLD_TRL} | files)] == ["error"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (OLD_TRL, "trl==0.19.1", "trl==1.2.0"),
        (f"{AXOLOTL}datasets: []\nrelora_warmup_steps: 10\n", "axolotl==0.10.1", "axolotl==0.18.0"),
        (f"{FACTORY}ray_run_name: x\n", "llamafactory==0.9.3", "llamafactory==0.9.5"),
        (OLD_SWIFT, "ms-swift==4.0.4", "ms-swift==4.2.0"),
        (f"{SWIFT}tuner_type: lora\nnum_infer_workers: 1\n", "ms-swift==3.5.3", "ms-swift==3.6.0"),
        # each method's class at its time
        (f"{TRL}max_prompt_length: 9\nnum_generations: 2\n", "trl==0.27.2", "trl==0.28.0"),
        (f"{TRL}max_prompt_length: 9\nprecompute_ref_log_probs: true\n", "trl==0.28.0", "trl==0.29.0"),
        (f"{TRL}torch_dtype: auto\n", "trl>=0.27\ntransformers==4.55.0", "trl>=0.27\ntransformers==4.57.0"),
    ],
)
def test_a_setting_is_unknown_from_the_version_that_dropped_it(file: str, old: str, new: str, tmp_path: Path) -> None:
    levels = [
        [each.level for each in unknown_settings(tmp_path, {"a.yaml": file, "requirements.txt": pin})]
        for pin in (old, new)
    ]
    assert levels == [["note"], ["warning" if "axolotl" in new else "error"]]  # axolotl drops it


def test_versions_of_trl_that_drop_a_setting_without_a_word_do_not_refuse_the_file(tmp_path: Path) -> None:
    text = f"{TRL}num_generations: 2\nvllm_device: auto\n"
    for pin, said in (("0.18.0", ("warning", "drops it")), ("0.19.0", ("error", "refuses the file"))):
        (finding,) = unknown_settings(tmp_path, {"a.yaml": text, "requirements.txt": f"trl=={pin}\n"})
        assert (finding.level, said[1] in finding.message) == (said[0], True)


def test_code_that_names_a_program_without_its_version_gets_a_fix_that_does(tmp_path: Path) -> None:
    files = {"a.yaml": OLD_SWIFT, "score.py": "import re\n", "README.md": "pip install ms-swift\n"}
    findings = unknown_settings(tmp_path, files)
    assert [(each.level, each.fix) for each in findings] == [
        ("warning", "if you run ms-swift 4.1.0 or newer: `tuner_type`")
    ]


def test_a_name_that_came_late_is_named_with_the_one_before_it(tmp_path: Path) -> None:
    files = {
        "a.yaml": f"{AXOLOTL}datasets: []\neval_table_size: 5\neval_table_max_new_tokens: 5\n",
        "requirements.txt": "axolotl==0.12.2\n",
    }
    assert ["eval_max_new_tokens" in each.fix for each in unknown_settings(tmp_path, files)] == [True]


@pytest.mark.parametrize(
    ("files", "level"),
    [
        # the project's own code reads the setting
        ({"a.yaml": f"{AXOLOTL}datasets: []\nmax_length: 5\n", "x.py": 'length = config["max_length"]\n'}, "note"),
        ({"a.yaml": f"{AXOLOTL}datasets: []\neval_table_size:\neval_table_max_new_tokens: 5\n"}, "note"),  # off
        # a class of TRL in a parser that refuses the rest, beside a class of the script
        ({"a.sh": f"accelerate launch x.py {DPO}", "requirements.txt": "trl>=1.7\n",
          "x.py": "class A:\n    my_rows: str\nHfArgumentParser((A, DPOConfig)).parse_args_into_dataclasses()\n"},
         "error"),
        # a manifest of the project, until something names it
        ({"a.yaml": f"{SWIFT}tuner_type: lora\nframework: x\n"}, "note"),
        ({"a.yaml": f"{SWIFT}tuner_type: lora\nframework: x\n", "README.md": "swift sft a.yaml\n"}, "warning"),
        # rows that a script names by a key of its own
        ({"a.yaml": f"{AXOLOTL}data_path: x\ncutoff_len: 512\n"}, "note"),
        # a notebook starts the program
        ({"a.yaml": f"{FACTORY}max_seq_length: 5\n", "x.py": "import vllm\n",
          "x.ipynb": '{"cells": [{"source": ["!llamafactory-cli train a.yaml"]}]}'}, "error"),
    ],
)  # fmt: skip
def test_who_reads_a_file_decides_the_level(files: dict[str, str], level: str, tmp_path: Path) -> None:
    assert {each.level for each in unknown_settings(tmp_path, files)} == {level}


@pytest.mark.parametrize(
    "files",
    [
        {"a.yaml": f"ENV:\n  NPROC_PER_NODE: 2\n{SWIFT}tuner_type: lora\n"},
        {"a.sh": "accelerate launch scripts/finetune.py a.yaml --prepare_ds_only\n",
         "a.yaml": f"{AXOLOTL}datasets: []\n"},
    ],
)  # fmt: skip
def test_what_a_programs_command_takes_is_known(files: dict[str, str], tmp_path: Path) -> None:
    assert unknown_settings(tmp_path, files) == []


def test_options_of_an_images_own_command_are_no_lost_line(tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(
        "services:\n  serve:\n    image: vllm/vllm-openai\n    command: --model a --tensor-parallel-size 2\n"
        "  train:\n    image: x\n    command: accelerate launch --num_processes 2 --multi_gpu train.py\n"
    )
    assert lint_paths([tmp_path]).findings == []


def test_a_setting_that_a_program_dropped_is_none_that_it_has() -> None:
    for schema in program_schemas().values():
        assert schema.former
        assert schema.fields.isdisjoint(schema.former)


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root reads all without setpriv")
def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path: Path) -> None:
    files = {"setup.py": "", "a.yaml": "distributed_type: FDSP\n", "closed/inner/requirements.txt": "trl==0.9\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    as_others = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    (tmp_path / "closed").chmod(0)
    try:
        command = [*as_others, sys.executable, "-m", "toolkit", "lint", str(tmp_path / "a.yaml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    finally:
        (tmp_path / "closed").chmod(0o755)
    assert (done.returncode, "unknown-word" in done.stdout) == (1, True), done.stderr
