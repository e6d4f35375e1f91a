# Facts of github.com/modelscope/ms-swift/blob/main/examples/train/rlhf/simpo.sh
nproc_per_node=2
NPROC_PER_NODE=$nproc_per_node \
swift rlhf \
    --rlhf_type simpo --model Qwen/Qwen2.5-3B-Instruct --tuner_type full \
    --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji --num_train_epochs 1 \
    --per_device_train_batch_size 1 --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) --max_length 2048 \
    --output_dir output --warmup_ratio 0.05 --deepspeed zero2
