# Facts of github.com/OpenRLHF/OpenRLHF/blob/main/examples/scripts/train_rm.sh
deepspeed --module openrlhf.cli.train_rm \
   --train.batch_size 256 --train.micro_batch_size 1 --train.max_epochs 1 --data.max_len 8192 \
   --model.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --adam.lr 9e-6 \
   --data.dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --data.apply_chat_template \
   --model.gradient_checkpointing_enable
