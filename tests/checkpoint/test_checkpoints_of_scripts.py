"""Checkpoints that somebody's own script wrote are exported as the model that the script itself saved, exactly."""

from pathlib import Path

import pytest
import torch
import transformers
from command_line import exit_code
from launching import ROOT, SCRIPTS, accelerate_launch
from safetensors.torch import load_file

from toolkit.checkpoint.hf_export import export, verify
from toolkit.checkpoint.inspect import inspect_all

DEPRECATED = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = [pytest.mark.launch, pytest.mark.filterwarnings(DEPRECATED)]

UNKNOWN = "no manifest: completeness unknown"
COMPLETE = ("--complete-saves",)
CLASSES = {
    **{"sft": "LlamaForCausalLM", "dpo": "LlamaForCausalLM", "reward": "LlamaForSequenceClassification"},
    **{"seq2seq": "T5ForConditionalGeneration", "tokens": "BertForTokenClassification"},
}
# A language model, its adapter, a head that is trained in full beside an adapter, and models that generate no text.
# FSDP2's checkpoints have no configuration without `--complete-saves`.
CASES = [*(("sft", preset, ()) for preset in ("ddp", "zero2", "zero3"))]
CASES += [*(("dpo-lora", preset, ()) for preset in ("ddp", "zero2", "zero3"))]
CASES += [*(("reward-lora", preset, COMPLETE) for preset in ("ddp", "zero2", "zero3", "fsdp2"))]
CASES += [*((kind, "fsdp2", COMPLETE) for kind in ("sft", "reward", "dpo-lora")), ("tokens", "zero3", ())]
CASES += [*(("seq2seq", preset, COMPLETE) for preset in ("ddp", "zero2", "zero3"))]


def trained(kind: str, preset: str, model: Path, folder: Path, *options: str) -> Path:
    """Train two steps on two ranks, and return the script's own output folder."""
    own = ["--output-dir", str(folder / "run"), *options, str(SCRIPTS / "saves_models.py")]
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    ended = accelerate_launch(config, *own, kind, str(model), str(folder / "out"), module="toolkit.observe")
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
    return folder / "out"


def reloaded(kind: str, folder: Path, base: Path, *, merged: bool = False) -> dict[str, torch.Tensor]:
    """The weights as `from_pretrained` and peft load them; nothing may be missing."""
    kind, _, adapter = kind.partition("-")
    made, heads = getattr(transformers, CLASSES[kind]), {"num_labels": 1} if kind == "reward" else {}
    if adapter and not merged:
        from peft import PeftModel

        model = PeftModel.from_pretrained(made.from_pretrained(base, **heads), folder)
        return {name: weight for name, weight in model.state_dict().items() if "lora_" in name or "score.mod" in name}
    model, loading = made.from_pretrained(folder, output_loading_info=True)
    assert [loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]
    return dict(model.state_dict())


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "preset", "options"), CASES, ids=str)
def test_an_exported_checkpoint_has_the_weights_that_the_script_saved_itself(
    kind: str, preset: str, options: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    output = trained(kind, preset, tiny_model, tmp_path, *options)
    export(tmp_path / "run", tmp_path / "exported")  # the run folder names the newest checkpoint
    saved = reloaded(kind, output / "trained", tiny_model)
    assert_equal(reloaded(kind, tmp_path / "exported", tiny_model), saved)
    assert any(bool((weight != 0).any()) for name, weight in saved.items() if "lora_B" in name or "lora" not in kind)
    found = verify(tmp_path / "run")
    assert (found.path, found.problems) == (str(output / "checkpoint-2"), [])
    assert [each.step for each in inspect_all(tmp_path / "run")] == [2, 1]
    assert [each.state for each in inspect_all(tmp_path / "run")] == ["complete" if options else UNKNOWN] * 2
    if kind.endswith("-lora"):
        from peft import PeftModel

        export(tmp_path / "run", tmp_path / "merged", merge_lora=True)
        merged = reloaded(kind, tmp_path / "merged", tiny_model, merged=True)
        made = getattr(transformers, CLASSES[kind.removesuffix("-lora")])
        base = made.from_pretrained(tiny_model, **({"num_labels": 1} if kind == "reward-lora" else {}))
        expected = PeftModel.from_pretrained(base, output / "trained").merge_and_unload().state_dict()
        torch.testing.assert_close(merged, dict(expected), rtol=0, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "preset"), [("own", "zero3"), ("own", "fsdp2"), ("plain", "fsdp2")])
@pytest.mark.parametrize("options", [(), COMPLETE], ids=str)
def test_weights_of_a_class_that_no_library_knows_are_exported_under_their_names(
    kind: str, preset: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = trained(kind, preset, tmp_path, tmp_path, *options)
    assert exit_code("checkpoint", "export", tmp_path / "run", tmp_path / "refused") == 2
    assert "`--weights-only`" in capsys.readouterr().err
    export(tmp_path / "run", tmp_path / "exported", weights_only=True)
    assert_equal(tensors(tmp_path / "exported"), tensors(output / "trained"))
    assert (tmp_path / "exported" / "config.json").exists() is (kind == "own" and (preset == "zero3" or bool(options)))
    assert verify(tmp_path / "run", weights_only=True).problems == []


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.nightly
def test_what_a_bare_fsdp2_checkpoint_lacks_is_named_with_the_option_that_gives_it(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("sft", "fsdp2", tiny_model, tmp_path / "full")
    checkpoint = tmp_path / "full" / "out" / "checkpoint-2"
    assert exit_code("checkpoint", "export", checkpoint, tmp_path / "refused") == 2
    assert "has no config.json, and no base model is recorded" in capsys.readouterr().err
    export(checkpoint, tmp_path / "exported", base_model=str(tiny_model))
    saved = reloaded("sft", tmp_path / "full" / "out" / "trained", tiny_model)
    assert_equal(reloaded("sft", tmp_path / "exported", tiny_model), saved)
    output = trained("reward-lora", "fsdp2", tiny_model, tmp_path / "adapter")
    words = ["checkpoint", "export", output / "checkpoint-2", tmp_path / "refused", "--base-model", tiny_model]
    assert exit_code(*words) == 2
    assert "adapter_config.json" in capsys.readouterr().err
    (output / "trained" / "adapter_config.json").rename(output / "adapter_config.json")
    assert exit_code(*words[:3], tmp_path / "adapter-exported") == 0
