# Facts of github.com/OpenRLHF/OpenRLHF/blob/main/examples/scripts/train_dpo_llama.sh
read -r -d '' training_commands <<END
openrlhf.cli.train_dpo \
   --ckpt.output_dir ./checkpoint/llama3-8b-dpo --ckpt.save_steps -1 --eval.steps -1 \
   --train.batch_size 256 --train.micro_batch_size 1 --train.max_epochs 1 --data.max_len 8192 \
   --model.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --ds.param_dtype bf16 \
   --ds.zero_stage 3 --adam.lr 5e-7 --model.beta 0.1 \
   --data.dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --data.apply_chat_template \
   --data.chosen_key chosen --data.rejected_key rejected --ckpt.load_enable \
   --ds.attn_implementation flash_attention_2 --ds.packing_samples \
   --model.gradient_checkpointing_enable
END
    # --model.ipo_enable
