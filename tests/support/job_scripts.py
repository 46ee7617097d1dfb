"""Bad and good job scripts for each lint rule about several nodes: rule, bad text, good text, line, file name."""

# What every rule accepts: two nodes, a signal, a requeue that resumes.
GOOD = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@300
#SBATCH --requeue
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${nodes[0]} PORT=$((20000 + SLURM_JOB_ID % 10000)) ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes 2 --nproc-per-node 8 \\
  --rdzv-id "$ID" --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --shutdown-timeout 270 \\
  train.py --resume_from_checkpoint latest'
"""
TORCHRUN = """torchrun --nnodes 2 --nproc-per-node 8 \\
  --rdzv-id "$ID" --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --shutdown-timeout 270"""
ACCELERATE = GOOD.replace(
    TORCHRUN,
    """accelerate launch --num_machines 2 --num_processes 16 --machine_rank $SLURM_PROCID \\
  --main_process_ip "$HEAD" --main_process_port "$PORT" --use_deepspeed --deepspeed_multinode_launcher standard""",
)
TASK = """num_nodes: 2
resources: {accelerators: "H100:8"}
run: |
  HEAD=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
  torchrun --nnodes 2 --rdzv-id "$SKYPILOT_TASK_ID" --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" train.py
"""
TWO_PER_GPU = "deepspeed --module openrlhf.cli.train_sft --micro_train_batch_size 2"
STATIC = "torchrun --nnodes 2 --nproc-per-node 8 --master-addr node1"
FSDP2 = "accelerate launch --use_fsdp --fsdp_version 2"
ZERO = "accelerate launch --use_deepspeed"
RUN_CLM = "run_clm.py --model_name_or_path a/b --output_dir out --do_train"
SWIFT_BEST = "swift sft --model a --tuner_type lora --load_best_model_at_end true --eval_strategy steps --eval_steps 2"
SWIFT_4BIT = "swift sft --model a --tuner_type lora --fsdp fsdp2 --quant_method bnb --quant_bits 4"
ARGUMENTS = "--output_dir out --per_device_train_batch_size 1 --save_strategy no "
JOB, SKY = "job.sbatch", "task.yaml"


def changed(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


# A batch script in double quotes: the first node expands everything.
EXPANDED = changed(changed(ACCELERATE, "bash -c 'exec", 'bash -c "exec'), "latest'", 'latest"')

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
VERL += "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 "
OPENRLHF = (
    "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft \\\n  --train_batch_size 256 --micro_train_batch_size 2\n"
)
SWIFT_GRPO = "swift rlhf --rlhf_type grpo --model a --num_generations 8 --gradient_accumulation_steps 2\n"
RAY = "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray "
POD = """apiVersion: v1
kind: Pod
spec:
  containers:
    - name: a
      command: [bash, -c]
      args: ["torchrun --nnodes 2 --rdzv-backend c10d MASTER train.py"]
"""
INDEXED = """apiVersion: v1
kind: Service
---
apiVersion: batch/v1
kind: Job
spec:
  completionMode: Indexed
  parallelism: 2
  template: {spec: {containers: [{name: a,
    command: [sh, -c, "LAUNCHER train.py"]}]}}
"""
FLAG = "accelerate launch --num_machines 2 --main_process_ip h --machine_rank $R --multi_gpu true"
PYTORCH_JOB = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template: &pod
        spec:
          containers:
            - name: pytorch
              command:
                - bash
                - -c
                - LAUNCHER train.py --epochs 1
    Worker:
      replicas: 3
      template: *pod
"""

