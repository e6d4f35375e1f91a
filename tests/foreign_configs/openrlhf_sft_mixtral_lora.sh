# Facts of github.com/OpenRLHF/OpenRLHF/blob/main/examples/scripts/train_sft_mixtral_lora.sh
deepspeed --module openrlhf.cli.train_sft \
    --data.max_len 2048 --data.dataset Open-Orca/OpenOrca --data.input_key question \
    --data.output_key response --train.batch_size 128 --train.micro_batch_size 4 \
    --data.max_samples 500000 --model.model_name_or_path mistralai/Mixtral-8x7B-v0.1 \
    --train.max_epochs 1 --model.gradient_checkpointing_enable --adam.lr 5e-6 \
    --ds.lora.rank 64 --ds.lora.alpha 64 --ds.packing_samples --model.aux_loss_coef 0.001
