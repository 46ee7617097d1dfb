# loader workers, a lambda collator
import sys
from common import *
import datasets


def double(row):
    return {"labels": [2 * x % 128 for x in row["input_ids"]], "input_ids": row["input_ids"]}


if __name__ == "__main__":
    d = datasets.Dataset.from_dict({"input_ids": Rows().x.tolist()}).map(double)
    t = Trainer(
        model=model(),
        args=args(sys.argv[1], dataloader_num_workers=2, dataloader_persistent_workers=True),
        train_dataset=d,
        eval_dataset=d.select(range(8)),
    )
    t.train()
    print("SCRIPT DONE", t.evaluate()["eval_loss"])
