"""Read an export as its users do, with transformers and PEFT alone. Run as a program.

    reader.py MODEL [--adapter FOLDER --base FOLDER] [--trust_remote_code] [--tokenizer]

Prints a JSON line for each stage that passed; a failure is a traceback.
"""

import argparse
import json
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

_NEW_TOKENS = 8
# Relative to a matrix's largest value, because a merge rounds to the dtype of the base.
_MERGE_TOLERANCE = 0.01


def main() -> None:
    """Load the export and generate with it; with --adapter, merge the adapter and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--adapter")
    parser.add_argument("--base")
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--tokenizer", action="store_true", help="the export must have one")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    options["local_files_only"] = True
    model, tokenizer = reload(args.model, args.tokenizer, options)
    generate(model, tokenizer)
    if args.adapter:
        compare_merge(model, args.adapter, args.base, options)


def find_model_class(folder: str, options: dict[str, Any]) -> Any:
    """Return the class to load the export with: the one in config.json, or AutoModelForCausalLM."""
    name = (AutoConfig.from_pretrained(folder, **options).architectures or [""])[0]
    if name.endswith("ForCausalLM"):
        return AutoModelForCausalLM
    return getattr(transformers, name, AutoModelForCausalLM)


def reload(folder: str, with_tokenizer: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder, and print the JSON line of the stage `reload`.

    Returns:
        The model in evaluation mode, and the tokenizer (None if `with_tokenizer` is False).

    Raises:
        ValueError: transformers reports missing, unexpected or mismatched keys.
    """
    model, info = find_model_class(folder, options).from_pretrained(
        folder, output_loading_info=True, **options
    )
    not_loaded = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if not_loaded:
        raise ValueError(f"transformers does not load every key of {folder}: {not_loaded}")
    tokenizer = AutoTokenizer.from_pretrained(folder, **options) if with_tokenizer else None
    values = sum(p.numel() for p in model.parameters())
    report("reload", f"{type(model).__name__}, {values:,} parameters, every key found")
    return model.eval(), tokenizer


def generate(model: Any, tokenizer: Any) -> None:
    """Generate a few tokens, and print the JSON line of the stage `generate`.

    A reward model computes a reward instead. Without a tokenizer, fixed token ids are the prompt.

    Raises:
        ValueError: the logits are not finite, or no token was generated.
    """
    if tokenizer is None:
        ids = torch.arange(1, 5)[None]
    elif tokenizer.chat_template:
        turns = [{"role": "user", "content": "Hello"}]
        ids = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    else:
        ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        if not torch.isfinite(logits).all():
            raise ValueError("the logits of the reloaded model are not finite")
        # A reward model has one value per sequence, and generates nothing.
        if logits.ndim == 2:
            report("generate", f"a reward of {float(logits):.3f} for {ids.shape[1]} tokens")
            return
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS
        )
    new = out[0, ids.shape[1] :].tolist()
    if not new:
        raise ValueError("generate() returned no new token")
    text = "" if tokenizer is None else f": {tokenizer.decode(new)!r}"
    report("generate", f"{len(new)} tokens after {ids.shape[1]}{text[:60]}")


def compare_merge(merged: Any, adapter: str, base: str, options: dict[str, Any]) -> None:
    """Merge the adapter with PEFT, and compare each weight with the exported merged model.

    Prints the JSON line of the stage `adapter`.

    Args:
        merged: the exported merged model.
        adapter: folder of the exported adapter.
        base: folder of the base model.
        options: arguments of `from_pretrained`.

    Raises:
        ValueError: a weight differs by 1 % or more of its matrix's largest value.
    """
    from peft import PeftModel

    model: Any = find_model_class(base, options).from_pretrained(base, **options)
    rows = merged.get_input_embeddings().weight.shape[0]
    if model.get_input_embeddings().weight.shape[0] != rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    peft_model: Any = PeftModel.from_pretrained(model, adapter)
    exported = merged.state_dict()
    largest = 0.0
    for name, value in peft_model.merge_and_unload().state_dict().items():
        expected = exported[name].float()
        scale = expected.abs().max().clamp(min=1e-6)
        difference = float((value.float() - expected).abs().max() / scale)
        # Written so that a difference of NaN fails, too.
        if not difference < _MERGE_TOLERANCE:
            raise ValueError(f"{name} merged by PEFT and as exported differ by {difference:.1%}")
        largest = max(largest, difference)
    report("adapter", f"PEFT loads it, and merges it into the same weights (within {largest:.1e})")


def report(stage: str, text: str) -> None:
    """Print a JSON line that tells the rehearsal that the stage passed, with a text."""
    print(json.dumps({"stage": stage, "said": text}), flush=True)


if __name__ == "__main__":
    main()
