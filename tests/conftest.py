"""Shared by all tests: no network, the real model and data, a tiny model with a small vocabulary, and runs of it."""

import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from fork_server import HERE, SERVER_VARIABLE
from warm_popen import fork_runs

CLUSTER = "tests/cluster/"
# Read by one worker, which parses the toolkit's modules once.
SOURCES = ("tests/test_architecture.py", "tests/engines/test_seams.py")
# Files that launch nothing, and of which a site, a count or many commands take longest.
LONG_FILES = (
    *(*SOURCES, "tests/test_readme.py", "tests/test_mcp_server.py"),
    *("tests/page/test_page_in_a_browser.py", "tests/docs/test_site.py", "tests/tune/test_tune_command.py"),
)

BuildOnce = Callable[[str, Callable[[Path], object]], Path]

# Runs are forked that this process starts, and those that its children start: Python finds `sitecustomize` there.
fork_runs()
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))

# Before any test module imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # as `toolkit` sets it; otherwise no rank of a command would be forked

# Workers and the ranks that they start share the cores: several threads of one process would wait for each other in
# busy loops, which takes a few times as long as one thread.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Test modules, and the toolkit in each process that a test starts, are compiled once, whatever the caller's shell says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test depends on the terminal's size, which readline hands to the workers of a session, but not to the session.
for size in ("COLUMNS", "LINES"):
    os.environ.pop(size, None)

