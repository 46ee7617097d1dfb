# LoRA on a bf16 model: peft makes adapters fp32
import sys
from common import *
from peft import LoraConfig, get_peft_model

m = get_peft_model(model().to(torch.bfloat16), LoraConfig(r=4, task_type="CAUSAL_LM"))
t = Trainer(model=m, args=args(sys.argv[1], bf16=True), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
