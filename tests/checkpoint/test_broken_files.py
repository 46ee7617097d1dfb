"""Whatever a file of a checkpoint holds, each command ends in two lines that name it, and writes nothing."""

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import exit_code
from launching import read
from mutations import mutate
from transformers import PretrainedConfig

from toolkit.checkpoint.model_definition import model_class
from toolkit.checkpoint.sharded_checkpoints import DcpFolder
from toolkit.cli.checkpoint import parse_size
from toolkit.errors import ToolkitError
from toolkit.record.checkpoints import add_checksums, checkpoint_files, commit_checkpoint, file_entries

Capsys = pytest.CaptureFixture[str]

SIZES = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Change = Callable[[Path], object]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete DDP checkpoint of a very small Llama, with optimizer states and fingerprint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.checkpoint.model_definition import MetaModel, ModelFiles

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain") / "checkpoint-6"
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    definition, named = MetaModel(ModelFiles(folder)), dict(model.named_parameters())
    groups = [{"params": [named[name] for name in names]} for names in definition.groups(definition.trainable)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which changes nothing, but makes the moments
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"base_lrs": [1e-3, 1e-3], "_last_lr": [1e-3, 1e-3]}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 6}')
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1, :4].tolist()
    facts = {"step": 6, "preset": "ddp", "engine": "ddp", "sharding": "replicate", "world_size": 2, "adapter": False}
    facts["fingerprint"] = {"input_ids": [1, 2, 3], "logits": logits, "compute_dtype": "float32"}
    commit(folder, facts)
    return folder


