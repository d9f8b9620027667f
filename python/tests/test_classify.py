"""Classifiers: equal to transformers, with checkpoints and results from `scripts/reference/heads.py`."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import Classifier

from support import FIXTURES

HEADS = FIXTURES / "heads"
EXPECTED = json.loads((HEADS / "expected.json").read_text())
TEXTS = EXPECTED["texts"]
# Tolerance for float32 sums over three blocks in a different order than PyTorch's.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def sequence() -> Classifier:
    return Classifier.from_pretrained(HEADS / "sequence")


def logits(labels, names):
    by_name = {label["label"]: label["logit"] for label in labels}
    return [by_name[name] for name in names]


@pytest.mark.parametrize("name", ["sequence", "multi_label"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_labels_match_transformers(name, batch_size):
    model, expected = Classifier.from_pretrained(HEADS / name), EXPECTED[name]
    found = model.classify(TEXTS, batch_size=batch_size)
    assert len(found) == len(TEXTS)
    for index, entry in enumerate(found):
        assert entry["prompt_ids"] == expected["ids"][index]
        np.testing.assert_allclose(logits(entry["labels"], model.labels), expected["logits"][index], atol=TOLERANCE)
        for label, score in zip(entry["labels"], expected["pipeline"][index], strict=True):
            assert label["label"] == score["label"]
            assert label["score"] == pytest.approx(score["score"], abs=TOLERANCE)
    one = model.classify(np.array(expected["ids"][0]))
    np.testing.assert_allclose(logits(one["labels"], model.labels), expected["logits"][0], atol=TOLERANCE)
    assert model.classify([]) == []


def test_token_labels_and_offsets_match_transformers():
    model, expected = Classifier.from_pretrained(HEADS / "token"), EXPECTED["token"]
    assert len(model.labels) == 7
    for text, ids, entities in zip(TEXTS, expected["ids"], expected["pipeline"], strict=True):
        tokens = model.classify(text)["tokens"]
        assert [token["id"] for token in tokens] == ids
        for entity in entities:
            token = tokens[entity["index"]]
            assert (token["start"], token["end"]) == (entity["start"], entity["end"])
            assert token["labels"][0]["label"] == entity["entity"]
            assert token["labels"][0]["score"] == pytest.approx(entity["score"], abs=TOLERANCE)


def test_choices_are_ranked():
    model, expected = Classifier.from_pretrained(HEADS / "double"), EXPECTED["double"]
    found = model.classify(expected["ids"])["choices"]
    by_index = [choice["logit"] for choice in sorted(found, key=lambda choice: choice["index"])]
    np.testing.assert_allclose(by_index, expected["logits"], atol=TOLERANCE)
    one = model.classify("The sky is", choices=[" blue", " green"])
    assert {choice["text"] for choice in one["choices"]} == {" blue", " green"}
    both = model.classify(["The sky is", "A"], [[" blue", " green"], ["b"]])
    assert both[0]["prompt_ids"] == one["prompt_ids"]
    assert both[1]["choices"][0]["score"] == 1.0
    with pytest.raises(ValueError, match="pass choices"):
        model.classify("The sky is")
    with pytest.raises(ValueError, match="one list for each of the 1 texts, found 2 lists"):
        model.classify(["The sky is"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="at least one choice"):
        model.classify("The sky is", [])
    # A classifier folder also opens as a language model.
    assert candle_gpt2.Model.from_pretrained(HEADS / "double").generate([5, 6], max_new_tokens=2, seed=1) is not None


def test_classifier_is_picklable_and_thread_safe(sequence):
    assert Classifier.from_pretrained(HEADS / "sequence", dtype="q8").dtype == "q8"
    copy = pickle.loads(pickle.dumps(sequence))
    assert copy.classify(TEXTS) == sequence.classify(TEXTS)
    assert repr(sequence).startswith(f"Classifier({str(HEADS / 'sequence')!r}, ".replace("'", '"'))
    assert "GPT2ForSequenceClassification, 5 labels" in repr(sequence)
    assert sequence.config["id2label"]["2"] == "naïve café"
    assert sequence.decode(sequence.encode("café")) == "café"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sequence.classify, TEXTS))
    assert [entry["labels"][0]["label"] for entry in found] == [row[0]["label"] for row in EXPECTED["sequence"]["pipeline"]]


def test_invalid_calls_are_rejected(sequence):
    with pytest.raises(ValueError, match="GPT2LMHeadModel, a language model"):
        Classifier.from_pretrained(FIXTURES / "tiny-checkpoint")
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification, a classifier"):
        candle_gpt2.Model.from_pretrained(HEADS / "sequence")
    with pytest.raises(FileNotFoundError):
        Classifier.from_pretrained("/no/such/folder")
    with pytest.raises(ValueError, match="cannot rank choices"):
        sequence.classify("a", ["b"])
    with pytest.raises(ValueError, match="300"):
        sequence.classify([1, 300])
    with pytest.raises(ValueError, match="at least 1"):
        sequence.classify("a", batch_size=0)
    with pytest.raises(TypeError, match="expected a string"):
        sequence.classify(5)
    long = "citizen " * 60
    with pytest.raises(ValueError, match="40") as refused:
        sequence.classify(["a", long])
    assert "text 1" in refused.value.__notes__
    assert len(sequence.classify(long, keep_last=7)["prompt_ids"]) == 7


def test_inspect_verify_and_convert_support_classifiers(tmp_path, sequence):
    found = candle_gpt2.inspect(HEADS / "sequence")
    assert found["class"] == "GPT2ForSequenceClassification"
    assert found["stored_parameters"] == found["parameters"]["unique"]
    verified = candle_gpt2.verify(HEADS / "sequence")
    assert verified["sound"] and verified["batch_difference"] < TOLERANCE
    candle_gpt2.convert(HEADS / "sequence", tmp_path / "copy")
    assert Classifier.from_pretrained(tmp_path / "copy").classify(TEXTS) == sequence.classify(TEXTS)
    with pytest.raises(candle_gpt2.Gpt2Error, match="write a folder"):
        candle_gpt2.convert(HEADS / "sequence", tmp_path / "copy.gguf")


def rounded(value):
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def test_classify_matches_the_cli(program):
    for name, arguments in [("sequence", []), ("token", []), ("double", ["--choice", " b", "--choice", " c"])]:
        choices = [" b", " c"] if arguments else None
        found = Classifier.from_pretrained(HEADS / name).classify(TEXTS[0], choices)
        printed = program("classify", TEXTS[0], "--model", str(HEADS / name), "--json", *arguments)
        printed = json.loads(printed)
        assert printed["prompt_ids"] == found["prompt_ids"]
        # The values are equal, because the program prints the shortest distinguishing digits.
        assert printed.keys() == found.keys() and rounded(printed) == rounded(found)
