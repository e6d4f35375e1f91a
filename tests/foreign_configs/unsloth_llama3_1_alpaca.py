# Facts of github.com/unslothai/notebooks/blob/main/python_scripts/Llama3.1_(8B)-Alpaca.py
# ruff: noqa: F821
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.1-8B", max_seq_length=2048, dtype=None, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, lora_dropout=0, bias="none")
dataset = load_dataset("unsloth/alpaca-cleaned", split="train")
dataset = dataset.map(formatting_prompts_func, batched=True)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=2048,
    packing=False,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        warmup_steps=5,
        max_steps=60,
        learning_rate=2e-4,
        optim="adamw_8bit",
        weight_decay=0.001,
        lr_scheduler_type="linear",
        output_dir="outputs",
    ),
)
