"""Secrets: told from ordinary words, hidden in records and messages, and passed to a run's processes unseen."""

import copy
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import toolkit

from toolkit.cli.program import main
from toolkit.errors import ToolkitError
from toolkit.files import secrets
from toolkit.files.secrets import (
    SECRETS_VARIABLE,
    UnwrittenText,
    hide_secrets,
    hide_words,
    is_secret_name,
    refuse_hidden,
    remember_secrets,
    separate_secrets,
)
from toolkit.job.argument_reading import argument_types
from toolkit.launch.command import LaunchCommand, command_of
from toolkit.launch.options import TrainOptions
from toolkit.launch.process import run_command
from toolkit.presets import load_preset

TOKEN = "hf_FakeFakeFakeFakeFakeFakeFakeFake00"  # by its shape
PLAIN = "correct-horse-battery"  # only by the name of its argument
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"  # has the shape of a commit


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_remembered", set())


SECRET_NAMES = """
hub_token --hub-token token HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY apiKey password client_secret PGPASSWORD
Authorization private_key GITHUB_TOKEN_2 use_auth_token hubToken wandb_key key SOME_KEY
"""
ORDINARY_NAMES = """
tokenizer pad_token eos_token_id num_tokens max_tokens token_type_ids TOKENIZERS_PARALLELISM lora_target_modules PWD
include_num_input_tokens_seen GIT_AUTHOR_NAME HF_TOKEN_PATH monkey k_proj output_dir template_thinking_key sort_key
"""
SHAPES = """
hf_FakeFakeFakeFakeFakeFakeFakeFake00 sk-proj-abcDEF0123456789abcdef ghp_abcdefghijklmnop0123456789abcdefghij
AKIAIOSFODNN7EXAMPLE github_pat_11ABCDEFG0123456789 xoxb-0123456789-abcdef glpat-abcdefghij0123456789
"""
ORDINARY_TEXTS = [
    *("hf_transfer", "hf_hub_download", "hf_quantizer_bnb", "hf-internal-testing/tiny", "scikit: sk-learn-intelex"),
    *(WANDB_KEY, "sha256:" + 64 * "a", "--lora_target_modules q_proj k_proj", "https://a.b/c@d"),
    *("--hub_token is missing", "risk-adjusted-returns-of-AAPL", "--pad_token <pad> --num_tokens 12345678"),
]


def test_a_secret_is_known_by_its_name_and_an_ordinary_name_is_none() -> None:
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in ORDINARY_NAMES.split() if is_secret_name(name)] == []
    assert [name for name in argument_types() if is_secret_name(name)] == ["hub_token"]


def test_a_secret_is_known_by_its_shape_and_ordinary_text_is_kept() -> None:
    for around in ("it's {}.", "Authorization: Bearer {}", "x={}&y"):
        assert {hide_secrets(around.format(text)) for text in SHAPES.split()} == {around.format("***")}
    assert hide_secrets("https://me:password@hub.example/a") == "https://***@hub.example/a"
    assert hide_secrets(ORDINARY_TEXTS) == ORDINARY_TEXTS


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hub_token", PLAIN, "--max_steps", "8"], ["--hub_token", "***", "--max_steps", "8"]),
        ([f"--hub-token={PLAIN}"], ["--hub-token=***"]),
        (["--hub_token", "a", "b"], ["--hub_token", "***", "***"]),
        (["--run_name", f"mine {TOKEN}"], ["--run_name", "mine ***"]),
        (["--trackio", '{"a": {"api_key": "short"}, "b": [1]}'], ["--trackio", '{"a": {"api_key": "***"}, "b": [1]}']),
        (["--variant", f"a=ddp --hub_token {PLAIN}"], ["--variant", "a=ddp --hub_token ***"]),
        (["--lora_config", "use_dora=true", "my_token=abc"], ["--lora_config", "use_dora=true", "my_token=***"]),
        (["--model_init_kwargs", '{"pad_token":  "x"}'], ["--model_init_kwargs", '{"pad_token":  "x"}']),
        (["config.yaml", "--lora_target_modules", "k_proj"], ["config.yaml", "--lora_target_modules", "k_proj"]),
    ],
)
def test_the_words_of_a_command_are_shown_without_secrets(words: list[str], shown: list[str]) -> None:
    assert hide_words(words) == shown


def test_a_secret_of_the_environment_or_of_an_argument_is_hidden_wherever_it_occurs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("API_KEY", "no")
    remember_secrets({"hub_token": PLAIN, "max_steps": "12345678", "nested": {"api_key": "another-one"}})
    facts = {"a": [f"x{PLAIN}x", 3, None], "b": "another-one", "c": WANDB_KEY, "d": "12345678"}
    hidden = hide_secrets(facts)
    assert hidden == {"a": ["x***x", 3, None], "b": "***", "c": "***", "d": "12345678"}


