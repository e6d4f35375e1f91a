"""The calls of microsoft/Phi-3-mini-128k-instruct sample_finetune.py: its keys and values."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer

training_config = {
    "bf16": True,
    "do_eval": False,
    "learning_rate": 5.0e-06,
    "log_level": "info",
    "logging_steps": 20,
    "logging_strategy": "steps",
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 1,
    "max_steps": -1,
    "output_dir": "./checkpoint_dir",
    "overwrite_output_dir": True,
    "per_device_eval_batch_size": 4,
    "per_device_train_batch_size": 4,
    "remove_unused_columns": True,
    "save_steps": 100,
    "save_total_limit": 1,
    "seed": 0,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_accumulation_steps": 1,
    "warmup_ratio": 0.2,
}
peft_config = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "bias": "none",
    "task_type": "CAUSAL_LM",
    "target_modules": "all-linear",
    "modules_to_save": None,
}
checkpoint_path = "microsoft/Phi-3-mini-128k-instruct"
model_kwargs = dict(  # noqa: C408 - as the script has it
    use_cache=False,
    trust_remote_code=True,
    attn_implementation="flash_attention_2",
    torch_dtype=torch.bfloat16,
    device_map=None,
)
model = AutoModelForCausalLM.from_pretrained(checkpoint_path, **model_kwargs)
raw_dataset = load_dataset("HuggingFaceH4/ultrachat_200k")
trainer = SFTTrainer(
    model=model,
    args=TrainingArguments(**training_config),
    peft_config=LoraConfig(**peft_config),
    train_dataset=raw_dataset["train_sft"],
    eval_dataset=raw_dataset["test_sft"],
    max_seq_length=2048,
    dataset_text_field="text",
    packing=True,
)