JOB_OF = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\nsrun {} x.py\n"
CONTAINERS = """apiVersion: v1
kind: Pod
spec:
  containers:
    - {name: proxy, image: b, resources: {limits: {nvidia.com/gpu: 1}}}
    - name: a
      image: c
      resources: {limits: {nvidia.com/gpu: LIMIT}}
      command: [torchrun, --nproc_per_node=2, train.py]
    - {name: b, image: c, command: [torchrun, --nproc_per_node=2, train.py]}
"""
KUBERNETES = """apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
      - image: a
        resources: {limits: {nvidia.com/gpu: 2}}
        env: [{name: N, value: "8"}]
        volumeMounts: [{name: shm, mountPath: /dev/shm}]
        command: [torchrun, --nproc_per_node=2, train.py, --epochs, "$(N)"]
      volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""
TRAINS = "torchrun train.py --output_dir out --per_device_train_batch_size 1"
# Values of launchers' options that are refused, and the nearest ones.
VALUES = [
    ("refused-value", "torchrun --nproc_per_node gpus", "torchrun --nproc_per_node gpu"),
    ("refused-value", "torchrun --rdzv_endpoint a:PORT", "torchrun --rdzv_endpoint a:$PORT"),
    ("refused-value", "deepspeed --include localhost:0-3", "deepspeed --include a:0,1@b:2"),
    (
        "refused-value",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true torchrun",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:8,expandable_segments:True torchrun",
    ),
    ("refused-value", "TORCH_DISTRIBUTED_DEBUG=1 torchrun", "TORCH_DISTRIBUTED_DEBUG=detail torchrun"),
    ("refused-value", "CUDA_VISIBLE_DEVICES=[0,1] torchrun", "CUDA_VISIBLE_DEVICES=0,1 torchrun"),
    ("refused-value", "CUDA_VISIBLE_DEVICES=0,1,1 torchrun", "CUDA_VISIBLE_DEVICES=0,1,11 torchrun"),
    ("refused-value", "ACCELERATE_MIXED_PRECISION=bfloat16 torchrun", "ACCELERATE_MIXED_PRECISION=BF16 torchrun"),
    (
        "refused-value",
        "PYTORCH_ALLOC_CONF=max_split_size:8 torchrun",
        "PYTORCH_ALLOC_CONF=roundup_power2_divisions:[256:1,>:2],backend:native torchrun",
    ),
    ("shell-slip", "torchrun --master_port=${PORT:29500}", "torchrun --master_port=${PORT:-29500}"),
    ("shell-slip", 'torchrun --nproc_per_node 2 x.py --deepspeed "~/d.json"', 'torchrun x.py --output_dir "~/o"'),
    ("shell-slip", "torchrun -m", "python -m torch.distributed.run"),
    (
        "shell-slip",
        "torchrun --nproc_per_node $SKYPILOT_NUM_GPU_PER_NODE",
        "torchrun --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE",
    ),
]

KTO, RLOO = (f"trl {method} --model_name_or_path a --dataset_name b" for method in ("kto", "rloo"))
GROUPS = "trl grpo --num_processes 2 --model_name_or_path a --dataset_name b --num_generations {}"
SCRIPT_CASES: list[tuple[str, str, str, int, str]] = [
    ("rank-of-first-node", EXPANDED, ACCELERATE, 8, JOB),
    ("rank-of-first-node", EXPANDED, changed(EXPANDED, "$SLURM_PROCID", "\\$SLURM_PROCID"), 8, JOB),
    ("rank-of-first-node",
     "#SBATCH --nodes=2\nexport NODE_RANK=$SLURM_NODEID\nsrun torchrun --node-rank $NODE_RANK train.py\n",
     "#SBATCH --nodes=2\n# $SLURM_NODEID\necho $SLURM_NODEID\nx=$(cat <<'END'\nexport R=$SLURM_NODEID\nEND\n)\n",
     2, JOB),
    ("rank-of-first-node",
     "#SBATCH --nodes=2\nsrun bash <<END\ntorchrun --node-rank $SLURM_NODEID train.py\nEND\n",
     "#SBATCH --nodes=2\nf() {\n  torchrun --node-rank $SLURM_NODEID train.py\n}\nexport -f f\nsrun bash -c f\n",
     3, JOB),
    ("head-is-localhost",
     changed(GOOD, "HEAD=${nodes[0]}", 'HEAD=$(scontrol show hostnames "$X" | head -n1 || echo localhost)'),
     GOOD, 7, JOB),
    ("head-is-localhost", changed(TASK, "HEAD:29500", "{HEAD:-127.0.0.1}:29500"), TASK, 5, SKY),
    ("each-node-alone", changed(GOOD, "--nnodes 2 ", ""), GOOD, 8, JOB),
    ("each-node-alone", changed(TASK, "--nnodes 2 ", ""), TASK, 5, SKY),
    ("no-rendezvous", "torchrun --nnodes=2 train.py\n", "torchrun --nnodes=1 train.py\n", 1, "run.sh"),
    ("node-rank-missing", "torchrun --nnodes 2 --master-addr node1 train.py\n",
     "torchrun --nnodes 2 --master-addr node1 --node-rank 1 train.py\n", 1, "run.sh"),
    ("node-rank-missing", changed(ACCELERATE, "--machine_rank $SLURM_PROCID ", ""), ACCELERATE, 8, JOB),
    ("deepspeed-without-standard",
     changed(ACCELERATE, "--deepspeed_multinode_launcher standard", "--mixed_precision bf16"), ACCELERATE, 8, JOB),
    ("fixed-rendezvous-id", changed(GOOD, '--rdzv-id "$ID"', "--rdzv-id 42"), GOOD, 8, JOB),
    ("fixed-rendezvous-id", changed(TASK, '--rdzv-id "$SKYPILOT_TASK_ID"', ""), TASK, 5, SKY),
    ("only-first-node", changed(GOOD, "srun --kill-on-bad-exit=1 ", ""), GOOD, 8, JOB),
    ("launcher-per-gpu", changed(GOOD, "--ntasks-per-node=1", "--ntasks-per-node=8"), GOOD, 3, JOB),
    ("signal-to-batch-shell", changed(GOOD, "TERM@300", "B:TERM@300"), GOOD, 4, JOB),
    ("waits-for-lost-node", changed(GOOD, "--kill-on-bad-exit=1 ", ""), GOOD, 8, JOB),
    ("no-rendezvous", changed(GOOD, '--rdzv-endpoint "$HEAD:$PORT"', '--master-addr "$HEAD"'), GOOD, 8, JOB),
    ("rank-of-first-node", EXPANDED,
     GOOD, 8, JOB),
    ("head-is-localhost", changed(GOOD, "HEAD=${nodes[0]}", 'HEAD=${MASTER:-"localhost"}'),
     "torchrun --nnodes ${NNODES:-1} --master-addr ${MASTER:-localhost} --node-rank ${RANK:-0} train.py\n", 7, JOB),
    ("lost-line", "torchrun train.py \\\n  --bf16 True\n  --lr 1\n",
     "torchrun train.py \\\n  --bf16 True \\\n  --lr 1\n", 3,
     "run.sh"),
    ("lost-line", "torchrun train.py \\ \n  --bf16 True\n",
     "ARGS=(\n  --bf16 True\n)\ntorchrun train.py ${ARGS[@]}\n", 2,
     "run.sh"),
    ("unknown-word", "llamafactory-cli train --stage pretrain --finetuning_type lora --dataset a\n",
     "llamafactory-cli train --stage pt --finetuning_type lora --dataset a\n", 1, "run.sh"),
    ("unknown-word", "llamafactory-cli train --stage sft --finetuning_type qlora --dataset a\n",
     "llamafactory-cli train --stage sft --finetuning_type $TYPE --dataset a\n", 1, "run.sh"),
    ("unknown-word", "swift rlhf --rlhf_type grop --model a --dataset b\n",
     "swift rlhf --rlhf_type dpo --model a --dataset b --torch_dtype bfloat16\n", 1, "run.sh"),
    ("unknown-word", "torchrun --rdzv-backend c10 train.py\n", "torchrun --rdzv-backend c10d train.py\n", 1, "run.sh"),
    ("unknown-word", "deepspeed --log_level warn train.py\n", "deepspeed --log_level warning train.py\n", 1, "run.sh"),
    ("unknown-word", "accelerate launch --multi_gpu --dynamo_backend inductr train.py\n",
     "accelerate launch --multi_gpu --dynamo_backend INDUCTOR train.py\n", 1, "run.sh"),
    ("wrong-argument-type", f'{TRAINS} --lr_scheduler_kwargs {{"min_lr": 1}}\n',
     f"{TRAINS} --lr_scheduler_kwargs '{{\"min_lr\": 1}}'\n", 1, "run.sh"),
    ("blank-in-assignment", f"export NCCL_DEBUG = INFO\n{TRAINS}\n",
     f"export NCCL_DEBUG=INFO\nA=(\n  b = c\n)\n[ a = b ]\ncat <<X\nd = e\nX\n{TRAINS}\n", 1, "run.sh"),
    ("directive-behind-command", f"#SBATCH --nodes=1\nset -e\n#SBATCH --time=1:00\n{TRAINS}\n",
     f"#SBATCH --nodes=1\n# why\n\n#SBATCH --time=1:00\ncat <<X > b.sh\n#SBATCH --nodes=2\nX\n{TRAINS}\n", 3,
     "job.sbatch"),
    ("more-processes-than-granted", "#SBATCH --gres=gpu:a100:4\ntorchrun --nproc_per_node 8 train.py\n",
     "#SBATCH --nodes=2\n#SBATCH --gpus=8\ntorchrun --nproc_per_node 8 train.py\n", 2, "job.sbatch"),
    *((rule, f"{bad} train.py\n", f"{good} train.py\n", 1, "run.sh") for rule, bad, good in VALUES),
    ("refused-value", f"export NCCL_P2P_DISABLE=true\n{TRAINS}\n", f"export NCCL_P2P_DISABLE=1\n{TRAINS}\n", 1,
     "run.sh"),
    ("refused-value", f"#SBATCH --time=24h\n{TRAINS}\n", f"#SBATCH --time=1-00:00\n{TRAINS}\n", 1, "job.sbatch"),
    ("shell-slip", "set -e\ndeepspeed: ds.json\ntorchrun x.py\n",
     "cat > x.yaml <<E\ndeepspeed: ds.json\nE\ntorchrun x.py\n", 2, "job.sh"),
    ("shell-slip", f"#!/bin/sh\n#SBATCH -nodes=2\n{TRAINS}\n",
     f"#!/bin/sh\n#SBATCH -N2\n#SBATCH -pgpu-1\n{TRAINS}\n", 2, "job.sbatch"),
    ("shell-slip", f"#!/bin/sh\n#SBATCH --mem=64 GB\n{TRAINS}\n", f"#!/bin/sh\n#SBATCH --mem=64GB\n{TRAINS}\n", 2,
     "job.sbatch"),
    ("shell-slip", f"{TRAINS} > a 2&>1\n", f"{TRAINS} > a 2>&1\n# 2&>1\n", 1, "run.sh"),
    ("shell-slip", f"if [$A = 1 ]; then\n  {TRAINS}\nfi\n", f"if [ $A = 1 ]; then\n  {TRAINS}\nfi\n", 1, "run.sh"),
    ("shell-slip", f"ARGS=(--lr 1)\n{TRAINS} $ARGS\n", f'ARGS=(--lr 1)\n{TRAINS} "${{ARGS[@]}}"\n', 2, "run.sh"),
    ("text-for-number", "swift sft --model a --dataset b --lora_rank eight\n",
     "swift sft --model a --dataset b --lora_rank $RANK\n", 1, "run.sh"),
    *((rule, f"{bad}\n", f"{good}\n", 1, "run.sh") for rule, bad, good in (
        ("refused-by-swift", "swift sft --model a --rlhf_type dpo", "swift rlhf --model a --rlhf_type dpo"),
        ("refused-by-swift", "swift sft --quant_bits 4", "swift sft --quant_method bnb --quant_bits 4"),
        ("refused-by-trl", f"{KTO} --per_device_train_batch_size 1", f"{KTO} --per_device_train_batch_size 2"),
        ("refused-by-trl", f"{KTO} --load_in_4bit", f"{KTO} --load_in_4bit --use_peft"),
        ("refused-by-trl", f"{KTO} --load_in_8bit", f"{KTO} --load_in_8bit --use_peft"),
        ("unknown-trl-setting", f"{KTO} --lora_rank 8", f"{KTO} --lora_alpha 8 --mixed_precision bf16"),
        ("unknown-trl-setting", f"{KTO} --packing", f"{KTO} --beta 0.1"),
        ("unread-by-trl", f"{KTO} --lora_r 8", f"{KTO} --lora_r 8 --use_peft"),
        ("unread-by-trl", f"{RLOO} --vllm_mode server", f"{RLOO} --vllm_mode server --use_vllm"),
        ("unread-by-trl", f"{KTO} --datasets c", KTO),
        ("refused-by-grpo", GROUPS.format(6), GROUPS.format(8)),
        ("unknown-word", f"{KTO} --dtype bf16", f"{KTO} --dtype bfloat16"),
        ("unknown-word", f"{RLOO} --reward_funcs accuracy a.b", f"{RLOO} --reward_funcs accuracy_reward a.b"),
    )),
    ("refused-by-peft", "swift sft --model a --dataset b --target_modules q_proj,v_proj\n",
     "swift sft --model a --dataset b --target_modules q_proj v_proj\n", 1, "run.sh"),
    ("refused-by-trl", "trl grpo --model_name_or_path a --dataset_name b --log_completions_hub_repo c/d\n",
     "trl sft --model_name_or_path a --dataset_name b --log_completions_hub_repo c/d\n", 1, "run.sh"),
    ("unknown-word", "trl kto --model_name_or_path a --dataset_name b --loss_type sigmoid\n",
     "trl dpo --model_name_or_path a --dataset_name b --loss_type sigmoid\n", 1, "run.sh"),
    ("wrong-argument-type", f"{TRAINS} --deepspeed --max_steps 5\n", f"{TRAINS} --deepspeed $JSON --max_steps 5\n", 1,
     "run.sh"),
    ("refused-alone", f"{TRAINS} --fsdp full_shard --deepspeed z.json\n", f"{TRAINS} --fsdp full_shard\n", 1,
     "run.sh"),
    ("option-without-dashes", "torchrun train.py output_dir out --bf16 True\n",
     "torchrun train.py --label_names output_dir out --bf16 True\n", 1, "run.sh"),
    ("refused-by-trl", "trl sft --model_name_or_path a/b --output_dir out\n",
     "trl sft --model_name_or_path a/b --dataset_name c/d\n", 1, "run.sh"),
    ("lost-line", "torchrun train.py \\   --a 1\n", "torchrun train.py --a '\\  --b' \\\n  --c\n", 1, "run.sh"),
    ("lost-line", "torchrun train.py \\\n  --a 1 \\\n\n  --bf16 True\n",
     "case $1 in\n  --help | -h ) exit;;\nesac\ntorchrun train.py\n", 4, "run.sh"),
    ("lost-line", "torchrun train.py \\\n  # --a 1 \\\n  --bf16 True\n",
     "cat <<END\n--a\nEND\ntorchrun train.py\n", 3, "run.sh"),
    ("typographic-quotes", "export A=“x”\ntorchrun train.py\n",
     'echo "it’s on"\n# “\ntorchrun train.py\n', 1, "run.sh"),
    ("typographic-quotes", "torchrun –nnodes 1 train.py\n", "torchrun --nnodes 1 train.py\n", 1, "run.sh"),
    ("not-exported", "CUDA_VISIBLE_DEVICES=0,1\ntorchrun train.py\n",
     "CUDA_VISIBLE_DEVICES=0,1 torchrun train.py\nHF_HOME=/a\nexport HF_HOME\nNNODES=2\n", 1, "run.sh"),
    ("not-exported", "FORCE_TORCHRUN=1\nllamafactory-cli train a.yaml\n",
     "set -a\nFORCE_TORCHRUN=1\nllamafactory-cli train a.yaml\n", 1, "run.sh"),
    ("unknown-variable", "export FSDP_OFFLOAD_PARAM=true\ntorchrun train.py\n",
     "export FSDP_OFFLOAD_PARAMS=true\nFSDP_MINE=1\ntorchrun train.py $FSDP_MINE\n", 1, "run.sh"),
    ("flag-with-value", "accelerate launch --multi_gpu true train.py\n",
     "accelerate launch --multi_gpu train.py true\n", 1,
     "run.sh"),
    ("behind-the-script", "accelerate launch train.py --num_processes 2\n",
     "accelerate launch --num_processes 2 train.py --mixed_precision bf16\n", 1, "run.sh"),
    ("visible-devices-ignored", "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2 train.py\n",
     "CUDA_VISIBLE_DEVICES=2,3 deepspeed train.py\n", 1, "run.sh"),
    ("more-processes-than-gpus", "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 train.py\n",
     "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py\n", 1, "run.sh"),
    ("include-with-count", "deepspeed -i localhost:0 --num_gpus 1 train.py\n",
     "deepspeed -i localhost:0 train.py --num_gpus 1\n", 1, "run.sh"),
    ("include-with-count", "deepspeed --include localhost:0 --num_gpus 1 train.py\n",
     "deepspeed --include localhost:0 train.py --num_gpus 1\n", 1, "run.sh"),
    ("launcher-per-gpu", changed(GOOD, "#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks=16"),
     changed(GOOD, "#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks=2"), 3, JOB),
    ("launcher-per-gpu", changed(GOOD, "srun ", "srun --ntasks-per-node=8 "),
     changed(GOOD, "per-node=1", "per-node=8").replace("srun", "srun -N $SLURM_NNODES --ntasks $SLURM_NNODES"), 8, JOB),
    ("launcher-per-gpu", changed(GOOD, "per-node=1", "per-gpu=1\n#SBATCH --gpus-per-node=8"),
     changed(GOOD, "per-node=1", "per-gpu=1\n#SBATCH --gpus-per-node=1"), 3, JOB),
    ("node-rank-missing", f"#SBATCH --nodes=2\nsrun {STATIC} --node-rank 0 train.py\n",
     f"#SBATCH --nodes=2\nsrun -N 1 -n 1 -w node1 {STATIC} --node-rank 0 train.py\n", 2, JOB),
    ("node-rank-missing", f"{STATIC} --node-rank 2 train.py\n", f"{STATIC} --node-rank 1 train.py\n", 1, "run.sh"),
    ("node-rank-missing", "torchrun --nnodes 1 --node-rank 1 --master-addr node1 train.py\n",
     "torchrun --nnodes 1 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint node1:1 train.py\n", 1, "run.sh"),
    ("lost-line", f"{VERL}a.b=1\n  trainer.n_gpus_per_node=8\n", f"{VERL}a.b=1 \\\n  trainer.nnodes=1\n", 2, "run.sh"),
    ("not-exported", "NCCL_DEBUG=INFO; torchrun train.py\n", "NCCL_DEBUG=INFO torchrun train.py; A=1\n", 1, "run.sh"),
    ("visible-devices-ignored", "GPUS=2,3\nexport CUDA_VISIBLE_DEVICES=$GPUS\ndeepspeed --num_gpus 2 train.py\n",
     "GPUS=0,1\nexport CUDA_VISIBLE_DEVICES=$GPUS\ndeepspeed --num_gpus 2 train.py\n", 2, "run.sh"),
    ("file-behind-local-rank", "deepspeed run_clm.py a.json\n", "torchrun run_clm.py a.json\n", 1, "run.sh"),
    ("fp16-and-bf16", "python -m mine.train --do_train --output_dir a --bf16 True \\\n --fp16 True\n",
     "python -m mine.train --do_train --output_dir a --bf16 True\n", 2, "run.sh"),
    ("refused-by-trainer", f"{SWIFT_BEST} --save_steps 5\n", f"{SWIFT_BEST} --save_steps 4\n", 1, "run.sh"),
    ("4bit-not-sharded", f"{SWIFT_4BIT}\n", f"{SWIFT_4BIT} --bnb_4bit_quant_storage bfloat16\n", 1, "run.sh"),
    ("refused-by-openrlhf", f"{TWO_PER_GPU} --train_batch_size 5\n", f"{TWO_PER_GPU} --train_batch_size 6\n", 1,
     "run.sh"),
    # the flags of accelerate launch, as its YAML
    ("unknown-word", f"{FSDP2} --fsdp_auto_wrap_policy TRANSFORMER x.py\n",
     f"{FSDP2} --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP x.py\n", 1, "run.sh"),
    ("unknown-word", "accelerate launch --mixed_precision bfloat16 x.py\n",
     "accelerate launch --mixed_precision $PRECISION x.py\n", 1, "run.sh"),
    ("uneven-processes", "accelerate launch --num_machines 2 --num_processes 3 --main_process_ip a x.py\n",
     "accelerate launch --num_machines 2 --num_processes 4 --main_process_ip a x.py\n", 1, "run.sh"),
    ("uneven-processes", "accelerate launch --gpu_ids 0,1 --num_processes 4 x.py\n",
     "accelerate launch --gpu_ids $1 --num_processes 4 x.py\n", 1, "run.sh"),
    ("offload-param-below-stage-3", f"{ZERO} --zero_stage 2 --offload_param_device cpu x.py\n",
     f"{ZERO} --zero_stage 3 --offload_param_device cpu x.py\n", 1, "run.sh"),
    ("block-not-in-force", "accelerate launch --zero_stage 2 x.py\n",
     "accelerate launch --config_file $ENGINE.yaml --zero_stage 2 x.py\n", 1, "run.sh"),
    ("refused-by-accelerate", "compute_environment: LOCAL_MACHINE\nnum_processes: 2\n",
     "compute_environment: LOCAL_MACHINE\nnum_processes: 2\ndistributed_type: MULTI_GPU\n", None, "mine.yaml"),
    ("refused-by-accelerate", "accelerate launch --multi_gpu --num_processes 1 x.py\n",
     "accelerate launch --num_processes 1 x.py\n", 1, "run.sh"),
    ("checkpointing-twice", f"{FSDP2} --fsdp_activation_checkpointing true {RUN_CLM} --gradient_checkpointing\n",
     f"{FSDP2} --fsdp_activation_checkpointing true {RUN_CLM}\n", 1, "run.sh"),
    ("sharded-final-save", f"{FSDP2} --fsdp_state_dict_type SHARDED_STATE_DICT {RUN_CLM}\n",
     f"{FSDP2} --fsdp_state_dict_type SHARDED_STATE_DICT {RUN_CLM} --save_strategy no\n", 1, "run.sh"),
    ("yaml-not-auto", f"{ZERO} --gradient_accumulation_steps 2 {RUN_CLM} --gradient_accumulation_steps 4\n",
     f"{ZERO} --gradient_accumulation_steps 4 {RUN_CLM} --gradient_accumulation_steps 4\n", 1, "run.sh"),
    # accelerate looks for settings that its file repeats, not for flags
    ("unknown-word", f"{ZERO} --deepspeed_config_file a.json --zero_stage 2 --mixed_precision bf x.py\n",
     f"{ZERO} --deepspeed_config_file a.json --zero_stage 2 --mixed_precision bf16 x.py\n", 1, "run.sh"),
    ("file-behind-local-rank", "deepspeed train.py a.yaml\n",
     "deepspeed --no_local_rank train.py a.yaml\n", 1, "run.sh"),
    ("removed-training-argument", "torchrun train.py --bf16 True --save_strategy no \\\n --evaluation_strategy no\n",
     "python mine.py\ntorchrun train.py --bf16 True --save_strategy no --eval_strategy no\n", 2, "run.sh"),
    ("fp16-and-bf16", "ARGS='--bf16 True --do_train'\ntorchrun run_clm.py $ARGS \\\n  --fp16\n",
     "torchrun run_clm.py --bf16 True --fp16 False\n", 3, "run.sh"),
    ("batch-arithmetic", "cat > ds.json <<END\n{\"zero_optimization\": {},\n\"gradient_accumulation_steps\": 0}\nEND\n"
     "deepspeed train.py --deepspeed ds.json\n", "deepspeed train.py --deepspeed ds.json\n", 3, "run.sh"),
    ("jit-checkpoint", "max_steps: 2\nenable_jit_checkpoint: true\n", "max_steps: 2\n", 2, "mine.yaml"),
    ("jit-checkpoint", changed(GOOD, "train.py", "train.py --bf16 --do_train --enable_jit_checkpoint"), GOOD, 10, JOB),
    ("head-is-localhost", "distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: 0\n",
     "distributed_type: MULTI_GPU\nnum_machines: 1\nmain_process_ip: 0\n", 3, "mine.yaml"),
    ("head-is-localhost", "torchrun --nnodes 2 --node-rank 1 --master-addr localhost train.py\n",
     "torchrun --nnodes 2 --node-rank 0 --master-addr localhost train.py\n", 1, "run.sh"),
    ("head-is-localhost", "srun bash -c 'torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $(hostname):1 x.py'\n",
     'srun bash -c "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $(hostname):1 x.py"\n', 1, "run.sh"),
    ("no-such-port", "accelerate launch --main_process_port 69420 x.py\n",
     "accelerate launch --main_process_port 29500 x.py\n", 1, "run.sh"),
    ("no-such-port", "torchrun --rdzv-endpoint $HEAD:99999 x.py\n", "torchrun --rdzv-endpoint $HEAD:29500 x.py\n", 1,
     "run.sh"),
    ("no-such-port", "distributed_type: MULTI_GPU\nmain_process_port: 99999\n",
     "distributed_type: MULTI_GPU\nmain_process_port: 29500\n", 2, "mine.yaml"),
    ("one-process-for-gpus", "swift sft --model a --sequence_parallel_size 4\n",
     "NPROC_PER_NODE=4 swift sft --model a --sequence_parallel_size 4\n", 1, "run.sh"),
    ("refused-by-swift", "NPROC_PER_NODE=6 swift sft --model a --sequence_parallel_size 4\n",
     "NNODES=2 NPROC_PER_NODE=2 swift sft --model a --sequence_parallel_size 4\n", 1, "run.sh"),
    ("refused-by-swift", "swift rlhf --rlhf_type grpo --model a --kl_coef 0.1\n",
     "swift rlhf --rlhf_type ppo --model a --kl_coef 0.1\n", 1, "run.sh"),
    ("unknown-launcher-option", "torchrun -c 'import torch'\n", "torchrun --no-python python -c 'import torch'\n", 1,
     "run.sh"),
    ("refused-by-swift", "NPROC_PER_NODE=2 swift rlhf --rlhf_type kto --model a --sequence_parallel_size 2\n",
     "NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model a --sequence_parallel_size 2\n", 1, "run.sh"),
    ("one-process-for-gpus", "CUDA_VISIBLE_DEVICES=0,1 swift sft --model a --deepspeed zero2\n",
     "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model a --deepspeed zero2\n", 1, "run.sh"),
    ("two-engines", "accelerate launch --multi_gpu --use_deepspeed x.py\n", "accelerate launch --multi_gpu x.py\n", 1,
     "run.sh"),
    ("not-exported", "NPROC_PER_NODE=8 \\\nMASTER_PORT=5 \\\n\nswift sft --model a\n",
     "NPROC_PER_NODE=8 \\\nMASTER_PORT=5 \\\nswift sft --model a\n", 1, "run.sh"),
    ("no-head", "accelerate launch --num_machines 2 --num_processes 4 --machine_rank 1 x.py\n",
     "accelerate launch --num_machines 2 --num_processes 4 --machine_rank 1 --main_process_ip $HEAD x.py\n", 1,
     "run.sh"),
    ("standalone-on-several", "torchrun --standalone --nnodes 2 --node-rank 0 x.py\n",
     "torchrun --standalone --nnodes 1 x.py\n", 1, "run.sh"),
    ("variable-behind-command", "swift sft \\\n  NPROC_PER_NODE=2 --model a\n",
     "NPROC_PER_NODE=2 swift sft --model a=b\n", 1, "run.sh"),
    ("variable-behind-command", "torchrun NCCL_DEBUG=INFO x.py\n", "NCCL_DEBUG=INFO torchrun x.py lr=1\n", 1, "run.sh"),
    ("flag-with-value", "deepspeed --hostfile= /hosts x.py --a\n", "torchrun --no-python /bin/x x.py\n", 1, "run.sh"),
    ("refused-by-grpo", f"export NNODES=3\nexport NPROC_PER_NODE=1\n{SWIFT_GRPO}",
     f"export NNODES=2\nexport NPROC_PER_NODE=2\n{SWIFT_GRPO}", 3, "run.sh"),
    ("refused-by-grpo", f"NPROC_PER_NODE=3 {SWIFT_GRPO}", f"NPROC_PER_NODE=4 {SWIFT_GRPO}", 1, "run.sh"),
    ("refused-by-swift", "swift rlhf --rlhf_type grpo --model a --num_generations 1\n",
     "swift rlhf --rlhf_type grpo --model a --num_generations 2\n", 1, "run.sh"),
    ("refused-by-swift", "swift rlhf --rlhf_type dpo --model a --tuner_type lora --ref_model b\n",
     "swift rlhf --rlhf_type dpo --model a --tuner_type full --ref_model b\n", 1, "run.sh"),
    ("refused-by-llama-factory", "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train --stage sft --deepspeed z.json\n",
     "CUDA_VISIBLE_DEVICES=0 python a.py && llamafactory-cli train --stage sft --deepspeed z.json\n", 1, "run.sh"),
    ("refused-by-llama-factory",
     "export CUDA_VISIBLE_DEVICES=0 && cd a && llamafactory-cli train --stage sft --deepspeed z.json\n",
     "CUDA_VISIBLE_DEVICES=0 FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --deepspeed z.json\n", 1, "run.sh"),
    ("refused-by-verl", f"{VERL}data.train_batch_size=256 trainer.n_gpus_per_node=1\n",
     f"{VERL}trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1\n", 1, "run.sh"),
    ("only-first-node", changed(GOOD, "srun --kill-on-bad-exit=1 ", "ip=$(srun -N 1 -n 1 hostname -i)\n"), GOOD, 9,
     JOB),
    ("only-first-node", "#SBATCH --nodes=2\npython train.py\n", "#SBATCH --nodes=2\nsrun python train.py\n", 2, JOB),
    ("refused-by-verl", f"{VERL}actor_rollout_ref.actor.ppo_mini_batch_size=4\n",
     f"{VERL}actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=2\n", 1, "run.sh"),
    ("unknown-launcher-option", "torchrun --data_path a x.py\n",  # the prefix is new in torch 2.14
     "torchrun --nproc_per_node 2 --log-line-prefix-template r x.py --data_path a\n", 1, "run.sh"),
    ("unknown-launcher-option", "deepspeed --num_gpus 2 -m a.train --bf16\n",
     "deepspeed --num_gpus 2 --module a.train --bf16\n", 1, "run.sh"),
    ("fp16-and-bf16", f"deepspeed --num_gpus 2 -m a.train {ARGUMENTS}--fp16 True --bf16 True\n",
     f"deepspeed --num_gpus 2 --module a.train {ARGUMENTS}--bf16 True\n", 1, "run.sh"),
    ("unknown-launcher-option", "accelerate launch --num_proc 2 x.py\n",
     "accelerate launch --num_processes 2 x.py\n", 1,
     "run.sh"),
    ("refused-by-verl", f"{VERL}data.train_batch_size=16\n", f"{VERL}data.train_batch_size=$((2 * N))\n", 1, "run.sh"),
    ("refused-by-verl", f"{VERL}data.train_batch_size=300\n",
     f"{VERL}data.train_batch_size=300 actor_rollout_ref.actor.use_dynamic_bsz=True\n", 1, "run.sh"),
    ("refused-by-verl", f"{VERL}actor_rollout_ref.actor.ppo_micro_batch_size=8\n",
     f"{VERL}critic.ppo_micro_batch_size_per_gpu=8\n", 1, "run.sh"),
    ("refused-by-openrlhf", OPENRLHF.replace("4 --", "7 --"), OPENRLHF, 2, "run.sh"),
    ("refused-by-openrlhf", f"{RAY}--advantage_estimator rloo\n",
     f"{RAY}--advantage_estimator rloo --n_samples_per_prompt 4\n", 1, "run.sh"),
    # commands in files of Kubernetes, Compose and workflows
    ("no-rendezvous", POD.replace("MASTER", ""), POD.replace("MASTER", "--rdzv-endpoint=$(HEAD):29500"), 7, "pod.yaml"),
    ("each-node-alone", INDEXED.replace("LAUNCHER", "torchrun"), INDEXED.replace("LAUNCHER", "torchrun --nnodes 2"), 10,
     "job.yaml"),
    # an empty document, as of Helm, and a number that its template fills in
    ("each-node-alone", "---\n# a\n---\n" + INDEXED.replace("LAUNCHER", "torchrun"),
     "---\n# a\n---\n" + INDEXED.replace("LAUNCHER", "torchrun --nnodes 2"), 13, "job.yaml"),
    ("flag-with-value", INDEXED.replace("parallelism: 2", 'parallelism: "{{ n }}"').replace("LAUNCHER", FLAG),
     INDEXED.replace("LAUNCHER", FLAG.replace(" true", "")), 10, "job.yaml"),
    ("each-node-alone", PYTORCH_JOB.replace("LAUNCHER", "accelerate launch"),
     PYTORCH_JOB.replace("LAUNCHER", "torchrun"), 14, "job.yaml"),
    ("flag-with-value", "services:\n  a:\n    command: accelerate launch --multi_gpu true train.py\n",
     "services:\n  a:\n    command: accelerate launch --multi_gpu train.py\n", 3, "compose.yaml"),
    ("lost-line", "on: push\njobs:\n  a:\n    steps:\n      - run: |\n          torchrun x.py\n          --bf16\n",
     "on: push\njobs:\n  a:\n    steps:\n      - run: |\n          torchrun x.py\n      - run: ls\n", 7, "ci.yml"),
    ("unknown-launcher-option", "deepspeed --num-gpus 2 train.py\n", "deepspeed --num_gpus 2 train.py\n", 1, "run.sh"),
    ("unknown-launcher-option", "deepspeed --no-local-rank train.py\n", "torchrun --nproc-per-node 2 train.py\n", 1,
     "run.sh"),
    ("option-behind-file", "llamafactory-cli train a.yaml --output_dir out\n",
     "llamafactory-cli train a.yaml output_dir=out\n", 1, "run.sh"),
    ("option-without-dashes", "torchrun train.py -output_dir out --bf16\n",
     "torchrun train.py --output_dir out -o 1 --bf16\n", 1, "run.sh"),
    ("count-of-slurm", "#SBATCH --gpus-per-node=a100:4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py\n",
     "#SBATCH --gpus-per-node=4\ntorchrun --nproc_per_node=$SLURM_GPUS_PER_NODE train.py\n", 2, JOB),
    ("count-of-slurm", "#SBATCH --gres=gpu:4\nN=${SLURM_GPUS_PER_NODE}\ntorchrun --nproc_per_node=$N train.py\n",
     "#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node=${SLURM_GPUS_PER_NODE:-4} train.py\n", 3, JOB),
    ("count-of-slurm", "#SBATCH --gres=gpu:4\nN=$((2 * SLURM_GPUS))\naccelerate launch --num_processes=$N x.py\n",
     "#SBATCH --gpus=4\nN=$((2 * SLURM_GPUS))\naccelerate launch --num_processes=$N x.py\n", 2, JOB),
    ("server-in-front", "A=0 trl vllm-serve --model m \\\n  --port 1\naccelerate launch x.py --lr 1\n",
     "A=0 trl vllm-serve --model m \\\n  --port 1 > log &\naccelerate launch x.py --lr 1\n", 1, "run.sh"),
    ("refused-value", INDEXED.replace("LAUNCHER", "torchrun --node a-0").replace("Job", "Job\nmetadata: {name: a}"),
     INDEXED.replace("LAUNCHER", "torchrun --node a-0"), 11, "job.yaml"),
    ("shell-slip", "torchrun x.py | tee log \\\n  --bf16\n", "torchrun x.py | tee log \\\n  --append\n", 2, "run.sh"),
    ("folder-made-too-late", "#SBATCH --output=new/%j.out\nmkdir -p new\ntorchrun train.py\n",
     "#SBATCH --output=%j.out\nmkdir -p new\ntorchrun train.py\n", 1, JOB),
    ("folder-of-copy", '#SBATCH --nodes=1\nHERE="$(cd -- "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nROOT="$HERE/.."\n'
     'source "$ROOT/env.sh"\ntorchrun train.py\n', '#SBATCH --nodes=1\nHERE=${SLURM_SUBMIT_DIR:-$(dirname "$0")}\n'
     'source "$HERE/env.sh"\ntorchrun train.py\n', 2, JOB),
    ("folder-of-copy", '#SBATCH --nodes=1\ncd "$(dirname "$(realpath "$0")")"\ntorchrun train.py\n',
     '#SBATCH --nodes=1\necho "of $(dirname "$0")"\ntorchrun train.py\n', 2, JOB),
    ("folder-made-too-late", "#SBATCH -o new/%j.out\nmkdir -p new; torchrun train.py\n",
     "#SBATCH -o new/%j.out\nmkdir -p new/other\ntorchrun train.py\n", 1, JOB),
    # what one of the file's own lines shows to be a slip
    ("shell-slip", "export NNODES=2 RANK=1\nllamafactory-cli train x.yaml\n",
     "export NNODES=2 NODE_RANK=1\nllamafactory-cli train x.yaml\n", 1, "run.sh"),
    ("shell-slip", "torchrun y.py\npython x.py -m torch.distributed.launch --nproc_per_node 2\n",
     "python -m torch.distributed.launch --nproc_per_node 2 x.py -m a\n", 2, "run.sh"),
    ("shell-slip", 'A="--lr 1 --bf16 True"\ntorchrun x.py "$A"\n',
     'A="--lr 1 --bf16"\ntorchrun x.py $A --text "$A"\n', 2,
     "run.sh"),
    ("shell-slip", 'A="\n  --nnodes 1\n  --role a"\ntorchrun "${A}" x.py\n',
     'A="--lr 1"\ntorchrun x.py "$A" "$B"\n', 4, "run.sh"),
    ("shell-slip", "M=a/b\ntorchrun x.py --model '$M'\n", "M=a/b\nsrun bash -c 'torchrun x.py --model '$M''\n", 2,
     "run.sh"),
    ("shell-slip", "NUM_GPUS=8\ntorchrun --nproc_per_node=$NUM_GPU x.py\n",
     "NUM_GPUS=8\nread -r NUM_GPU\ntorchrun --nproc_per_node=$NUM_GPU x.py\n", 2, "run.sh"),
    ("shell-slip", "OUT=o\ntorchrun x.py --output_dir $OUT_$SEED\n",
     "OUT=o\ntorchrun x.py --output_dir ${OUT}_$SEED\n", 2, "run.sh"),
    ("shell-slip", "NUM_GPUS=8\ntorchrun --nproc_per_node=$NUM_GPU x.py\n",
     "NUM_GPUS=8\nsource env.sh\ntorchrun --nproc_per_node=$NUM_GPU x.py\n", 2, "run.sh"),
    ("shell-slip", "#!/bin/sh\n#SBATCH --nodes=2\nsrun torchrun --nnodes=$SLURM_NNODE x.py\n",
     "#!/bin/sh\n#SBATCH --nodes=2\nsrun torchrun --nnodes=$SLURM_NNODES x.py --id $SLURM_SITE\n", 3, JOB),
    ("shell-slip", "\n# a\n#SBATCH --nodes=2\nsrun torchrun x.py\n",
     "torchrun x.py\ncat << E > j\n#SBATCH -o $O\nE\n", 1, JOB),
    ("shell-slip", "#!/bin/sh\n# SBATCH -N 2\n#SBATCH -n 2\ntorchrun x.py\n",
     "#!/bin/sh\n##SBATCH -N 2\n#SBATCH -n 2\ntorchrun x.py\n", 2,
     JOB),
    ("shell-slip", "docker run --gpus all i torchrun x.py\n",
     "docker run --gpus all \\\n --ipc=host i torchrun x.py\n", 1, "run.sh"),
    ("unknown-launcher-option", "#SBATCH --gpu-per-node=8\ntorchrun x.py\n",
     "#SBATCH --container-image=a --nod=8\ntorchrun x.py\n", 1, JOB),
    ("shell-slip", "envs: {MODEL: a}\nresources: {}\nrun: torchrun x.py --model $MODEL_NAME\n",
     "envs: {MODEL: a}\nresources: {}\nrun: torchrun x.py --model $MODEL --out $OUT\n", 3, SKY),
    ("shell-slip", "torchrun x.py\nif true\n  A=1\nfi\n", "#!/bin/zsh\ntorchrun x.py\nif true\n  A=1\nfi\n", 4,
     "run.sh"),
    ("shell-slip", "#!/bin/sh\n#SBATCH -o $HOME/%j.out\ntorchrun x.py\n",
     "#!/bin/sh\n#SBATCH -o %u/%j.out\ntorchrun x.py\n", 2, JOB),
    ("shell-slip", 'if [ "$1" == 1]; then A=2; fi\ntorchrun x.py\n',
     'if [ "$1" == "[1]" ]; then A=2; fi\ntorchrun x.py\n', 1, "run.sh"),
    ("shell-slip", 'docker run --ipc=host --gpus "device=0,1" i torchrun x.py\n',
     "docker run --ipc=host --gpus '\"device=0,1\"' i torchrun x.py\n", 1,
     "run.sh"),
    ("unknown-variable", "export CUDA_VISIBLE_DEVICE=0\ntorchrun x.py\n",
     "export CUDA_VISIBLE_DEVICE=0\nexport CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICE\ntorchrun x.py\n", 1, "run.sh"),
    *(("unknown-variable", f"export {name}=9\ntorchrun x.py\n", "export NCCL_IB_TIMEOUT=9\ntorchrun x.py\n", 1,
       "run.sh") for name in ("NCCL_TIMEOUT", "TORCH_DISTRIBUTED_DEFAULT_TIMEOUT")),
    ("refused-value", "#SBATCH --gres=gpus:8\ntorchrun x.py\n", "#SBATCH --gres=gpu:8\ntorchrun x.py\n", 1, JOB),
    # GPUs and nodes of a job, of a container and of a task
    *(("more-processes-than-granted", JOB_OF.format(bad), JOB_OF.format(good), 4, JOB)
      for bad, good in (("accelerate launch --num_processes 9", "accelerate launch --num_processes 8"),
                        ("accelerate launch --num_machines 3 --num_processes 12", "accelerate launch --num_machines 2"),
                        ("torchrun --nnodes 3", "torchrun --nnodes 2"))),
    ("more-processes-than-granted", CONTAINERS.replace("LIMIT", "1"), CONTAINERS.replace("LIMIT", "2"), 9, "job.yaml"),
    ("more-processes-than-granted", TASK.replace("--nnodes 2", "--nnodes 2 --nproc_per_node 9"),
     TASK.replace("--nnodes 2", "--nnodes 2 --nproc_per_node 8"), 5, SKY),
    ("more-processes-than-granted", TASK.replace("--nnodes 2", "--nnodes 3"), TASK, 5, SKY),
    ("more-processes-than-granted", "resources: {accelerators: {H100: 2}}\nrun: torchrun --nproc_per_node 4 x.py\n",
     "resources: {accelerators: {H100: 2, A100: 8}}\nrun: torchrun --nproc_per_node 4 x.py\n", 2, SKY),
    ("shell-slip", "source ~/.bashrc\nLR=1\nf() {\n  torchrun x.py --lr $LR_$1\n",
     "LR=1\n. ./e.sh\ntorchrun x.py --lr $LR_$1\n", 4, "run.sh"),
    # what Kubernetes and kubeflow's operator refuse
    *(("refused-value", changed(KUBERNETES, old, bad), KUBERNETES, line, "job.yaml")
      for old, bad, line in (("Never", "Always", 6), ("gpu: 2}}", "gpus: 2}}", 9), ('"8"', "8", 10),
                             ("gpu: 2}}", "gpu: 2}, requests: {nvidia.com/gpu: 1}}", 9), ("/dev/shm", "/tmp", 8),
                             ("name: shm, mount", "name: a, mount", 11), ('"$(N)"', '"$N"', 12),
                             ("torchrun, ", '"torchrun --tee 3", ', 12))),
    ("refused-value", PYTORCH_JOB.replace("replicas: 1", "replicas: 2").replace("LAUNCHER", "torchrun"),
     PYTORCH_JOB.replace("LAUNCHER", "torchrun"), 6, "job.yaml"),
    ("refused-value", PYTORCH_JOB.replace("name: pytorch", "name: a").replace("LAUNCHER", "torchrun"),
     PYTORCH_JOB.replace("LAUNCHER", "torchrun"), 9, "job.yaml"),
]  # fmt: skip
