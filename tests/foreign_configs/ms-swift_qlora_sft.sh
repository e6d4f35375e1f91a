# Facts of github.com/modelscope/ms-swift/blob/main/examples/train/qlora/bnb/train.sh
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'AI-ModelScope/alpaca-gpt4-data-en#500' \
    --torch_dtype bfloat16 --quant_method bnb --quant_bits 4 --bnb_4bit_quant_type nf4 \
    --num_train_epochs 1 --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 8 \
    --lora_alpha 32 --target_modules all-linear --gradient_accumulation_steps 16 \
    --max_length 2048 --output_dir output --system 'You are a helpful assistant.'
