"""Linting any file: findings, or one clear error."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from preset_files import write

from toolkit.cli.program import main
from toolkit.errors import ToolkitError
from toolkit.lint import fixed_text, lint_document, lint_paths
from toolkit.lint.document import load_document, read_text

ROOT = Path(__file__).parents[2]
OUR_FILES = [
    *sorted((ROOT / "accelerate_configs").glob("*.yaml")),
    *sorted((ROOT / "ds_configs").glob("*.json")),
    *sorted((ROOT / "examples").glob("*.yaml")),
]

# -- our own files


def test_our_presets_and_examples_have_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # presets name their JSON relative to the root
    assert len(OUR_FILES) >= 11
    linted = lint_paths(OUR_FILES)
    assert linted.findings == []
    assert {Path(file).resolve() for file in linted.files} == set(OUR_FILES)


# -- fuzzing

SEEDS = {
    **{path.name: path.read_text() for path in OUR_FILES},
    "all.yaml": "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: no\nparallelism_config:\n"
    "  parallelism_config_dp_replicate_size: 2\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: NO_SHARD,\n"
    "  fsdp_reshard_after_forward: X, fsdp_state_dict_type: FULL_STATE_DICT}\n",
    "trainer.yaml": "learning_rate: &a 1e-4\nfsdp: [full_shard]\nfsdp_config:\n  version: 2\nfp16: true\nbf16: *a\n"
    "save_strategy: no\ndeepspeed: ds.json\nsave_only_model: true\nwarmup_ratio: 0.1\n",
    "ds.json": '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "sub_group_size": 0},\n'
    ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "train_batch_size": 10, "fp16": {"enabled": true}}',
}
PIECES = [
    *("{", "}", "[", "]", ":", ",", '"', "'", "\n", "\t", " ", "- ", "&a ", "*a", "<<: ", "!!", "!!int ", "? ", "|\n"),
    *("!!python/object/apply:os.system ", "%YAML 9\n", "---\n", "...\n", "#", "\\", "\\u", "\x00", "\x7f", "\ufeff"),
    *("null", "true", "no", "NO", "1e999", ".inf", "-.nan", "0x", "0b2", "1:2:3", "2001-99-99", "~", "é", "\U0001f600"),
    *("9" * 5000, "[" * 60, "a: " * 9, "stage", "zero_optimization", "fsdp_config", "auto", "deepspeed", "NaN"),
]


def mutated(text: str, dice: random.Random) -> str:
    """Return the text with one to three changes."""
    for _ in range(dice.randint(1, 3)):
        text = changed(text, dice)
    return text


def changed(text: str, dice: random.Random) -> str:
    """Return the text with one change: a letter, a piece of syntax, or lines moved, repeated, cut or swapped."""
    at, to = sorted(dice.randrange(len(text) + 1) for _ in range(2))
    lines = text.split("\n")
    changes: list[Callable[[], str]] = [
        lambda: text[:at] + dice.choice(PIECES) + text[at:],
        lambda: text[:at] + chr(dice.randrange(1, 0x3000)) + text[at + 1 :],
        lambda: text[:at] + text[min(to, at + 12) :],
        lambda: text[:to] + text[at:to] + text[to:],
        lambda: "\n".join(dice.sample(lines, len(lines))),
        lambda: text[:at],
        lambda: text[:at] + dice.choice(PIECES) + text[min(to, at + 20) :],
    ]
    return dice.choice(changes)()


def test_mutated_files_give_findings_and_a_fix_that_can_be_read_or_one_clear_error(tmp_path: Path) -> None:
    dice, ends = random.Random(3), Counter[str]()
    for index in range(1500):
        name = dice.choice(sorted(SEEDS))
        path = write(tmp_path / f"of_{name}" / name, mutated(SEEDS[name], dice))  # alone: one names another
        try:
            found = lint_document(load_document(path))
        except ToolkitError as error:
            is_clear = str(path) in error.message and "\n" not in error.message
            ends["error" if is_clear else f"mutation {index}: {error.message}"] += 1
            continue
        json.dumps([dataclasses.asdict(finding) for finding in found]).encode()
        ends["found" if found else "clean"] += 1
        if found and (text := fixed_text(path)) != path.read_bytes().decode():
            read_text(text, str(path))
            ends["fixed"] += 1
    assert ends.keys() == {"error", "found", "clean", "fixed"}
    assert min(ends.values()) > 100  # the mutations produce all of them


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        (
            "a.yaml",
            "distributed_type: !!python/object/apply:os.system ['touch executed']",
            "names an object; nothing was",
        ),
        ("a.yaml", "", "contains NoneType, expected keys and values"),
        ("a.yaml", "{a: 1}: 2", "a key that is not a string"),
        ("a.yaml", "rows: 1\ncolumns: 2\n", "is neither an accelerate configuration nor"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_file_that_is_not_a_configuration_is_refused_with_the_reason(
    name: str, text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ToolkitError) as caught:
        lint_paths([Path(name)])
    assert why in caught.value.message
    assert not (tmp_path / "executed").exists()


def test_a_missing_file_or_one_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    (tmp_path / "empty").mkdir()
    expected = {"a.yaml": "is not UTF-8 text: byte 3", "b.yaml": "no such file", "empty": "no configuration in"}
    for name, message in expected.items():
        with pytest.raises(ToolkitError, match=message):
            lint_paths([tmp_path / name])


def test_positions_are_right_after_characters_of_several_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# é 😀\ndistributed_type: FSDP  # 😀\nfsdp_config: {fsdp_versoin: 2}\n")
    assert fixed_text(tmp_path / "a.yaml").splitlines()[2] == "fsdp_config: {fsdp_version: 2}"


# -- folders


def test_a_folder_with_pipes_devices_links_in_circles_and_bombs_is_linted_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    os.mkfifo(folder / "pipe.yaml")
    (folder / "device.json").symlink_to("/dev/zero")
    (folder / "circle.yaml").symlink_to("circle.yaml")
    (folder / "inside" / "above").symlink_to(folder)
    levels = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 15)]
    (folder / "bomb.yaml").write_text("\n".join(["distributed_type: FSDP", "k0: &k0 [x, x]", *levels]))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "data.json").write_text(json.dumps(list(range(50_000))))
    (folder / "inside" / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    linted = lint_paths([folder])
    assert [Path(file).name for file in linted.files] == ["fsdp.yaml"]
    assert [finding.rule for finding in linted.findings] == ["fsdp1-by-omission"]
    assert linted.unreadable == []


def test_a_folder_of_more_files_than_any_repository_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.lint.check.MAX_FILES", 1)
    for number in range(2):
        (tmp_path / f"{number}.yaml").touch()
    with pytest.raises(ToolkitError, match=r"more than 1 YAML, JSON and shell files") as refused:
        lint_paths([tmp_path])
    assert refused.value.hint == "name a folder inside it, or files"


def test_a_key_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "\x1b[2J\nerror: done": 1}))
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(path)])
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    assert "\x1b" not in printed
    assert r"\x1b[2J\nerror: done" in printed
