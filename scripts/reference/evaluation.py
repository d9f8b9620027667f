"""Samples in every benchmark's format, with the results of lm-evaluation-harness and our oracle.

Writes to `evaluation`. The texts are invented, but the formats are the published ones. expected.json contains the
figures and the model's output for each item, for the built-in model, the tiny checkpoint and, with
--checkpoints, tarotble. For lm-evaluation-harness's protocols they come from its `hf` model, one sequence at
a time, in float32 with float64 log-softmax; for the others from oracle.py. Takes a few minutes.
"""

import csv
import importlib.metadata
import io
import json
import pathlib
import shutil
import tempfile

from reference import common, harness, oracle

LONG = (
    "The ferry had stopped running at dusk, and the boys on the landing counted lanterns on the other shore until they lost the "
    "number. One of them had a whistle carved from elder. He blew it twice, and far off a dog answered, and then nothing did. "
)

LAMBADA = [
    # Last words with one, two, three and more tokens under any tokenizer.
    "The king put down his cup and asked who had sent the letter. Nobody spoke. At last the fool stepped forward, bowed, and "
    "said it had been written by the king",
    "\u201cYou never told me that the bridge was gone,\u201d said Marta. \u201cI told you twice,\u201d he said, \u201cand both "
    "times you laughed. Now we shall have to walk around the whole lake to reach the other side of the bridge",
    "Old Perrin kept his bees behind the mill.\nEvery spring he counted the hives and every spring there was one more.\nThis "
    "year he counted again and found among the blossoms a ninth\nhive",
    "They had sung all night, and when morning came the fiddler could not hold his bow. \u201cSing without me,\u201d he said. So "
    "they sang without the\nfiddler",
    "He opened the box. In it lay the clockmaker's drawings, page after page of wheels within wheels, and on the last one, in a "
    "small neat hand, was written the name of the clockmaker",
    "\u201cIs it far to Dunwater?\u201d asked the girl. The carter scratched his chin and looked at the sky. \u201cBy the low "
    "road,\u201d he said, \u201cit's a day and a half to Dun-water\u201d",
    # Words that a checkpoint would generate itself; "gone" only if stop words are skipped.
    "I know not what to say, my lord",
    "I know not what to say, my way",
    "Long live the king! Long live the king",
    "Now by my soul, I swear it by my soul",
    "Give me thy hand, and I will give thee my heart",
    "My lord, the queen is gone",
    "I pray you, sir, tell me the cause",
    "Thou art a villain. Thou art a knave",
    "There was a noise in the chimney, and soot fell into the soup. \u201cOnly the wind,\u201d said the cook, who had heard it "
    "every autumn; but the spoon in her hand shook, and it was not the",
    # A single word without a context.
    "Farewell",
    # Longer than a small context window.
    LONG * 6 + "When the moon rose they saw it at last, low in the water and without a light: the ferry",
    # Two spaces before the last word: the target is the text after the last space.
    "She wrote the figure down, struck it out, and wrote it down again: twelve,  twelve",
]