# -- a run's processes


def command(*words: str) -> LaunchCommand:
    options = TrainOptions(preset="ddp", num_processes=2, training_arguments=words, cpu=True)
    return command_of(options, load_preset("ddp"))


def test_a_command_has_its_secrets_in_the_environment_and_not_where_others_read_it() -> None:
    launch = command("--hub_token", PLAIN, "--run_name", TOKEN).again()
    everybody_sees = json.dumps([launch.argv, launch.training_argv, launch.shown])
    assert (PLAIN in everybody_sees, TOKEN in everybody_sees) == (False, False)
    assert "--hub_token '***'" in launch.shown
    assert json.loads(launch.environment[SECRETS_VARIABLE]) == {"1": PLAIN, "3": TOKEN}


def test_a_rank_trains_with_the_token_that_the_launcher_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.train.arguments import LaunchContext, parse_args

    words = ["--model_name_or_path", "model", "--dataset", "rows", "--output_dir", str(tmp_path), "--hub_token", PLAIN]
    shown, added = separate_secrets(words)
    monkeypatch.setenv(SECRETS_VARIABLE, added[SECRETS_VARIABLE])
    arguments = parse_args(shown, LaunchContext(preset=None, world_size=None))
    assert arguments.training.hub_token == PLAIN
    assert list(arguments.argv) == [*words[:-1], "***"]
    assert SECRETS_VARIABLE not in os.environ  # no process inherits it


def test_no_secret_reaches_the_log_or_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    program = "import os, sys; print(os.environ['WANDB_API_KEY'], sys.argv[1], 'visible')"
    process = replace(command(), argv=[sys.executable, "-c", program, TOKEN])
    lines: list[str] = []
    run_command(process, tmp_path / "train.log", on_line=lines.append)
    assert lines == ["*** *** visible"]
    assert (tmp_path / "train.log").read_text() == "*** *** visible\n"


def test_what_is_pickled_or_represented_has_no_token() -> None:
    import torch

    token, file = UnwrittenText(PLAIN), io.BytesIO()
    torch.save({"hub_token": token}, file)
    assert PLAIN.encode() not in file.getvalue()
    assert repr(token) == "'***'"
    assert f"Bearer {copy.deepcopy(token)}" == f"Bearer {PLAIN}"


# -- records and messages


@pytest.mark.parametrize(
    "words",
    [
        *(["train", "--preset", "ddp", "--", *words] for words in (["--hub_tokn", TOKEN], ["--max_steps", TOKEN])),
        ["train", "--preset", "ddp", "--", "--hub_token", "a", PLAIN],
        ["plan", TOKEN, "--gpu", "h100"],
        ["compare", "--variant", f"=ddp --hub_token {PLAIN}", "--output-dir", "x", "--", "--seed", "1"],
    ],
)
def test_an_error_quotes_no_secret(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    printed = "".join(capsys.readouterr())
    assert ("error: " in printed, TOKEN in printed, PLAIN in printed) == (True, False, False)


def test_a_secret_copied_from_a_record_is_refused_by_name() -> None:
    for value in ("***", "https://***@hub.example", '{"token": "***"}', {"token": "***"}):
        with pytest.raises(ToolkitError, match=r"--hub_token is .*never recorded"):
            refuse_hidden({"hub_token": value, "system_prompt": "***be brief***"})


# -- a real run


@pytest.mark.launch
def test_a_run_publishes_no_token(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> None:
    """One is in a training file, one has an ordinary name, and one is named on the command line."""
    (tmp_path / "rows.jsonl").write_text("\n".join(faq_alpaca.read_text().splitlines()[:20]) + "\n")
    job = {"hub_token": PLAIN[::-1], "model_name_or_path": tiny_model, "dataset": tmp_path / "rows.jsonl"}
    job |= {"max_seq_length": 64, "per_device_train_batch_size": 2}
    (tmp_path / "job.yaml").write_text("".join(f"{name}: {value}\n" for name, value in job.items()))
    words = ["job.yaml", "--hub_token", PLAIN, "--run_name", TOKEN, "--max_steps", "2", "--save_steps", "1"]
    words = ["train", "--preset", "ddp", "--cpu", "--num-processes", "2", "--", *words, "--output_dir", "run"]
    ended = toolkit(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "printed").write_text(ended.stdout + ended.stderr)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "job.yaml"]
    for secret in (TOKEN, PLAIN, PLAIN[::-1]):
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
    assert (tmp_path / "run" / "checkpoint-2" / "training_args.bin").is_file()
    assert "'--hub_token', '***'" in str(json.loads((tmp_path / "run" / "run.json").read_text())["training_arguments"])