@pytest.fixture(scope="session")
def sharded(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a checkpoint of FSDP2."""
    out = tmp_path_factory.mktemp("sharded") / "checkpoint-6"
    assert exit_code("checkpoint", "convert", plain, out, "--preset", "fsdp2", "--num-processes", 2) == 0
    return out


def commit(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    entries = file_entries(folder, checkpoint_files(folder))
    moved = folder.rename(folder.with_name("moving"))
    commit_checkpoint(moved, folder, facts | {"files": entries})
    add_checksums(folder)


def changed(source: Path, tmp_path: Path, change: Change, *, signed: bool = True) -> Path:
    """A copy of a checkpoint with one change, which its manifest agrees with if `signed`."""
    copy = tmp_path / "run" / source.name
    shutil.copytree(source, copy, copy_function=os.link)
    facts = {k: v for k, v in read(copy / "manifest.json").items() if k not in ("files", "sha256")}
    change(copy)
    if signed:
        commit(copy, facts)
    return copy


def replace(path: Path, content: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def refusal(capsys: Capsys, command: str, checkpoint: Path, *options: str) -> str:
    out = checkpoint.parent.parent / "out"
    words = [command, str(checkpoint), *([str(out)] if command in ("export", "convert") else []), *options]
    words += ["--preset", "fsdp2", "--num-processes", "2"] if command == "convert" else []
    code = exit_code("checkpoint", *words)
    shown = capsys.readouterr()
    assert not out.exists()
    assert not list(checkpoint.parent.parent.glob(".*"))
    assert code == (2 if command in ("export", "convert") else 1), shown
    text = shown.err if code == 2 else shown.out
    assert len(text.splitlines()) <= (2 if command != "inspect" else 6), text
    assert max(map(len, text.splitlines())) < 800
    return text


def manifest(**values: Any) -> Change:
    def change(folder: Path) -> None:
        facts = {k: v for k, v in read(folder / "manifest.json").items() if k != "sha256"}
        replace(folder / "manifest.json", json.dumps(facts | values))

    return change


def write(name: str, content: str | bytes) -> Change:
    return lambda folder: replace(folder / name, content)


def config(**values: Any) -> Change:
    return lambda folder: replace(folder / "config.json", json.dumps(read(folder / "config.json") | values))


def optimizer(change: Callable[[Any], object]) -> Change:
    def apply(folder: Path) -> None:
        content = torch.load(folder / "optimizer.pt")
        change(content)
        (folder / "optimizer.pt").unlink()
        torch.save(content, folder / "optimizer.pt")

    return apply


def metadata(change: Callable[[Any], object]) -> Change:
    def apply(folder: Path) -> None:
        content = pickle.loads((folder / DCP_METADATA).read_bytes())
        change(content)
        replace(folder / DCP_METADATA, pickle.dumps(content))

    return apply


def set_all(entries: str, name: str, value: Any) -> Change:
    return metadata(lambda content: [setattr(entry, name, value) for entry in getattr(content, entries).values()])


DCP_METADATA = "pytorch_model_fsdp_0/.metadata"
ESCAPING = {"path": "../../secret", "bytes": 1, "sha256": ""}
MANIFESTS: list[tuple[Change, str]] = [
    (write("manifest.json", b"\xff\x00\xfe"), "not UTF-8"),
    (manifest(files=[ESCAPING]), r"files\[0\]\.path is '\.\./\.\./secret'"),
    (write("optimizer.pt", b"cut"), "optimizer.pt has 3 bytes, expected"),
    (manifest(fingerprint={"input_ids": [1], "logits": ["x"]}), r"fingerprint\.logits\[0\] is 'x'"),
    (lambda folder: ((folder / "manifest.json").unlink(), os.mkfifo(folder / "manifest.json")), "named pipe"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS)
def test_a_wrong_key_of_a_manifest_or_a_file_that_it_does_not_describe_is_named(
    change: Change, message: str, plain: Path, tmp_path: Path, capsys: Capsys
) -> None:
    checkpoint = changed(plain, tmp_path, change, signed=False)
    for command in ("inspect", "verify", "export"):
        text = refusal(capsys, command, checkpoint)
        assert re.search(message, text), text


WRONG_FILES: list[tuple[str, Change, str]] = [
    ("export", write("model.safetensors", b""), "model.safetensors is damaged"),
    (
        "export",
        lambda f: replace(f / "model.safetensors", (f / "model.safetensors").read_bytes()[:-9]),
        "is damaged: 23,903 bytes",
    ),
    ("export", write("model.safetensors.index.json", '{"weight_map": {"a": "../../s"}}'), r"weight_map\.a is '\.\./"),
    ("export", write("tokenizer.json", b"{"), "tokenizer.json, line 1: not JSON"),
    # Configurations that no model has are refused before one is built.
    ("export", config(hidden_size=10**12), "hidden_size is 1000000000000"),
    ("export", config(rope_scaling={"rope_type": "none"}), "no model can be built"),
    ("export", config(model_type="nothing", auto_map={"AutoConfig": "evil.Evil"}), "no model can be built"),
    ("export", config(attn_implementation="someone/kernel"), "names code on the hub"),
    ("convert", optimizer(lambda c: c.update(state=5, param_groups=[5])), "its states cannot be read"),
    ("convert", optimizer(lambda c: c["state"][1].update(exp_avg=torch.zeros(3))), "expected a tensor of"),
    ("convert", optimizer(lambda c: c["state"].pop(3)), "has no exp_avg for"),
    ("convert", optimizer(lambda c: c["param_groups"][0]["params"].pop()), "with frozen layers or a custom optimizer"),
    ("convert", optimizer(lambda c: c["state"][0].update(step=torch.tensor(float("nan")))), "step is nan, expected a"),
    ("convert", write("optimizer.pt", b""), "optimizer.pt is damaged"),
    ("convert", write("trainer_state.json", '{"global_step": "x"}'), "global_step"),
]
WRONG_METADATA: list[tuple[Change, str]] = [
    (write(DCP_METADATA, b""), "is damaged"),
    (metadata(lambda c: c.state_dict_metadata.clear()), "lacks model.embed_tokens.weight"),
    (set_all("state_dict_metadata", "size", torch.Size([10**12])), "more than its files"),
    (set_all("storage_data", "relative_path", "../../../secret"), "outside its folder"),
    (set_all("storage_data", "offset", 10**15), "beyond the end"),
    (lambda f: (f / DCP_METADATA).unlink(), "no such file"),
]


@pytest.mark.parametrize(
    ("command", "change", "message"),
    [*WRONG_FILES[:9], *(pytest.param(*each, marks=pytest.mark.nightly) for each in WRONG_FILES[9:])],
)
def test_a_wrong_file_is_reported_by_what_is_wrong_in_it(
    command: str, change: Change, message: str, plain: Path, tmp_path: Path, capsys: Capsys
) -> None:
    text = refusal(capsys, command, changed(plain, tmp_path, change))
    assert re.search(message, text), text


def test_wrong_distributed_metadata_is_refused(sharded: Path, tmp_path: Path, capsys: Capsys) -> None:
    for number, (change, message) in enumerate(WRONG_METADATA):
        text = refusal(capsys, "export", changed(sharded, tmp_path / str(number), change))
        assert re.search(message, text), text


def test_what_is_no_checkpoint_folder_is_refused(plain: Path, tmp_path: Path, capsys: Capsys) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / "pipe")
    for path in (loop, tmp_path / "pipe", plain / "config.json", tmp_path / "missing", tmp_path / ("x" * 300)):
        for command in ("inspect", "verify", "export"):
            out = [str(tmp_path / "out")] if command == "export" else []
            assert exit_code("checkpoint", command, path, *out) == 2
            assert len(capsys.readouterr().err.splitlines()) <= 2
    assert not (tmp_path / "out").exists()
    # So is an output folder that cannot be used.
    for out in (plain, plain / "inside", plain / "config.json", Path("/proc/1/x")):
        assert exit_code("checkpoint", "export", plain, out) == 2
        assert len(capsys.readouterr().err.splitlines()) <= 2
    assert not (plain / "inside").exists()
    # So is a size of shards that is none.
    for text in ("inf", "0", "-1", "1e400", "", "GB"):
        with pytest.raises(ToolkitError, match="--max-shard-size is "):
            parse_size(text)


@pytest.mark.parametrize("engine", ["plain", "sharded"])
def test_mutated_files_are_accepted_or_refused(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: Capsys
) -> None:
    """The same mutations in every run; the manifest agrees with them."""
    source: Path = request.getfixturevalue(engine)
    for number in range(6):
        chance, folder = random.Random(f"{engine} {number}"), tmp_path / str(number)
        name = chance.choice([path.relative_to(source) for path in source.rglob("*") if path.is_file()])
        signed = changed(source, folder, lambda copy, name=name, chance=chance: mutate(chance, copy / name))  # type: ignore[misc]
        to_fsdp2 = ("--preset", "fsdp2", "--num-processes", "2")
        for command in (
            ["inspect"],
            ["verify"],
            ["export", str(folder / "out")],
            ["convert", str(folder / "o"), *to_fsdp2],
        ):
            code, shown = exit_code("checkpoint", command[0], signed, *command[1:]), capsys.readouterr()
            assert code in (0, 1, 2), (number, name, command)
            assert "unexpected" not in shown.err, (number, name, shown.err)
            assert len(shown.err.splitlines()) <= 6, (number, name, shown.err)


def test_a_class_that_is_no_name_is_refused() -> None:
    with pytest.raises(ToolkitError, match="is of a 3, which transformers does not have"):
        model_class(PretrainedConfig(architectures=[3]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_shard_of_a_tensor_is_named(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    folder, (shard,) = DcpFolder(tmp_path, trust_pickle=False), tmp_path.glob("*.distcp")
    assert folder.read("weight").tolist() == [1.0] * 4
    shard.write_bytes(shard.read_bytes().replace(b"ctorch", b"\x50torch"))  # an opcode that no tensor has
    with pytest.raises(ToolkitError, match=f"{tmp_path} is damaged"):
        folder.read("weight")