TITLES = [" = {} = ", " = = {} = = ", " = = = {} = = = "]
WIKI = [
    (0, "Harrow Light"),
    "Harrow Light is a disused lighthouse on the island of Sture . It was built in 1871 and had a fixed @-@ beam lamp of 1 @,@ 200 "
    "candles . The tower is 23 @.@ 5 metres high , and the keepers ' house stands 40 metres to its south ; it was sold in 1958 .",
    (1, "Construction"),
    'The plans were drawn by Ada Lorne , who called it " the plainest tower I could bear to draw " . Its walls ( which are two '
    "metres thick at the base ) were cut from grey stone [ a kind of schist ] and carried over by boat . The harbour master 's "
    "record of the work , which fills three books , says that nobody was hurt : the only loss was a mule .",
    (2, "Lamp"),
    "The first lamp burned oil . In 1902 it was replaced by one that turned once in N minutes , and the temperature of its housing "
    "was kept above 10 ° C . Would it last ? It did not ! The glass broke in the first winter .",
    (0, "The Winter Orchard"),
    'The Winter Orchard is the second novel by Tomas Vell . It tells the story of a gardener who is asked to make trees bloom in '
    "January , and of his sister , who does not believe that it can be done . It sold 4 @,@ 150 copies in its first year .",
    (1, "Plot"),
    *[
        f"In part {part} the gardener walks the rows of the orchard from the well to the gate . He has lit {count} fires between "
        "the trees , and his sister counts them from her window , as she did the night before . \" You will burn the roots , \" she "
        "says . He answers that roots do not burn in frozen ground ; she says that then they do not wake in it either . Towards "
        "morning the wind turns , and the smoke goes down to the village , where people shut their doors . The one @-@ eyed smith "
        "stays outside and looks up at the hill . He has seen the Vell brothers ' orchard bloom before , he says , but never with "
        "his good eye ."
        for part, count in (("one", "twelve"), ("two", "twenty"), ("three", "31"), ("four", "no"))
    ],
    (1, "Reception"),
    "Reviewers liked the book 's patience { one wrote of ' a long held breath ' } and disliked its ending . A film was planned "
    "but never made .",
    (0, "Quarrel of the Bells"),
    "The Quarrel of the Bells was a dispute between two parishes of the town of Oster . Each held that the other rang its noon bell "
    "too early . A clockmaker was asked to judge , and found both of them late .",
]

HELLASWAG = [
    {"activity_label": "Baking bread", "ctx_a": "A woman stands at a table and kneads dough.", "ctx_b": "she",
     "endings": ["puts the loaf in the oven.", "paints the dough with a broom.", "throws the table out.", "swims to the oven door."],
     "label": 0},
    {"activity_label": "Home and Garden",
     "ctx_a": "[header] How to plant a hedge [title] Choose the plants. [step] Look for plants that grow thickly.", "ctx_b": "",
     "endings": ["[substeps] Thorns keep out sheep.", "Buy a boat.", "Eat them while they are warm.", "Sing to the sheep at night."],
     "label": 0},
    {"activity_label": "Fencing", "ctx_a": "Two men in white masks face each other.  One lifts his sword.", "ctx_b": "the other man",
     "endings": ["bows and steps back.", "eats  his  sword.", "becomes a white horse.", "reads the judge a letter."], "label": "0"},
    {"activity_label": "Rowing", "ctx_a": "Four people row down a river.", "ctx_b": "they",
     "endings": ["pull the oars together.", "pull the oars together.", "boil the river.", "pull the oars together."], "label": 1},
    {"activity_label": "Shaving", "ctx_a": "A man looks into a mirror and lathers his face.", "ctx_b": "he then",
     "endings": ["takes a razor and begins.", "takes the mirror to dance.", "is a razor.", "wins the race."], "label": 0},
    {"activity_label": "Personal Care",
     "ctx_a": "[header] How to fold a letter [title] Lay it flat. [step] Smooth it with your hand.",
     "ctx_b": "[title] Bring the lower edge up. [step] Leave a third of the page above it.",
     "endings": ["Press the fold.", "[title] Burn it. [step] Wait.", "The king will come to the hall.", "Ask the page."], "label": 3},
    {"activity_label": "Playing the lute", "ctx_a": "A boy sits on a wall with a lute.", "ctx_b": "He",
     "endings": ["tunes it, and plays.", "climbs into it.", "salts it.", "plants it by the wall and waters it."], "label": 0},
    {"activity_label": "Sharpening knives", "ctx_a": "An old smith turns a wheel with his foot.", "ctx_b": "sparks",
     "endings": ["fly from the blade.", "sing of love and of war.", "are the best of men, my lord.", "sleep."], "label": 2},
    {"activity_label": "Crossing a caf\u00e9", "ctx_a": "A waiter carries nine cups.", "ctx_b": "ÉVERYONE watches",
     "endings": ["as he slips.", "the caf\u00e9\u2019s clock.", "and the cups \u2014 all nine \u2014 fall.", "him sail."], "label": 2},
]

