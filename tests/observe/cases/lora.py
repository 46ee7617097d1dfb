# LoRA: peft makes adapters fp32, whatever the dtype in which from_pretrained has loaded the model
import sys
from common import *
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

m = model().to(torch.bfloat16 if "bf16_model" in sys.argv else torch.float32)
if "kbit" in sys.argv:  # peft's usual line, which switches gradient checkpointing on for a quantized model
    m = prepare_model_for_kbit_training(m)
m = get_peft_model(m, LoraConfig(r=4, task_type="CAUSAL_LM"))
if "input_grads" in sys.argv:
    m.enable_input_require_grads()
t = Trainer(model=m, args=args(sys.argv[1], bf16="bf16_flag" in sys.argv), train_dataset=Rows())
t.train()
print("SCRIPT DONE")
