"""What the text of somebody's script says before it runs."""

from pathlib import Path

import pytest

from toolkit.launch.launch import prepare_run
from toolkit.launch.options import TrainOptions
from toolkit.observe.script_file import cannot_resume

TRAINER = "from transformers import Trainer, TrainingArguments\n"
LOOP = "from accelerate import Accelerator\naccelerator = Accelerator()\naccelerator.backward(loss)\n"
NOTHING_SAVED = "nothing is saved (`save_strategy`)"


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        # the observer gives the checkpoint to `train()`
        (TRAINER + "Trainer(args=TrainingArguments('out')).train()", (), None),
        (TRAINER + "TrainingArguments('out', save_strategy='no')", (), NOTHING_SAVED),
        (TRAINER + "TrainingArguments('out', save_strategy=chosen)", ("--save_strategy", "no"), None),
        (
            TRAINER + "args = TrainingArguments(save_strategy='no')\nargs.save_strategy = 'steps'\nargs.save_strategy",
            (),
            None,
        ),
        (TRAINER + "parse()", ("--save_strategy", "no"), NOTHING_SAVED),
        (TRAINER + "parse()", ("--save_strategy=steps",), None),
        (TRAINER + "TrainingArguments('out', save_only_model=True)", (), "no optimizer states are (`save_only_model`)"),
        (TRAINER + "class Mine(Trainer):\n    def train(self): ...", (), None),  # it may train another
        (LOOP, (), "its loop loads no state (`accelerator.load_state`)"),
        (LOOP + "accelerator.load_state('out')", (), None),
        (LOOP + "model.load_state_dict(state)", (), None),
        (LOOP + "import beside", (), None),  # which may load it
        (LOOP + "from . import other", (), None),
    ],
)
def test_a_script_that_cannot_resume_is_known_by_its_text(
    text: str, words: tuple[str, ...], why: str | None, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").touch()
    script = tmp_path / "script.py"
    script.write_text(text)
    assert cannot_resume(script, words) == why


@pytest.mark.parametrize("restarts", [0, 2])
def test_it_is_said_before_the_first_start_where_restarts_are_asked_for(restarts: int, tmp_path: Path) -> None:
    script, said = tmp_path / "script.py", list[str]()
    script.write_text(LOOP)
    prepare_run(
        TrainOptions(
            preset="ddp", num_processes=2, cpu=True, script=str(script), output_dir=tmp_path, max_restarts=restarts
        ),
        on_message=said.append,
    )
    warned = "warning: a restart of this script begins at step 0: its loop loads no state (`accelerator.load_state`)"
    hint = "  hint: let it save its state and load it, or leave `--max-restarts` out"
    assert said == [f"{warned}\n{hint}"] * bool(restarts)
