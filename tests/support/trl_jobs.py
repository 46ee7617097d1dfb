"""Small jobs for TRL's own scripts."""

import json
from pathlib import Path
from typing import Any

PREFERENCE = {"prompt": "Question?", "chosen": "Yes, it is.", "rejected": "Never."}
COMPLETION = {"prompt": "Question?", "completion": "Yes, it is."}
PROMPT = {"prompt": [{"role": "user", "content": "Question?"}]}
TRL_ROWS: dict[str, dict[str, Any]] = {
    **{"sft": COMPLETION, "dpo": PREFERENCE, "reward": PREFERENCE, "kto": COMPLETION | {"label": True}},
    **{"grpo": PROMPT, "rloo": PROMPT},  # their collator returns rows, and each rank has a seed of its own
}
GENERATES = ["--num_generations", "2", "--max_completion_length", "8", "--reward_funcs", "think_format_reward"]


def trl_words(script: str, model: Path, folder: Path, **columns: str) -> list[str]:
    """Write 32 rows, and return the arguments of `trl.scripts.SCRIPT` on the CPU: no steps and no dtype."""
    rows = [TRL_ROWS[script] | columns for _ in range(32)]
    if script not in ("grpo", "rloo"):
        rows = [row | {"prompt": f"Question {number}?"} for number, row in enumerate(rows)]
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--model_name_or_path", str(model), "--dataset_name", str(folder / "rows")]
    words += ["--output_dir", str(folder / "out"), "--report_to", "none", "--per_device_train_batch_size", "2"]
    return [*words, "--save_strategy", "no", *(GENERATES if script in ("grpo", "rloo") else [])]