QUESTIONS = [
    ("What do the roots of a plant take up?", ["water", "moonlight", "noise from the street", "paper"], "A", "ABCD"),
    ("Which of these is a liquid at room temperature?", ["iron", "mercury", "salt", "glass"], "B", "ABCD"),
    ("Why does a ship float?", ["It is painted.", "It pushes water aside.", "It is old.", "It fears the deep."], "2", "1234"),
    ("Which tool measures temperature?", ["a ruler", "a scale", "a thermometer"], "3", "123"),
    ("What is the sun?", ["a star", "a planet", "a moon", "a lamp that the gods lit"], "A", "ABCD"),
    ("Which animal lays eggs?", ["horse", "dog", "hen", "cow", "whale"], "C", "ABCDE"),
    ("What makes shadows move during the day?", ["The earth turns.", "The wind blows.", "Men walk.", "Night."], "A", "ABCD"),
    ("What is left when sea water dries?", ["salt", "gold", "bread and honey", "the king's own crown"], "A", "ABCD"),
    ("What carries blood from the heart?", ["arteries", "bones", "hair", "nails"], "1", "1234"),
    ("What does the moon do to the sea?", ["It pulls the tides.", "It heats it.", "Nothing.", "It salts it."], "A", "ABCD"),
]

PIQA = [
    ("keep bread fresh", "Put it in a closed box.", "Put it in the rain.", 0),
    ("To open a stuck jar,", "shout at it until it yields", "hold the lid under hot water", 1),
    ("light a candle", "Hold a match to its wick.", "Hold a match to its foot.", 0),
    ("find north at night", "Look for the pole star.", "Ask the nearest owl.", 0),
    ("dry a wet book", "Put it into the oven with the meat.", "Stand it open where air moves.", 1),
    ("sharpen a pencil", "Turn it in a sharpener.", "Turn it in a purse.", 0),
    ("How do you carry eggs?", "In a basket.", "In a sling, at a run.", 0),
    ("cool hot soup", "Blow on it.", "Blow on the cook.", 0),
    ("To keep moths from wool,", "leave a lamp by it", "lay cedar wood beside it", 1),
    ("cross an icy pond", "Go around it.", "Jump as high as you can.", 0),
]

SCIQ = [
    ("Bees carry pollen from flower to flower.", "What do bees carry?", ["letters", "stones", "snow"], "pollen"),
    ("", "What do lungs take in?", ["sand", "blood", "light"], "air"),
    ("  Ice is lighter than water, and so it floats.", "What floats on water?", ["lead", "iron", "gold"], "ice"),
    ("A lens bends light.", "What bends light?", ["a drum", "a bell", "a letter from the king"], "a lens"),
    ("Rust is iron that has joined with oxygen.", "What does iron join with?", ["salt", "sugar", "wax"], "oxygen"),
    ("Sound needs something to travel in.", "Where is there no sound?", ["in water", "in air", "in iron"], "in empty space"),
    ("Yeast makes dough rise.", "What makes dough rise?", ["the baker's song", "flour", "salt"], "yeast"),
    ("", "Who wears a crown?", ["a grey heron in the reeds", "nobody but the clockmaker", "a mule that fell"], "the king"),
    ("Iron sinks.", "What does iron do?", ["dances by the fire at noon", "writes letters to its cousin", "blossoms"], "sink"),
    ("Trees grow a ring each year.", "How old is a tree of ten rings?", ["one year", "a hundred years", "two"], "ten years"),
]

OPENBOOKQA = [
    ("A stone that falls into a pond makes", ["waves", "wine", "a bridge", "dust"], "A"),
    ("In winter many birds fly", ["south", "backwards", "to the moon", "under the ice"], "A"),
    ("A wet shirt dries because the water", ["burns", "evaporates", "freezes", "hides"], "B"),
    ("The best place for a plant that loves shade is", ["a desert", "a roof", "under a tree", "a shelf of ice"], " C"),
    ("Coal is made of", ["old plants", "iron", "salt", "the bones of kings"], "A"),
    ("A mirror shows things because it", ["glows", "reflects light", "is cold", "loves thee"], "B"),
    ("What turns a compass needle?", ["the earth", "the sea", "the captain", "a great noise"], "A"),
    ("A seed needs water, warmth and", ["air", "a song", "iron", "a sword"], "A"),
]

