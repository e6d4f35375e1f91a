# Facts of github.com/modelscope/ms-swift/blob/main/examples/train/rlhf/dpo/lora.sh
CUDA_VISIBLE_DEVICES=0 \
swift rlhf \
    --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora \
    --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji --split_dataset_ratio 0.01 \
    --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 \
    --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear \
    --gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --max_length 2048 \
    --output_dir output --warmup_ratio 0.05 --rpo_alpha 0.1
