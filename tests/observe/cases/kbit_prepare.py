# peft's usual line before LoRA: it switches gradient checkpointing on by itself
import sys
from common import *
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

m = prepare_model_for_kbit_training(model())
m = get_peft_model(m, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
t = Trainer(model=m, args=args(sys.argv[1]), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
