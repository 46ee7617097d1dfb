"""The README.md of a trained folder: its facts, its front matter, and its Python, which runs."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from launching import nightly, read

from toolkit.demo.assets import DATA_ATTRIBUTION
from toolkit.record.folder import RunFolder
from toolkit.train.model_card import write_model_card

pytestmark = pytest.mark.launch
Start = Callable[..., Path]


@pytest.fixture
def adapter_folder(start: Start) -> Path:
    return start("ddp", "--lora_r", "4", "--val_size", "0.1")


def test_the_card_of_an_adapter_has_what_was_trained_and_no_path(adapter_folder: Path, tiny_model: Path) -> None:
    text = (adapter_folder / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert (front["library_name"], front["base_model"]) == ("peft", "tiny-llama")
    assert {"finetune-toolkit", "sft", "lora"} <= set(front["tags"])
    measured = read(adapter_folder / "run.json")["measured"]
    expected = [f"faq-en-alpaca.jsonl, 453 rows; {DATA_ATTRIBUTION}"]
    expected += ["LoRA, r 4, alpha 8, on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"]
    expected += ["Preset | ddp, ranks: 2 (cpu)", "Steps | 3, each of 4 sequences of up to 64 tokens; "]
    expected += ["Learning rate | 0.001, linear, adamw_torch"]
    expected += [f"Loss | {measured['first_loss']:.4f} in the first step, {measured['last_loss']:.4f} in the last, "]
    expected += [" evaluated |", "engine ddp, sharding replicate, compute_dtype float32, master_dtype float32"]
    expected += ["licence: see the base model"]
    for fact in expected:
        assert fact in text
    assert not re.search(r"[\s'\"`(]/\w", text), "a path of this machine"
    assert "None" not in text
    assert str(tiny_model.parent) not in text


@pytest.mark.parametrize("method", nightly("adapter", "full"))
def test_the_python_of_a_card_loads_the_model_and_answers(start: Start, adapter_folder: Path, method: str) -> None:
    folder = adapter_folder if method == "adapter" else start("ddp")
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip()


@pytest.mark.nightly
def test_a_run_ends_with_what_to_do_next(start: Start, adapter_folder: Path) -> None:
    last = (adapter_folder / "train.log").read_text().splitlines()[-1]
    assert last.startswith(f"next: the Python in {adapter_folder}/README.md loads the model and answers; `toolkit ")
    command = re.findall(r"`toolkit (.*?)`", last)[0].replace("FOLDER", f"{adapter_folder}-merged").split()
    subprocess.run([sys.executable, "-m", "toolkit", *command], check=True)
    assert Path(f"{adapter_folder}-merged", "model.safetensors").is_file()
    assert "--merge-lora" not in (start("ddp") / "train.log").read_text()


def test_a_card_that_somebody_wrote_or_edited_is_kept_and_ours_is_replaced(
    adapter_folder: Path, tmp_path: Path
) -> None:
    folder = RunFolder(Path(shutil.copytree(adapter_folder, tmp_path / "run")))
    card = folder.path / "README.md"
    ours = card.read_text()
    card.write_text(ours + "\nUse it with care.\n")
    assert "was kept" in write_model_card(folder)
    assert card.read_text().endswith("with care.\n")
    card.write_text("# Mine\n")
    assert write_model_card(folder).startswith(f"{card} is yours, and was kept")
    assert card.read_text() == "# Mine\n"
    card.write_text(ours)
    folder.update_run(finished="2020-01-01T00:00:00")
    write_model_card(folder)
    assert "Date | 2020-01-01 |" in card.read_text()