WINOGRANDE = [
    ("The sword would not fit into the chest because the _ was too long.", "sword", "chest", "1"),
    ("Anne thanked Ruth for the bread, since _ had baked it.", "Anne", "Ruth", "2"),
    ("He poured the water from the jug into the cup until the _ was full.", "jug", "cup", "2"),
    ("The king forgave the duke because _ was merciful.", "the king", "the duke", "1"),
    ('Paul called Hugh "a liar, and worse", so _ struck him.', "Paul", "Hugh", "2"),
    ("The oak outlived the elm, for the _ had deeper roots.", "oak", "elm", "1"),
    ("Tom ran after Will, but _ was slower and lost him.", "Tom", "Will", "1"),
    ("The boat passed the buoy before the _ sank.", "boat", "buoy", "1"),
    ("Kate lent Jane her cloak because _ was cold.", "Kate", "Jane", "2"),
    ("The song was longer than the play, yet the _ bored no one.", "song", "play", "1"),
]

BLIMP = {
    "anaphor_number_agreement": [
        ("The brothers blamed themselves.", "The brothers blamed himself."),
        ("A queen saw herself.", "A queen saw themselves."),
        ("Most sailors know themselves.", "Most sailors know itself."),
        ("This man hates himself.", "This man hates themselves."),
        ("Those ladies dressed themselves.", "Those ladies dressed herself."),
    ],
    "irregular_past_participle_verbs": [
        ("The knight broke the cup.", "The knight broken the cup."),
        ("Edward hid the letter.", "Edward hidden the letter."),
        ("My cousin wore a crown.", "My cousin worn a crown."),
        ("The wolves ate.", "The wolves eaten."),
        ("A page forgot the words.", "A page forgotten the words."),
        ("The duke wrote to Anne.", "The duke written to Anne."),
        ("She took the ring.", "She taken the ring."),
    ],
}

TEXT = """First Keeper:
Who walks so late upon the sea-wall there?

Second Keeper:
None but the fog, good friend, and I; and he walks better than I do, for he has no boots to fill.

First Keeper:
Then bid him stand and give the word \u2014 or has he none? \u201cNaïve\u201d is the word tonight: I heard the captain say it, 3 times, to a gull.

Second Keeper:
The word is spoken. Let us trim the lamp,
And if the ships should ask us who we were,
Say: two who kept a light, and argued well,
And saw the morning come, and went to bed.

First Keeper:
What, is it morning?  I had thought the sky
Was but the lamp grown greater than its house.
Come, come: the stair is long, the bread is cold,
And thou hast yet to tell me how it ends.
"""


def wiki():
    lines = [" "]
    for entry in WIKI:
        lines += [TITLES[entry[0]].format(entry[1]), " "] if isinstance(entry, tuple) else [f" {entry} "]
        if not isinstance(entry, tuple):
            lines.append(" ")
    return "\n".join(lines) + "\n"