# A shell starts a background job with SIGINT and SIGQUIT ignored, and every process below would inherit that: Ctrl-C is
# tested, and a forked rank's signals are compared with a cold one's.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore the environment: libraries set variables (`TrainingArguments(deepspeed=...)` sets
    `ACCELERATE_USE_DEEPSPEED`), which the processes of the next test would inherit.

    The object is restored too: `datasets.Dataset.map(num_proc=...)` replaces `os.environ` by a copy, and a library that
    holds the old object (rich) would not see what the next test sets.
    """
    environment, before = os.environ, dict(os.environ)
    yield
    for current in (os.environ, environment):
        for name in current.keys() - before.keys():
            del current[name]
    os.environ = environment  # noqa: B003 -- the object itself, not its content
    os.environ.update(before)


@cache
def _has_gpu() -> bool:
    from toolkit.hardware.gpus import count_gpus

    return count_gpus() > 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import test modules without the garbage collector, which would look through all libraries again and again.

    Afterwards it seldom runs, for tests import more libraries: it took 15 % of the time of those that start no process.
    """
    from toolkit.observe.rank_process import garbage_collector_off

    with garbage_collector_off():
        collected = yield
    gc.set_threshold(100_000, 20, 20)
    return collected


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly = "TOOLKIT_NIGHTLY" in os.environ or "nightly" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("nightly") and not nightly:
            item.add_marker(pytest.mark.skip(reason="runs in make test-nightly"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
    if "PYTEST_XDIST_WORKER" in os.environ:  # the longest files first, so that no worker waits for them at the end
        run = [item for item in items if not item.get_closest_marker("skip")]
        launching = Counter(item.path for item in run if item.get_closest_marker("launch"))
        first = (CLUSTER, *LONG_FILES)
        items.sort(key=lambda item: (not item.nodeid.startswith(first), -launching[item.path]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, and one worker those that share something.

    Those of a cluster mostly wait, and share its processes; those of the sources share what they parsed.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            groups = (group[0] for group in ((CLUSTER,), SOURCES) if nodeid.startswith(group))
            return next(groups, None) or super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # keep the order of the collection
    return Scheduling(config, log)


def pytest_configure_node(node: Any) -> None:
    """Let all workers of the whole suite fork from one server, whose imports take as long as those of a worker."""
    from launching import fork_server

    if node.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        node.workerinput[SERVER_VARIABLE] = fork_server()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork what a test launches from a fork server, unless the test is about the cold start itself."""
    os.environ.pop(SERVER_VARIABLE, None)
    cold = item.get_closest_marker("cold_start") or item.get_closest_marker("gpu")  # the server has no GPU
    if item.get_closest_marker("launch") and not cold:
        from launching import fork_server

        given = getattr(item.config, "workerinput", {})  # of the process that started this worker
        os.environ[SERVER_VARIABLE] = given.get(SERVER_VARIABLE) or fork_server()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; its own loop of events would be in the way of other modules' tests."""
    from browser import chromium

    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def wheel(build_once: BuildOnce) -> Path:
    """The wheel of this package, built as a person builds it."""
    words = ["wheel", str(Path(__file__).parents[1]), "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    command = [sys.executable, "-m", "pip", *words]
    run = partial(subprocess.run, check=True, capture_output=True, timeout=300)
    return next(build_once("wheel", lambda folder: run([*command, str(folder)])).glob("finetune_toolkit-*.whl"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct, a folder of fp32 safetensors."""
    from toolkit.demo.assets import prepare_default_model

    return prepare_default_model()


@pytest.fixture(scope="session")
def faq_alpaca() -> Path:
    """503 rows of instruction, input and output."""
    from toolkit.demo.assets import default_data_file

    return default_data_file("faq-en-alpaca.jsonl")


@pytest.fixture(scope="session")
def faq_sharegpt() -> Path:
    """The same 503 rows as conversations."""
    from toolkit.demo.assets import default_data_file

    return default_data_file("faq-en-sharegpt.jsonl")


@pytest.fixture(scope="session")
def tokenizer(real_model: Path) -> Any:
    """The real tokenizer: pad equals eos, and its chat template has no generation block."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model)


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> BuildOnce:
    """Return a function that builds a folder of the session once, whichever of its parallel workers needs it first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def build_once(name: str, build: Callable[[Path], object]) -> Path:
        folder, complete = shared / name, shared / f"{name}.complete"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                build(folder)
                complete.touch()
        return folder

    return build_once


@pytest.fixture(scope="session")
def tiny_model(build_once: BuildOnce, tokenizer: Any, faq_alpaca: Path) -> Path:
    """A random Llama of 336,192 parameters; fp32, tied embeddings, seed 0.

    Its tokenizer is the real one with 4,096 tokens: a rank would read the real vocabulary for longer than it trains.
    """
    from launching import TINY_SIZES
    from random_models import random_llama

    def build(folder: Path) -> None:
        turns = ([{"role": "user", "content": line}] for line in faq_alpaca.read_text().splitlines())
        texts = [tokenizer.apply_chat_template(turn, tokenize=False) for turn in turns]
        random_llama(folder / "tiny-llama", tokenizer.train_new_from_iterator(texts, 4096), **TINY_SIZES)

    return build_once("models", build) / "tiny-llama"


@pytest.fixture(scope="session")
def tiny_job(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    """The model, the data and the length of what most tests train."""
    return ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]


class LazyRuns(dict[str, Path]):
    """One run folder per name, launched when a test first asks for it."""

    def __init__(self, launch: Callable[[str], Path]) -> None:
        self.launch = launch

    def __missing__(self, name: str) -> Path:
        self[name] = self.launch(name)
        return self[name]


@pytest.fixture(scope="session")
def preset_runs(build_once: BuildOnce, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """A run folder for each preset that a CPU can run, started by `accelerate launch` on the same job.

    `test_fork_server.py` compares their losses and attestations with those of a cold launcher.
    """
    from launching import launch_preset

    def launch(preset: str) -> Path:
        run = partial(launch_preset, preset, tiny_model, faq_alpaca)
        return build_once(f"run_{preset}", lambda folder: run(folder / preset)) / preset

    return LazyRuns(launch)


@pytest.fixture(scope="session")
def saved_runs(build_once: BuildOnce, saved_job: list[str]) -> dict[str, Path]:
    """One uninterrupted run per case of `launching.SAVED`, with checkpoints to resume, export, verify and convert."""
    from launching import LORA, ROOT, SAVED, accelerate_launch

    def train(case: str, folder: Path) -> None:
        preset, _, lora = case.partition("-")
        words = [*saved_job, *(LORA if lora else []), "--save_steps", str(SAVED[case]), "--output_dir"]
        ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words, str(folder / case))
        assert ended.returncode == 0, f"{case}:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"

    gc.freeze()  # a reader of checkpoints collects garbage when it closes its files
    return LazyRuns(lambda case: build_once(f"saved_{case}", partial(train, case)) / case)


@pytest.fixture(scope="session")
def saved_job(build_once: BuildOnce, tiny_model: Path, faq_alpaca: Path) -> list[str]:
    """20 rows, 2 ranks, batch size 2, accumulation 2: an epoch has 5 batches per rank, so 3 steps, the last one short.

    Step 2 is in the middle of the first epoch, step 3 is its end, steps 4 and 5 are in the second epoch.
    """
    from launching import SAVED_STEPS

    first_rows = "\n".join(faq_alpaca.read_text().splitlines()[:20]) + "\n"
    rows = build_once("rows", lambda folder: (folder / "rows.jsonl").write_text(first_rows)) / "rows.jsonl"
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--max_seq_length", "64"]
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"]
    return [*words, "--weight_decay", "0.1", "--max_steps", str(SAVED_STEPS)]
