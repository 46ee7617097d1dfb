# LoRA on a model in bf16, as from_pretrained loads it, without bf16=True
import sys
from common import *
from peft import LoraConfig, get_peft_model

m = get_peft_model(model().to(torch.bfloat16), LoraConfig(r=4, task_type="CAUSAL_LM"))
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
