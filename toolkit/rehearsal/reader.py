"""Read an export as its users do: with transformers and PEFT alone. Run as a program.

    reader.py MODEL [--adapter FOLDER --base FOLDER] [--trust_remote_code]

Prints a JSON line for each stage that passed; a failure is a traceback.
"""

import argparse
import json
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

_NEW_TOKENS = 8
_CLOSE = 0.01  # of a matrix's largest value: a merge rounds to the base's dtype


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--adapter")
    parser.add_argument("--base")
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--tokenizer", action="store_true", help="there must be one")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    options["local_files_only"] = True
    model, tokenizer = reload(args.model, args.tokenizer, options)
    generate(model, tokenizer)
    if args.adapter:
        compare(model, args.adapter, args.base, options)


def loader(folder: str, options: dict[str, Any]) -> Any:
    """Return the class that config.json names, where it is not one that AutoModelForCausalLM
    would take.
    """
    named = (AutoConfig.from_pretrained(folder, **options).architectures or [""])[0]
    if named.endswith("ForCausalLM"):
        return AutoModelForCausalLM
    return getattr(transformers, named, AutoModelForCausalLM)


def reload(folder: str, with_tokenizer: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    model, info = loader(folder, options).from_pretrained(
        folder, output_loading_info=True, **options
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"transformers does not load every key of {folder}: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(folder, **options) if with_tokenizer else None
    values = sum(p.numel() for p in model.parameters())
    tell("reload", f"{type(model).__name__}, {values:,} parameters, every key found")
    return model.eval(), tokenizer


def generate(model: Any, tokenizer: Any) -> None:
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
        if logits.ndim == 2:  # of a reward model, which generates nothing
            tell("generate", f"a reward of {float(logits):.3f} for {ids.shape[1]} tokens")
            return
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS
        )
    new = out[0, ids.shape[1] :].tolist()
    if not new:
        raise ValueError("generate() gave no token")
    text = "" if tokenizer is None else f": {tokenizer.decode(new)!r}"
    tell("generate", f"{len(new)} tokens after {ids.shape[1]}{text[:60]}")


def compare(merged: Any, adapter: str, base: str, options: dict[str, Any]) -> None:
    from peft import PeftModel

    model: Any = loader(base, options).from_pretrained(base, **options)
    rows = merged.get_input_embeddings().weight.shape[0]
    if model.get_input_embeddings().weight.shape[0] != rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    by_peft: Any = PeftModel.from_pretrained(model, adapter)
    expected, most = merged.state_dict(), 0.0
    for name, value in by_peft.merge_and_unload().state_dict().items():
        other = expected[name].float()
        off = float((value.float() - other).abs().max() / other.abs().max().clamp(min=1e-6))
        if not off < _CLOSE:
            raise ValueError(f"{name} merged by PEFT and as exported differ by {off:.1%}")
        most = max(most, off)
    tell("adapter", f"PEFT loads it, and merges it into the same weights (within {most:.1e})")


def tell(stage: str, said: str) -> None:
    print(json.dumps({"stage": stage, "said": said}), flush=True)


if __name__ == "__main__":
    main()
