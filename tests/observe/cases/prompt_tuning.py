import sys
from common import *
from peft import PromptTuningConfig, get_peft_model

m = get_peft_model(model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
