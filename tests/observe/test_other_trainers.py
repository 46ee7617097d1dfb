"""Nothing assumes a causal language model: other models, Trainers and collators are verified and recorded too."""

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launching import ROOT, SCRIPTS, accelerate_launch, nightly_launch, read, torchrun_observed

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows

SCRIPT = SCRIPTS / "other_trainers.py"
# Tokens, tokens without padding and supervised tokens of a step of two rows.
COUNTS: dict[str, tuple[int | None, ...]] = {
    **{"own": (None, None, None), "tuple": (None, None, None), "vision": (None, None, None)},
    **{"seq2seq": (16, 12, 8), "tokens": (16, 12, 12), "images_and_text": (16, 12, None)},
    **{"optimizer": (16, 12, 14), "sentences": (18, 18, None)},
}
DAILY = [("vision", "zero2")]
CASES = [(mode, preset) for mode in COUNTS for preset in ("ddp", "zero2", "fsdp2")]
# accelerate 1.15 puts T5's shared embedding in two groups of FSDP2, which torch refuses.
# transformers refuses an optimizer from the script under FSDP, and drops it under DeepSpeed.
NOT_RUN = [("sentences", "zero2"), ("seq2seq", "fsdp2"), ("optimizer", "fsdp2"), ("optimizer", "zero2")]
# transformers' classes name their embeddings as layers too, and accelerate 1.15 shards those twice.
LAYERS = {"sentences": "BertLayer", "tokens": "BertLayer", "vision": "ViTLayer"}
NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in CASES if case not in (*DAILY, *NOT_RUN)]


def launched(mode: str, preset: str, folder: Path, **variables: str) -> CompletedProcess[str]:
    words = ["--output-dir", str(folder / "run"), "--require", preset, str(SCRIPT), mode, str(folder / "out")]
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    return accelerate_launch(config, *words, module="toolkit.observe", variables=variables)


@pytest.mark.launch
@pytest.mark.parametrize(("mode", "preset"), [*DAILY, *NIGHTLY])
def test_a_trainer_of_any_model_is_verified_and_its_batches_are_counted(mode: str, preset: str, tmp_path: Path) -> None:
    layers = {"FSDP_TRANSFORMER_CLS_TO_WRAP": LAYERS[mode]} if preset == "fsdp2" and mode in LAYERS else {}
    ended = launched(mode, preset, tmp_path, **layers)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"verified: {preset} (" in ended.stdout
    folder = RunFolder(tmp_path / "run")
    rows = [row for rank in (0, 1) for row in read_rows(folder.rank_rows(rank))]
    assert [row.step for row in rows] == [1, 2, 1, 2]
    assert {(row.tokens, row.non_padding_tokens, row.supervised_tokens) for row in rows} == {COUNTS[mode]}
    assert len({row.batch_sha256 for row in rows}) == 4
    ranks: list[dict[str, Any]] = read(folder.attestation_json)["ranks"]
    assert {reading["optimizer_class"] for reading in ranks} == {"torch.SGD" if mode == "optimizer" else "torch.AdamW"}


@nightly_launch
def test_an_optimizer_of_the_script_that_deepspeed_replaces_ends_the_run(tmp_path: Path) -> None:
    ended = launched("optimizer", "zero2", tmp_path)
    assert ended.returncode == 1
    assert "optimizer_class on rank 0 is torch.AdamW, expected torch.SGD" in ended.stderr


@nightly_launch
def test_a_model_whose_layers_fsdp2_does_not_know_is_refused_with_what_names_them(tmp_path: Path) -> None:
    ended = launched("own_whole", "fsdp2", tmp_path)
    assert ended.returncode == 1
    assert "sharding on rank 0 is shard_grad_op, expected full_shard" in ended.stderr
    assert "hint: FSDP2 gathers this model as a whole, since its layers are not known: name their class" in ended.stderr


@nightly_launch
@pytest.mark.parametrize(("mode", "preset"), [("deepspeed", "zero3"), ("fsdp", "fsdp2")])
def test_a_script_that_chooses_its_engine_itself_is_verified_under_torchrun(
    mode: str, preset: str, tiny_model: Path, tmp_path: Path
) -> None:
    its_own = [str(ROOT / "ds_configs" / "zero3.json"), str(tiny_model)]
    ended = torchrun_observed(
        "--output-dir", str(tmp_path / "run"), "--require", preset, str(SCRIPT), mode, str(tmp_path / "out"), *its_own
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"verified: {preset} (" in ended.stdout
