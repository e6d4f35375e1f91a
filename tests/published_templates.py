"""Published chat templates x conversations x kinds of tokenizers: is all of each answer learned,
and nothing else; what is left out refused or counted.

    python tests/published_templates.py FOLDER [--wrong]

FOLDER: `*.jinja` files. Prints how many are right, refused and why, or wrong; `--wrong` each of
these. Special tokens are those that a template's text names.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer_kinds import tokenizer_of

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.chat.template import Chat
from toolkit.data.examples.recognise import Conversation
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encode import Encoder
from toolkit.errors import DataError

KINDS = ("gpt2", "llama3", "llama2", "unigram", "bytes")
_MARK = re.compile(
    r"<\|[^<>|\s'\"{}]+\|>|<｜[^<>\s'\"{}]+｜>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]"
)


def call(name: str = "look_up", **arguments) -> dict:
    return {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def user(text: str, **more) -> dict:
    return {"role": "user", "content": text, **more}


def bot(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    }
]
RESULT = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": "look_up",
    "content": "A quokka hops.",
}
ASKED, SAID = "Wherefore art thou?", "Verily, forsooth it is."
MORE, AGAIN = "Prithee, what of it?", "Naught else, methinks."
SYSTEM = {"role": "system", "content": "Speak as a bard would."}
CALL = [user(ASKED), bot(None, tool_calls=[call(word="quokka", deep=3)]), RESULT, bot(SAID)]
CONVERSATIONS: dict[str, list[dict]] = {
    "one": [user(ASKED), bot(SAID)],
    "two": [user(ASKED), bot(SAID), user(MORE), bot(AGAIN)],
    "three": [user(ASKED), bot(SAID), user(MORE), bot(AGAIN), user("Why?"), bot("So it goes.")],
    "system": [SYSTEM, user(ASKED), bot(SAID)],
    "short": [user("Hi"), bot("a")],
    "digits": [user("1 + 1?"), bot("2"), user("2 + 2?"), bot("4")],
    "same": [user(SAID), bot(SAID), user(SAID), bot(SAID)],
    "spaces": [
        user(ASKED),
        bot(" Verily,  forsooth.\n\n it is.\n"),
        user(MORE),
        bot("\n\tNaught."),
    ],
    "markup": [user("# A\n<b>c</b>"), bot('```py\nif x < 1: pass\n```\n\n* <b>bold</b> & "so"')],
    "unicode": [user("é🤖 日本"), bot("Ünï 🤖🤖 日本語.")],
    "ends_with_user": [user(ASKED), bot(SAID), user(MORE)],
    "begins_with_bot": [bot(SAID), user(ASKED), bot(AGAIN)],
    "two_answers": [user(ASKED), bot(SAID), bot(AGAIN)],
    "reasoning": [user(ASKED), bot(SAID, reasoning_content="Methought I was.")],
    "reasoning_two": [
        user(ASKED),
        bot(SAID, reasoning_content="Methought I was."),
        user(MORE),
        bot(AGAIN, reasoning_content="Perchance to dream."),
    ],
    "think_tags": [user(ASKED), bot(f"<think>\nMethought I was.\n</think>\n\n{SAID}")],
    "call": CALL,
    "call_last": CALL[:2],
    "no_arguments": [user(ASKED), bot(None, tool_calls=[call("now")]), RESULT, bot(SAID)],
    "call_and_text": [user(ASKED), bot(SAID, tool_calls=[call(word="quokka")]), RESULT, bot(AGAIN)],
    "weight": [user(ASKED), bot(SAID), user(MORE), bot(AGAIN)],
    "key": [user(ASKED, mood="merrily"), bot(SAID)],
}


def example(name: str) -> Conversation:
    messages = CONVERSATIONS[name]
    tools = TOOLS if any(m.get("tool_calls") for m in messages) else None
    return Conversation(messages, tools, context=frozenset({1} if name == "weight" else ()))


def plain(text: str) -> str:
    """Return a text without white space, and escapes undone."""
    for sign, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("'", "\\u0027")):
        text = text.replace(escape, sign)
    return "".join(text.replace("▁", " ").split())


def faults(
    name: str, chat: Conversation, learned: list[str], text: str, notes: Counter
) -> list[str]:
    """Return what is wrong with the texts that are learned of a conversation."""
    turns = [(i, m) for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    wanted = [m for i, m in turns if i not in chat.context]
    if any("could not be checked" in note for note in notes):  # pieces of turns
        learned = ["".join(learned)] * len(wanted)
    if len(learned) != len(wanted):
        return [f"{len(learned)} parts learned of {len(wanted)} answers"]
    found = []
    for message, said in zip(wanted, map(plain, learned), strict=True):
        parts = [message.get("content") or "", message.get("reasoning_content") or ""]
        parts = [p for part in parts for p in re.split(r"</?think>", part)]
        for called in message.get("tool_calls") or []:
            function = called["function"]
            parts += [function["name"], *(str(v) for v in function["arguments"].values())]
        for part in map(plain, parts):
            counted = any("reasoning" in note for note in notes) and message is not wanted[-1]
            if part and part not in said and not counted:
                found.append(f"{part[:30]!r} of an answer is not learned")
        others = [m for m in chat.messages if m["role"] != "assistant"]
        own = plain("".join(parts))
        for other in (plain(m["content"]) for m in others):
            if len(other) > 5 and other in said and other not in own:
                found.append(f"{other[:30]!r} of another is learned")
        rest = said
        for part in sorted(map(plain, parts), key=len, reverse=True):
            rest = rest.replace(part, "", 1) if part else rest
        rest = re.sub(r"<[^<>]*>|\[/?[A-Z_]+\]|◁[^▷]*▷", "", rest)
        if (
            len(parts) == 2
            and not parts[1]
            and not message.get("tool_calls")
            and re.search(r"assistant|user|bot|model", rest, re.I)
        ):
            found.append(f"a header is learned: {rest[:40]!r}")
    if name == "key" and "merrily" not in text and not any("'mood'" in note for note in notes):
        found.append("a key of a turn is left out without a word")
    return found


def tried(text: str, kind: str) -> dict[str, tuple[str, str]]:
    """Return conversation -> (right, refused or wrong; why) of a template."""
    marks = dict.fromkeys([*_MARK.findall(text)])
    tokenizer = tokenizer_of(kind, text, tuple(m for m in marks if m not in ("<s>", "</s>")))
    encoder, out = Encoder(tokenizer, FinetuneDataConfig(sequence_length=4096), 1 << 20), {}
    chat, ends = Chat(tokenizer), dict[str, str]()
    for name in CONVERSATIONS:
        conversation = example(name)
        (made,) = encoder.encode_examples([conversation])
        if isinstance(made, BadRow):
            out[name] = ("refused", made.reason)
            continue
        rendered = chat.render(conversation)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        ids = made.input_ids.tolist()
        learned = [tokenizer.decode(ids[begin:end], **options) for begin, end in made.spans]
        wrong = []
        if tokenizer.unk_token_id not in ids:
            if len(learned) == len(rendered.spans):
                texts = [plain(rendered.text[begin:end]) for begin, end in rendered.spans]
                if texts != [*map(plain, learned)]:
                    wrong.append("tokens say another text than the spans")
            wrong += faults(name, conversation, learned, rendered.text, rendered.notes)
            ends[name] = plain(learned[0])[-12:].rpartition("}")[2]
            if name == "no_arguments" and ends[name] != ends.get("call", ends[name]):
                wrong.append(f"a call without arguments ends with {ends[name]!r}")
            before = plain(rendered.text[: rendered.spans[0][0]])
            marks_before = _MARK.findall(before)[-1:]
            if name == "two_answers" and ends[name].endswith(tuple(marks_before)):
                wrong.append(f"the header {marks_before[0]!r} of the second answer is learned")
        begin = made.spans[0][0]
        alone = tokenizer(rendered.text[: rendered.spans[0][0]], add_special_tokens=False)
        if ids[:begin] != alone["input_ids"]:
            wrong.append("the prompt has other tokens by itself")
        out[name] = ("wrong", "; ".join(wrong)) if wrong else ("right", "")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrong", action="store_true", help="name each that is wrong")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    args = parser.parse_args()
    counts = Counter[str]()
    why = Counter[str]()
    files = sorted(args.folder.glob("*.jinja"))
    for number, file in enumerate(files):
        for kind in args.kinds:
            try:
                found = tried(file.read_text("utf-8"), kind)
            except DataError as error:
                found = dict.fromkeys(CONVERSATIONS, ("refused", f"template: {str(error)[:40]}"))
            for name, (state, said) in found.items():
                counts[state] += 1
                why[f"{state}: {said}" if state == "refused" else state] += 1
                if state == "wrong":
                    why[f"wrong {kind} {name}"] += 1
                    if args.wrong:
                        print(f"{file.stem} {kind} {name}: {said}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(files)}", end="", file=sys.stderr)
    for reason, count in sorted(why.items(), key=lambda item: -item[1]):
        print(f"{count:7,} {reason}")
    print(f"{len(files)} templates: {dict(counts)}")


if __name__ == "__main__":
    main()
