# a Trainer alone, with TrainingArguments as JSON
import json
import sys
from common import *

t = Trainer(model=model(), args=args(sys.argv[1], **json.loads(sys.argv[2])), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