def jsonl(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def csv_of(rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def hellaswag():
    for number, item in enumerate(HELLASWAG):
        context = f"{item['ctx_a']} {item['ctx_b']}".strip()
        source = {"split": "val", "split_type": "indomain", "source_id": f"invented~{number}"}
        yield {"ind": 10 + 7 * number, **item, "ctx": context, **source}


def questions(upstream):
    for number, (question, choices, answer, labels) in enumerate(QUESTIONS):
        columns = {"text": choices, "label": list(labels[: len(choices)])}
        if upstream:
            pairs = [dict(zip(columns, pair, strict=True)) for pair in zip(*columns.values(), strict=True)]
            question, columns = {"stem": question, "choices": pairs}, None
        record = {"id": f"Own_{number}", "question": question, "choices": columns, "answerKey": answer}
        yield {name: value for name, value in record.items() if value is not None}


def prepared_hellaswag(prepared):
    """Yields the items as other tools distribute them; the key of the correct choice varies."""
    for number, item in enumerate(hellaswag()):
        query, choices, gold = prepared(item)
        yield {"ind": item["ind"], "query": query, "choices": choices, ("gold", "label")[number % 2]: gold}


def six_lines(prepared):
    items = [prepared(item) for item in hellaswag()]
    return "".join("\n".join([query, str(gold), *endings]) + "\n" for query, endings, gold in items)


def samples():
    """Yields file names and their contents."""
    # Skips single words, and the item that exceeds a small context.
    split = [text.rpartition(" ") for text in LAMBADA if " " in text and LONG not in text]
    obqa = [{"id": f"own-{number}", "question_stem": stem, "choices": {"text": texts, "label": list("ABCD")}, "answerKey": answer}
            for number, (stem, texts, answer) in enumerate(OPENBOOKQA)]
    sciq = [{"question": question, **{f"distractor{place}": text for place, text in enumerate(wrong, 1)}, "correct_answer": right,
             "support": support} for support, question, wrong, right in SCIQ]
    winogrande_fields = ("sentence", "option1", "option2", "answer")
    wiki_text = wiki()
    yield "lambada.jsonl", jsonl({"text": text} for text in LAMBADA)
    yield "lambada_parts.jsonl", jsonl({"context": context, "continuation": word} for context, _, word in split)
    yield "wiki.raw", wiki_text
    yield "wiki_pages.jsonl", jsonl({"page": page} for page in harness.pages_of(wiki_text))
    yield "hellaswag.jsonl", jsonl(hellaswag())
    yield "hellaswag_prepared.jsonl", jsonl(prepared_hellaswag(oracle.prepared))
    yield "hellaswag.txt", six_lines(oracle.prepared)
    yield "arc.jsonl", jsonl(questions(upstream=False))
    yield "arc_upstream.jsonl", jsonl(questions(upstream=True))
    yield "piqa.jsonl", jsonl(dict(zip(("goal", "sol1", "sol2", "label"), item, strict=True)) for item in PIQA)
    yield "sciq.jsonl", jsonl(sciq)
    yield "openbookqa.jsonl", jsonl(obqa)
    yield "winogrande.jsonl", jsonl(dict(zip(winogrande_fields, item, strict=True)) for item in WINOGRANDE)
    yield "winogrande.csv", csv_of([winogrande_fields, *WINOGRANDE])
    for paradigm, pairs in BLIMP.items():
        records = [{"sentence_good": good, "sentence_bad": bad, "UID": paradigm, "pair_id": str(place)} for place, (good, bad) in enumerate(pairs)]
        yield f"blimp/{paradigm}.jsonl", jsonl(records)
    yield "text.txt", TEXT


def write_samples(folder):
    for name, text in samples():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


# Protocols and their data; protocols with a number or a context occur several times.
OF_HARNESS = [
    ("lambada:lm-eval", "lambada.jsonl"),
    ("lambada:lm-eval", "lambada_parts.jsonl"),
    ("wikitext:lm-eval", "wiki.raw"),
    ("wikitext:lm-eval", "wiki_pages.jsonl"),
    ("hellaswag:lm-eval", "hellaswag.jsonl"),
    ("hellaswag:lm-eval", "hellaswag_prepared.jsonl"),
    ("arc-easy:lm-eval", "arc.jsonl"),
    ("arc-challenge:lm-eval", "arc_upstream.jsonl"),
    ("piqa:lm-eval", "piqa.jsonl"),
    ("sciq:lm-eval", "sciq.jsonl"),
    ("openbookqa:lm-eval", "openbookqa.jsonl"),
    ("winogrande:lm-eval", "winogrande.jsonl"),
    ("winogrande:lm-eval", "winogrande.csv"),
    ("blimp:lm-eval", "blimp"),
]
OF_ORACLE = [
    # Strides: the context, a divisor of it, and a number that does not divide it.
    ("wikitext:hf-{context}", "wiki.raw", None),
    ("wikitext:hf-{half}", "wiki.raw", None),
    ("wikitext:hf-19", "wiki.raw", None),
    ("wikitext:megatron", "wiki.raw", None),
    ("wikitext:megatron-{context}", "wiki.raw", None),
    ("wikitext:megatron-7", "wiki.raw", None),
    ("wikitext:llama.cpp", "wiki.raw", None),
    ("wikitext:llama.cpp", "wiki.raw", 33),
    ("text:bits", "text.txt", None),
    ("text:bits-{context}", "text.txt", None),
    ("text:bits-5", "text.txt", None),
    ("kl", "text.txt", 48),
    ("kl", "wiki.raw", 33),
]
# Protocols that do not define how to treat items longer than the context; all items in their data fit.
ONLY_LARGE = [
    ("lambada:last-token", "lambada_parts.jsonl", None),
    ("lambada:megatron-strict", "lambada_parts.jsonl", None),
    ("lambada:stop-words", "lambada_parts.jsonl", None),
    ("hellaswag:llm.c", "hellaswag.jsonl", None),
    ("hellaswag:llama.cpp", "hellaswag.jsonl", None),
    ("hellaswag:llama.cpp", "hellaswag.txt", None),
]


def cases(context):
    """Returns the protocols, their data and their window lengths for a model with this context."""
    numbers = {"context": context, "half": context // 2}
    others = OF_ORACLE + (ONLY_LARGE if context >= 256 else [])
    return [(*case, None) for case in OF_HARNESS] + [(case[0].format(**numbers), *case[1:]) for case in others]


# Configuration of the other model in `kl`, which has the same weights.
OTHER_CONFIG = {"layer_norm_epsilon": 0.01}


def rounded(value, digits=6):
    """Rounds values, so that their digits do not depend on the machine."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        # Figures may be small, so they are rounded to significant digits.
        return {name: float(f"{part:.8g}") if isinstance(part, float) and name != "logprob" else rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def with_other_config(folder, into):
    for path in folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, into / path.name)
    config = json.loads((into / "config.json").read_text()) | OTHER_CONFIG
    (into / "config.json").write_text(json.dumps(config))


def expectations(name, folder):
    """Yields the expected results of a model, one case at a time."""
    hf, model = harness.model(folder), oracle.Model(folder)
    with tempfile.TemporaryDirectory() as other:
        with_other_config(folder, pathlib.Path(other))
        changed = oracle.Model(other)
        for protocol, data, context in cases(model.context):
            path = common.place("evaluation") / data
            if protocol in harness.TASKS:
                yield {"model": name, "data": data, "by": "lm-evaluation-harness", **harness.evaluate(hf, protocol, path)}
                continue
            asked, base = (changed, model) if protocol == "kl" else (model, None)
            found = oracle.evaluate(protocol, asked, path, context=context, base=base)
            extra = {"context": context} if context else {}
            yield {"model": name, "data": data, "by": "oracle.py", **extra, **found}


def export(arguments):
    target = common.place("evaluation")
    write_samples(target)
    models = {"built-in": common.built_in(), "tiny-checkpoint": common.TINY}
    if arguments.checkpoints:
        models["tarotble"] = arguments.checkpoints / "tarotble"
    packages = ("lm_eval", "torch", "transformers", "tokenizers")
    versions = {package: importlib.metadata.version(package).split("+")[0] for package in packages}
    cases = [rounded(case) for name, folder in models.items() for case in expectations(name, folder)]
    # One line per case, for readable diffs.
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    head = json.dumps({"versions": versions, "other_config": OTHER_CONFIG})[1:-1]
    (target / "expected.json").write_text(f"{{{head},\n\"cases\": [\n{lines}\n]}}\n", encoding="utf-8")
    for case in cases:
        print(case["model"], case["protocol"], case["data"], case["metrics"])
