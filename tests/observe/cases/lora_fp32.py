import sys
from common import *
from peft import LoraConfig, get_peft_model

m = get_peft_model(model(), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
m.enable_input_require_grads()
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
