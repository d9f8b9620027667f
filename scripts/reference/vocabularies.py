"""Writes SentencePiece and BertTokenizer vocabularies with reference results.

Writes to crates/testing/fixtures/tokenizers. The references are ids and texts. The models are trained on the sentences below, with a small charsmap instead
of Unicode's.
"""

import json
import random
import tempfile
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import BertTokenizer, GPTSw3Tokenizer

SENTENCES = [
    "The river rises in the hills and runs north to the sea.",
    "She reads a book by the window, and the cat sleeps on it.",
    "Le café est fermé; à bientôt, répond la dame âgée.",
    "Der Fluß fließt über grüne Wiesen nach Süden.",
    "Η θάλασσα είναι ήσυχη σήμερα.",
    "Река течёт на север, к морю.",
    "猫は窓のそばで寝ています。川は北へ流れる。",
    "我们在河边读书，猫在窗边睡觉。",
    "강은 북쪽으로 흐른다. 고양이는 잔다.",
    "नदी उत्तर की ओर बहती है।",
    "In 1907 there were 12 boats; 3,400 people came.",
]
# Text and replacement: compositions, full-width forms, ligatures, spaces, and removed characters.
RULES = [
    ("e\u0301", "é"), ("a\u0300", "à"), ("e\u0302", "ê"), ("e\u0302\u0301", "ế"), ("u\u0308", "ü"), ("か\u3099", "が"),
    ("…", "..."), ("ﬁ", "fi"), ("㍿", "株式会社"), ("①", "1"), ("Ａ", "A"), ("１", "1"), ("！", "!"), ("´", " \u0301"),
    ("\u3000", " "), ("\u00a0", " "), ("\t", " "), ("\n", " "), ("\r", " "), ("\u200b", ""), ("\u00ad", ""),
]
WORDS = [
    "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]", "the", "river", "##s", "run", "##ning", "cafe", "café", "read", "##er", "grune",
    "grüne", "猫", "在", "河", "边", "読", "は", ".", ",", "!", "'", "1", "2", "12", "##0", "The", "I", "i", "θαλασσα", "река",
    "hello", "nbsp", "x", "##x", "",
]


def texts(seed, further=()):
    choose = random.Random(seed)
    pieces = [word for line in SENTENCES for word in line.split(" ")] + [rule[0] for rule in RULES]
    pieces += [" ", "  ", "\t", "\n", "\u3000", "\u00a0", "\u200b", "\u0301", "\u0308", "\u3099", "e", "é", "E\u0301", "▁", "🤗",
               "👨‍👩‍👧", "한", "ᄒ", "ญา", "שָׁ", "ﷺ", "<u>", "<x y>", "\x00", "\x7f", "<0x41>", "o'clock", "0012", "I'm", *further]
    yield from ["", " ", "  a  b ", "\n", "a", "the river", *SENTENCES]
    for _ in range(240):
        yield "".join(choose.choice(pieces) + choose.choice(["", "", " "]) for _ in range(choose.randrange(1, 9)))


# Characters that GPTSw3Tokenizer removes, treats as spaces or composes, and neighbors that it keeps.
CLEANED = ["\x00", "\x08", "\t", "\n", "\x0b", "\r", "\x1f", "\x7f", "\x84", "\xa0", "\xad", "\u200b", "\u200c", "\u2000", "\u2002",
           "\u2003", "\u2004", "\u2005", "\u2007", "\u2008", "\u2009", "\u200a", "\u202f", "\u3000", "\ufffc", "\ufffd", "a\u0308", "å",
           "A\u030a", "e\u0301", "q\u0323\u0307", "q\u0307\u0323", "\u1112\u1161\u11ab", "\u0958", "\u2126", "\u0301", "<|endoftext|>"]


def train(folder, name, **options):
    data = Path(folder, "sentences.txt")
    data.write_text("\n".join(SENTENCES * 4))
    rules = Path(folder, "rules.tsv")
    hexadecimal = lambda text: " ".join(f"{ord(letter):X}" for letter in text)
    rules.write_text("".join(f"{hexadecimal(found)}\t{hexadecimal(written)}\n" for found, written in RULES))
    options = {"normalization_rule_tsv": str(rules), "character_coverage": 0.98, **options}
    sentencepiece.SentencePieceTrainer.train(
        input=str(data), model_prefix=str(Path(folder, name)), num_threads=1, minloglevel=2, hard_vocab_limit=False, **options,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(Path(folder, f"{name}.model").read_bytes())
    # Clears paths that exist only on this machine.
    for spec, field in [(model.trainer_spec, "input"), (model.trainer_spec, "model_prefix"),
                        (model.normalizer_spec, "normalization_rule_tsv")]:
        spec.ClearField(field)
    return model.SerializeToString(deterministic=True)


def export(arguments):
    out = arguments.out / "tokenizers"
    out.mkdir(parents=True, exist_ok=True)
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in {
            "unigram": dict(model_type="unigram", vocab_size=300, user_defined_symbols=["<u>", "<x y>"]),
            "unigram_bytes": dict(model_type="unigram", vocab_size=480, byte_fallback=True, remove_extra_whitespaces=False),
            "bpe": dict(model_type="bpe", vocab_size=320, user_defined_symbols=["<u>", "<x y>"], pad_id=3),
            "bpe_bytes": dict(model_type="bpe", vocab_size=560, byte_fallback=True, add_dummy_prefix=False,
                              remove_extra_whitespaces=False),
        }.items():
            model = out / f"{name}.model"
            model.write_bytes(train(folder, name, **options))
            processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
            cases = []
            for text in texts(len(name)):
                ids = processor.encode(text)
                cases.append({"text": text, "ids": ids, "decoded": processor.decode(ids)})
            expected[model.name] = cases
        for name, options in {
            "lowercase": {},
            "cased": dict(do_lower_case=False),
            "accents": dict(strip_accents=False),
            "unspaced": dict(tokenize_chinese_chars=False, do_lower_case=False, strip_accents=True),
        }.items():
            where = out / name
            where.mkdir(exist_ok=True)
            (where / "vocab.txt").write_text("".join(f"{word}\n" for word in [*WORDS, "the"]))
            (where / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **options}) + "\n")
            tokenizer = BertTokenizer.from_pretrained(where)
            cases = []
            for text in texts(len(name)):
                ids = tokenizer.encode(text, add_special_tokens=False)
                cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
            expected[name] = cases
        where = out / "sw3"
        where.mkdir(exist_ok=True)
        options = dict(model_type="bpe", vocab_size=600, byte_fallback=True, remove_extra_whitespaces=False, pad_id=3,
                       normalization_rule_tsv="", normalization_rule_name="identity", user_defined_symbols=["<|endoftext|>"])
        (where / "spiece.model").write_bytes(train(folder, "sw3", **options))
        (where / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPTSw3Tokenizer"}) + "\n")
        tokenizer = GPTSw3Tokenizer.from_pretrained(where)
        cases = []
        for text in [*CLEANED, *texts(len("sw3"), CLEANED * 3)]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode_fast(ids)})
        expected["sw3"] = cases
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases) + "\n]"
             for name, cases in expected.items()]
    (out / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
