"""Where a prompt ends and its answer begins: of every kind of tokenizer all of the answer is
learned, after the tokens that generation sees.
"""

import random

import pytest
from tokenizer_kinds import KINDS, tokenizer_of
from tokenizers import AddedToken

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.examples.recognise import Conversation, PromptCompletion
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encode import Encoder
from toolkit.data.tokens.text_ids import TextTokenizer

WORDS = ["Label:", "True", "return", "argument", "the", "un", "believable", "é", "🤖", "12", "."]
SPACES = [" ", "  ", "\n", "\n\n", " \n", "\t", ""]
TURNS = ["<|user|>", "<|end|>", "<|bot|>"]


def encoder_of(tokenizer, **settings) -> Encoder:
    return Encoder(tokenizer, FinetuneDataConfig(**settings), 5000)


def decoded(tokenizer, ids) -> str:
    """Return what tokens say after others, without the space that a first one may lose."""
    first = tokenizer("x", add_special_tokens=False)["input_ids"]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before = tokenizer.decode(first, **options)
    return tokenizer.decode([*first, *ids], **options).removeprefix(before)


def plain(kind: str, text: str) -> str:
    """Return a text as its tokens can say it: some tokenizers keep no white space."""
    return "".join(text.split()) if kind in ("wordpiece", "unigram") else text


def awkward(draw: random.Random) -> str:
    parts = [
        part
        for _ in range(draw.randint(1, 4))
        for part in (draw.choice(WORDS), draw.choice(SPACES))
    ]
    return draw.choice(SPACES) + "".join(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_an_answer_is_learned_after_the_tokens_of_its_prompt(kind):
    tokenizer, draw = tokenizer_of(kind), random.Random(kind)
    pairs = [("Label: ", "True"), ("Label:", " True"), ("Label:\n", "\nTrue")]
    pairs += [(awkward(draw), awkward(draw)) for _ in range(400)]
    pairs = [pair for pair in pairs if pair[1].strip()]
    encoder = encoder_of(tokenizer, append_eos=False)
    right = cut = 0
    for pair, made in zip(
        pairs, encoder.encode_examples([PromptCompletion(*p) for p in pairs]), strict=True
    ):
        if isinstance(made, BadRow):
            assert kind == "wordpiece"
            assert made.reason in ("edge within a word", "no supervised token")
            continue
        ((begin, end),) = made.spans
        ids = made.input_ids.tolist()
        alone = tokenizer(pair[0], add_special_tokens=False)["input_ids"]
        assert ids[:begin] == alone, pair
        assert end == len(ids)
        said = decoded(tokenizer, ids[begin:])
        if tokenizer.unk_token_id not in ids:
            assert plain(kind, said) == plain(kind, pair[1]), pair
        right += 1
        cut += ids != tokenizer("".join(pair), add_special_tokens=False)["input_ids"]
    assert right > 300
    assert cut or kind in ("bytes", "wordpiece")  # else the pairs try nothing


def test_a_prompt_that_ends_within_a_word_of_words_is_refused():
    encoder = encoder_of(tokenizer_of("wordpiece"))
    (refused, taken) = encoder.encode_examples(
        [PromptCompletion("ret", "urn"), PromptCompletion("ret ", "x")]
    )
    assert isinstance(refused, BadRow)
    assert "expected a prompt that ends with a word, got 'ret' before 'urn'" in str(refused)
    assert not isinstance(taken, BadRow)


TEMPLATES = {
    # Its prompt ends in a space, that of an answer in no token of its own.
    "words": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}"
    "{{ '\\n' }}{% if not loop.last or add_generation_prompt %}BOT: {% endif %}{% else %}"
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "tokens": "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}"
    "{{ '\\n' }}"
    "{{ m.content }}<|end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{{ '\\n' }}{% endif %}",
}


@pytest.mark.parametrize("strips", [False, True], ids=["", "tokens_that_strip"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_each_turn_is_learned(kind, template, strips):
    marks = tuple(AddedToken(turn, rstrip=strips, special=True) for turn in TURNS)
    tokenizer, draw = tokenizer_of(kind, TEMPLATES[template], marks), random.Random(kind)
    chats = []
    for _ in range(60):
        says = [awkward(draw) + "x" for _ in range(2 * draw.randint(1, 3))]
        chats.append(
            [
                {"role": r, "content": c}
                for r, c in zip(["user", "assistant"] * 3, says, strict=False)
            ]
        )
    right = 0
    for chat, made in zip(
        chats, encoder_of(tokenizer).encode_examples([*map(Conversation, chats)]), strict=True
    ):
        if isinstance(made, BadRow):
            assert kind == "wordpiece", made
            continue
        ids, answers = made.input_ids.tolist(), [m["content"] for m in chat[1::2]]
        end = "</s>" if template == "words" else "<|end|>"
        said = [decoded(tokenizer, ids[begin:last]) for begin, last in made.spans]
        if tokenizer.unk_token_id not in ids:
            assert [plain(kind, s) for s in said] == [plain(kind, a + end) for a in answers]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
        assert ids[: made.spans[0][0]] == prompt
        right += 1
    assert right > 40


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "llama2"])
def test_unknown_characters_do_not_split_a_text(kind):
    """`<unk>` is an added token of many tokenizers, and also the token of what they do not know."""
    tokenizer, draw = tokenizer_of(kind, specials=tuple(TURNS)), random.Random(3)
    texts = TextTokenizer(tokenizer)
    known = [word for word in WORDS if word not in ("é", "🤖")]
    for _ in range(200):
        parts = [draw.choice([*known, "日本", "🤖 ok", "x 世", "<unk>"]) for _ in range(6)]
        prompt, answer = " ".join(parts[:3]), " ".join(parts[3:])
        text = f"<|user|>{prompt}<|end|><|bot|>{answer}<|end|>"
        begin = text.index("<|bot|>") + len("<|bot|>")
        (made,) = texts.encode([text], [[(begin, len(text))]])
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert made.ids.tolist() == expected, text
        ((first, last),) = made.spans
        assert (expected[first - 1], last) == (
            tokenizer.convert_tokens_to_ids("<|bot|>"),
            len(expected),
        )
        text = f"{prompt} {answer}"  # the prompt ends with a word, and the answer with its space
        edge = len(prompt)
        alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        (made,) = texts.encode([text], [[(edge, len(text))]])
        if not isinstance(made, BadRow) and whole[: len(alone)] == alone:
            assert made.ids.tolist() == whole, (prompt, answer)
