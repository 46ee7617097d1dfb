"""Bad input through the command line: exit 2, two lines, no traceback, nothing written, no rank started."""

from pathlib import Path

import pytest
import yaml
from command_line import run_command
from launching import LLAMA_8B_CONFIG

from toolkit.record.folder import write_json

GOOD = '{"instruction": "Hej", "output": "Hello"}\n'
FILES = {
    "rows.jsonl": GOOD * 32,
    "unknown-key.yaml": "learning_rat: 1e-4\n",
    "mine.py": "",
    "axolotl.yaml": "base_model: a/b\nmicro_batch_size: 2\ndatasets: [{path: c/d}]\nnum_epochs: 1\n",
    "trl.yaml": "model_name_or_path: a/b\ndataset_name: c/d\nmax_length: 512\nuse_peft: true\n",
    "swift.yaml": "model: a/b\ntrain_type: lora\ndataset: [c/d]\n",
    "model/config.json": "{}",
}
NO_FLAG = "see `toolkit train --help`"
# What is typed, the beginning of the error, and that of the hint where it matters. `train` and `job` would run as they
# are, with `output_dir`; a comparison has `model`, the job without an output folder.
REFUSED = [
    ("{train} -- {job} --dataset {here}/row.jsonl", "no such data file: {here}/row.jsonl", "did you mean `{here}/rows"),
    ("{train} -- {here}/unknown-key.yaml", "{here}/unknown-key.yaml: unknown key 'learning_rat'",
     "did you mean `learning_rate`?"),
    ("{train} --timeout-minute 1 -- {job}", "no such option: --timeout-minute", NO_FLAG),
    ("{train} -- {here}/axolotl.yaml", "{here}/axolotl.yaml: unknown key 'datasets'",
     "a file of axolotl: `toolkit train --module axolotl.cli.train -- {here}/axolotl.yaml` runs it; or `toolkit "),
    ("{train} --preset {here}/axolotl.yaml", "{here}/axolotl.yaml: unknown key 'base_model'", "a file of axolotl: "),
    ("{train} -- {here}/trl.yaml", "{here}/trl.yaml: unknown key 'use_peft'", "a file of TRL: `toolkit train --module"),
    ("{train} -- {here}/swift.yaml", "{here}/swift.yaml: unknown key 'model'",
     "a file of ms-swift: `toolkit plan --config {here}/swift.yaml`; `toolkit train --module swift.cli.sft"),
    ("{compare} --preset ddp -- {here}/axolotl.yaml", "{here}/axolotl.yaml: unknown key", "a file of axolotl: "),
    ("train --cpu --module trl.scripts.sft -- --dataset_name demo", "--dataset_name demo: TRL reads no rows",
     "name a data set in a format of TRL's"),
    ("{train} -- {job} --model x", "unknown argument --model", "the base model is `--model_name_or_path`"),
    ("train --script mine", "script mine does not exist", "did you mean `mine.py`?"),
    ("{train} -- {job} --use_peft", "unknown argument --use_peft", "leave it out: `--lora_r 16` alone"),
    ("{train} --no-cpu -- {job}", "2 processes, but 0 GPUs are visible here", "`--cpu` trains on the CPU"),
    ("{train} -- {job} --model_name_or_path {here}/model",
     "model folder {here}/model has no weights (*.safetensors or *.bin)", ""),
    ("{train} -- {job} --output_dir /proc/out", "output_dir /proc/out cannot be written: ", ""),
    ("{train} -- {model}", "--output_dir is missing", "add `--output_dir ...` behind the `--` that ends the"),
    ("rehearse --num-processes 2", "missing option '--preset'", "see `toolkit rehearse --help`"),
    ("train --preset zero2 --num-processes two", "invalid value for '--num-processes'", ""),
    ("trian", "no such command 'trian'. Did you mean 'train'?", "see `toolkit --help`"),
    ("observe mine.py", "no such command 'observe'", "it is `python -m toolkit.observe SCRIPT ...`"),
    ("checkpoint export a --output b", "no such option: --output-dir", "see `toolkit checkpoint export --help`"),
    ("simulate failures --num-processes 8", "no such option: --num-processes", "it is `--gpus 8`"),
    ("recommend {here}/axolotl.yaml --gpu h100", "{here}/axolotl.yaml is no model", "`toolkit plan --config {here}/a"),
    ("preset zero3", "no such command 'zero3'", "`toolkit preset show ...`, `toolkit preset export ...`"),
    (f"plan {LLAMA_8B_CONFIG} --num-processes", "option '--num-processes' requires an argument", ""),
    ("train --preset fsdp2_tp --num-processes 8 --cpu -- {job} --tp 4",
     "--tp 4 does not work for this model: 4 does not divide its 2 key-value heads", "`--tp 2`"),
    ("{compare} --preset ddp -- {model} --output_dir elsewhere", "--output_dir is set by the comparison itself", ""),
    ("{compare} --preset ddp -- {model} --max_steps 2", "--max_steps 2 leaves no timed step after 2 untimed ones", ""),
    ("{compare} --preset ddp --scaling strong -- {model}", "--scaling needs several numbers of processes", ""),
    ("{compare} --preset ddp --trial-minutes 0 -- {model}", "--trial-minutes is 0, expected more than 0", ""),
    ("{compare} --preset zeropp --cpu -- {model}", "preset 'zeropp' does not run on a CPU", ""),
    ("{compare} --preset zero2 --baseline ddp -- {model}",
     "--baseline ddp is not among the presets compared: zero2", ""),
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, without a GPU, with a job that would run; each test spoils one thing in it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    job = {"model_name_or_path": str(tiny_model), "dataset": str(tmp_path / "rows.jsonl"), "max_steps": 8}
    for name, text in {**FILES, "job.yaml": yaml.safe_dump(job)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def words_of(line: str, here: Path) -> list[str]:
    train, model = "train --preset zero2 --num-processes 2", f"{here}/job.yaml"
    compare, job = f"compare --num-processes 2 --output {here}/out", f"{model} --output_dir {here}/out"
    return line.format(here=here, train=train, compare=compare, model=model, job=job).split()


def check_refusal(ended: tuple[int, str, str], error: str, hint: str) -> None:
    code, out, err = ended
    assert (code, out) == (2, ""), err
    first, *second = err.splitlines()
    assert first.startswith(f"error: {error}")
    assert len(second) <= 1, err
    assert all(line.startswith(f"  hint: {hint}") for line in second or ([""] if hint else []))


@pytest.mark.parametrize(("line", "error", "hint"), REFUSED, ids=[line for line, _, _ in REFUSED])
def test_what_cannot_run_is_refused(
    line: str, error: str, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(here)
    ended = run_command(words_of(line, here), capsys)
    check_refusal(ended, error.format(here=here), hint.format(here=here))
    assert contents(here) == before
    assert not (here / "out").exists()


def test_a_finished_run_is_never_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(here / "out" / "run.json", {"status": "completed"})
    (here / "out" / "model.safetensors").write_text("trained for a week")
    before = contents(here)
    ended = run_command(words_of("{train} -- {job}", here), capsys)
    hint = "name another folder: `--output_dir DIR`; `--overwrite_output_dir true` replaces the run"
    check_refusal(ended, f"{here}/out already holds a finished run", hint)
    assert contents(here) == before
