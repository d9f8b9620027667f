"""Rows: what a row gives is its own affair, whatever is beside it, however it is brought, and in whatever process."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2 import Rows
from candle_gpt2.rows import row_seed

from support import FIXTURES

PROMPTS = ["One day", "Once there was", "One day", "My lord, I will", "The king", "One day", "What say you", "Enter"]
IDS = ["a", "b", "c", "d", 5, 6, 7, 8]
LENGTH = 8
# More tokens than any context that the model inside the package may have.
TOO_LONG = "to be or not to be " * 2000


def rows(**options):
    return Rows(**{"max_new_tokens": LENGTH, **options})


def texts_of(**options):
    return rows(**options)({"id": IDS, "prompt": PROMPTS})["text"]


@pytest.fixture(scope="module")
def model():
    return candle_gpt2.Model.from_pretrained()


@pytest.mark.parametrize(
    ("seed", "row_id", "expected"),
    # printf '0:a' | b2sum -l 64, its bytes from the last to the first as a number, halved.
    [(0, "a", 8281872861307171038), (7, 42, 5619980143770806507), (7, "42", 5619980143770806507)],
)
def test_the_seed_of_a_row_is_the_documented_hash(seed, row_id, expected):
    assert row_seed(seed, row_id) == expected


def test_a_text_is_what_the_model_gives_under_the_seed_of_the_row(model):
    for prompt, row_id, text in zip(PROMPTS, IDS, texts_of(seed=7), strict=True):
        assert text == model.generate(prompt, seed=row_seed(7, row_id), max_new_tokens=LENGTH)


def test_rows_with_other_ids_draw_other_texts_of_one_prompt():
    texts = texts_of()
    assert len({texts[0], texts[2], texts[5]}) == 3


def test_other_seeds_of_the_job_give_other_texts():
    assert texts_of(seed=1) == texts_of(seed=1)
    assert texts_of(seed=1) != texts_of(seed=2)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_texts_do_not_depend_on_how_rows_are_cut(cut):
    one = rows()
    cuts = [one({"id": IDS[at : at + cut], "prompt": PROMPTS[at : at + cut]}) for at in range(0, len(IDS), cut)]
    assert [text for batch in cuts for text in batch["text"]] == texts_of()


def test_texts_do_not_depend_on_the_order_of_rows():
    turned = rows()({"id": IDS[::-1], "prompt": PROMPTS[::-1]})["text"]
    assert turned[::-1] == texts_of()


def test_a_column_of_seeds_goes_before_the_ids(model):
    seeds = [3, 3, 3, 4, 2**64 - 1, 0, 1, 2]
    made = rows(seed_column="draw")({"prompt": PROMPTS, "draw": seeds})
    assert made["text"] == [
        model.generate(prompt, seed=seed, max_new_tokens=LENGTH) for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]


def test_without_ids_every_row_draws_with_the_same_seed(model):
    made = rows(id_column=None, seed=9)({"prompt": PROMPTS})
    assert made["text"] == [model.generate(prompt, seed=9, max_new_tokens=LENGTH) for prompt in PROMPTS]
    assert made["text"][0] == made["text"][2]


def test_greedy_texts_need_no_ids(model):
    made = rows(do_sample=False)({"prompt": PROMPTS})
    assert made["text"] == [model.generate(prompt, do_sample=False, max_new_tokens=LENGTH) for prompt in PROMPTS]


@pytest.fixture(params=[{"do_sample": False}, {"num_beams": 3, "do_sample": False}], ids=["greedy", "beams"])
def searching(request, tmp_path):
    """The folder of a model whose own configuration draws nothing."""
    folder = shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "searching")
    (folder / "generation_config.json").write_text(json.dumps(request.param))
    return folder


def test_seeds_draw_only_where_the_model_or_an_option_does(searching):
    model = candle_gpt2.Model.from_pretrained(searching)
    expected = model.generate(PROMPTS, max_new_tokens=LENGTH)
    batch = {"id": IDS, "prompt": PROMPTS, "draw": [7] * len(IDS)}
    for options in ({"seed": 7}, {"seed_column": "draw"}, {"id_column": None, "seed": 7}):
        assert rows(model=searching, **options)(batch)["text"] == expected
    for asked in ({"do_sample": True}, {"top_k": 5}):
        drawn = [model.generate(p, seed=row_seed(7, i), max_new_tokens=LENGTH, **asked) for p, i in zip(PROMPTS, IDS)]
        assert drawn != expected
        assert rows(model=searching, seed=7, **asked)(batch)["text"] == drawn


def test_a_model_that_does_not_draw_gives_the_texts_of_the_program(searching, program, tmp_path):
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    given = ["--prompts-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", str(LENGTH)]
    printed = program("generate", "--model", str(searching), *given).splitlines()
    assert rows(model=searching, seed=7)({"id": IDS, "prompt": PROMPTS})["text"] == [
        json.loads(line)["text"] for line in printed
    ]


def test_token_ids_are_prompts_too(model):
    ids = [int(token) for token in model.encode(PROMPTS[0])]
    made = rows()({"id": ["a", "a"], "prompt": [PROMPTS[0], ids]})
    assert made["error"] == [None, None]
    assert made["text"][0] == made["text"][1]


def test_many_texts_of_a_prompt_are_a_list():
    made = rows(num_return_sequences=3, temperature=1.5)({"id": ["a"], "prompt": ["One day"]})
    assert len(set(made["text"][0])) == 3
    assert made["error"] == [None]
    batch = {"id": np.array([1, 2]), "prompt": np.array(["One day", "Once there was"], object)}
    arrays = rows(num_return_sequences=3)(batch)
    assert arrays["text"].shape == (2,)
    assert [len(set(texts)) for texts in arrays["text"]] == [3, 3]
    assert rows(num_return_sequences=3)({name: list(column) for name, column in batch.items()})["text"] == list(arrays["text"])


@pytest.mark.parametrize("bad", [TOO_LONG, None, 5, float("nan"), ["a"], [1.5], [2**31]])
def test_a_row_that_cannot_work_harms_no_other(bad):
    prompts = [*PROMPTS[:3], bad, *PROMPTS[3:]]
    ids = [*IDS[:3], "bad", *IDS[3:]]
    made = rows()({"id": ids, "prompt": prompts})
    assert made["text"][3] is None
    assert isinstance(made["error"][3], str) and made["error"][3]
    assert made["text"][:3] + made["text"][4:] == texts_of()
    assert made["error"][:3] + made["error"][4:] == [None] * len(IDS)


@pytest.mark.parametrize("row_id", [None, ["a"], {"a": 1}])
def test_a_row_without_an_id_says_so(row_id):
    made = rows()({"id": ["a", row_id], "prompt": ["One day", "One day"]})
    assert made["text"][0] == texts_of()[0]
    assert made["text"][1] is None
    assert made["error"][1].startswith("id: expected a text or a number, found ")


@pytest.mark.parametrize("seed", [None, -1, 2**64, "7", True, 1.5])
def test_a_row_with_a_wrong_seed_says_so(seed):
    made = rows(seed_column="seed_of_row")({"prompt": ["One day"], "seed_of_row": [seed]})
    assert made["error"][0].startswith("seed: expected a whole number from 0 to 2^64 - 1, found ")


def test_rows_at_temperature_0_are_greedy_whatever_their_seeds():
    batch = {"id": ["a", "b"], "prompt": ["One day", "One day"]}
    made = rows(temperature=0, max_new_tokens=6)(batch)
    assert made["error"] == [None, None]
    assert made["text"] == rows(do_sample=False, max_new_tokens=6)(batch)["text"]


def test_wrong_options_fail_at_once_and_not_in_each_row():
    with pytest.raises(TypeError, match="max_new_token"):
        rows(max_new_token=5)({"id": ["a"], "prompt": ["One day"]})
    with pytest.raises(ValueError, match="temperature"):
        rows(temperature=-1.0)({"id": ["a", "b"], "prompt": ["One day", "One day"]})


def test_a_model_that_is_not_there_fails_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        rows(model=str(tmp_path / "nothing"))({"id": ["a"], "prompt": ["One day"]})


def test_batches_where_all_rows_fail_are_the_rows_fault():
    made = rows()({"id": ["a", "b"], "prompt": [TOO_LONG, TOO_LONG]})
    assert made["text"] == [None, None]
    assert all(made["error"])


def test_a_column_that_is_missing_is_named():
    with pytest.raises(ValueError, match="there is no column 'prompt' among 'id', 'text_of_it'"):
        rows()({"id": ["a"], "text_of_it": ["One day"]})
    with pytest.raises(ValueError, match="give id_column, seed_column, or id_column=None"):
        rows()({"prompt": ["One day"]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "translate"}, "task: expected one of generate, score"),
        ({"prompt_column": "text"}, "the column 'text' is both read and written"),
        ({"seed": None}, "it needs id_column=None"),
        ({"seed": -1}, "seed: expected a whole number"),
        ({"details": True}, "details: rows have no column for what it gives"),
    ],
)
def test_wrong_arguments_are_refused_when_they_are_given(arguments, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        Rows(**arguments)


def test_scores_are_those_of_the_model(model):
    made = Rows(task="score")({"prompt": ["What say you to this?", "", None, "Good morrow"]})
    [first, *_, last] = model.score(["What say you to this?", "Good morrow"])
    for row, score in ((0, first), (3, last)):
        assert made["error"][row] is None
        assert made["loss"][row] == score["loss"]
        assert made["perplexity"][row] == pytest.approx(math.exp(made["loss"][row]), rel=1e-5)
        assert made["tokens"][row] == len(score["ids"])
        # The first token has nothing before it.
        assert made["logprob"][row] == pytest.approx(-made["loss"][row] * (made["tokens"][row] - 1), rel=1e-5)
    for row in (1, 2):
        assert [made[name][row] for name in ("tokens", "logprob", "loss", "perplexity")] == [None] * 4
        assert made["error"][row]


def test_rows_pickle_as_what_they_were_made_with():
    one = rows(seed=7)
    expected = one({"id": IDS, "prompt": PROMPTS})["text"]
    content = pickle.dumps(one)
    assert len(content) < 1000
    assert pickle.loads(content)({"id": IDS, "prompt": PROMPTS})["text"] == expected


def test_what_is_on_this_machine_is_found_from_every_folder(tmp_path, monkeypatch):
    for name in ("here", "draft"):
        shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    one = rows(model="here", model_options={"tokenizer": "here", "assistant_model": "draft", "dtype": "f32"})
    there = {"tokenizer": str(tmp_path / "here"), "assistant_model": str(tmp_path / "draft"), "dtype": "f32"}
    assert (one.model, one.model_options) == (str(tmp_path / "here"), there)
    monkeypatch.chdir("/")
    made = pickle.loads(pickle.dumps(one))({"id": IDS, "prompt": PROMPTS})
    assert made["error"] == [None] * len(IDS)
    assert rows(model="gpt2").model == "gpt2"


def test_an_open_model_is_no_name(model):
    with pytest.raises(TypeError, match="model: expected a name or a path, found Model; each process opens a model of its own"):
        Rows(model)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("task", ["generate", "score"])
def test_a_fork_raises_in_place_of_an_error_in_every_row(python, task):
    done = python(
        f"""
import os, sys, warnings
from candle_gpt2 import Gpt2Error, Rows
warnings.simplefilter("ignore")  # Python warns of forks beside threads
rows, batch = Rows(task={task!r}), {{"id": ["a", "b"], "prompt": ["One day", "Once there was"]}}
assert rows(batch)["error"] == [None, None]
if os.fork() == 0:
    try:
        rows(batch)
    except Gpt2Error as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    )
    assert done.stdout.startswith("this process was forked from process"), done.stdout + done.stderr


def test_another_process_gives_the_same_texts():
    program = (
        "import pickle, sys; rows, batch = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(pickle.dumps(rows(batch)['text']))"
    )
    content = pickle.dumps((rows(), {"id": IDS, "prompt": PROMPTS}))
    done = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, check=True, timeout=100)
    assert pickle.loads(done.stdout) == texts_of()


def test_a_process_opens_a_model_once(monkeypatch):
    opened = []

    class Opens:
        @staticmethod
        def from_pretrained(*arguments, **options):
            opened.append((arguments, options))
            return candle_gpt2_model.from_pretrained(*arguments, **options)

    candle_gpt2_model = candle_gpt2.Model
    monkeypatch.setattr("candle_gpt2.rows._opened", None)
    monkeypatch.setattr(candle_gpt2, "Model", Opens)
    one = rows()
    for _ in range(2):
        pickle.loads(pickle.dumps(one))({"id": ["a"], "prompt": ["One day"]})
    assert opened == [((None,), {})]


def test_arrays_of_numpy_come_back_as_arrays():
    batch = {"id": np.array([5, 6]), "prompt": np.array(["The king", "One day"]), "kept": np.array([1.5, 2.5])}
    for column in batch.values():
        column.flags.writeable = False
    made = rows()(batch)
    assert made["text"].dtype == object
    assert made["text"].tolist() == [texts_of()[4], texts_of()[5]]
    assert made["kept"] is batch["kept"]
    scored = Rows(task="score")(batch)
    assert (scored["tokens"].dtype, scored["loss"].dtype) == (np.int64, np.float64)


def test_frames_of_pandas_come_back_as_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": IDS, "prompt": PROMPTS}, index=range(10, 18))
    frame.loc[12, "prompt"] = None
    made = rows()(frame)
    assert list(made.columns) == ["id", "prompt", "text", "error"]
    assert list(made.index) == list(frame.index)
    kept = [0, 1, *range(3, 8)]
    assert [made["text"].iloc[row] for row in kept] == [texts_of()[row] for row in kept]
    assert made["error"].iloc[2].startswith("prompt: expected a text")


def test_tables_of_arrow_have_the_same_types_whatever_fails():
    pyarrow = pytest.importorskip("pyarrow")
    tables = [
        rows()(pyarrow.table({"id": ["a"], "prompt": pyarrow.array([prompt], pyarrow.string())}))
        for prompt in ("One day", None)
    ]
    assert tables[0].schema == tables[1].schema
    assert tables[0].column_names == ["id", "prompt", "text", "error"]
    assert tables[0]["text"].to_pylist() == [texts_of()[0]]
    assert tables[1]["text"].to_pylist() == [None]


def test_no_rows_are_no_rows():
    assert rows()({"id": [], "prompt": []}) == {"id": [], "prompt": [], "text": [], "error": []}


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="of one length"):
        rows()({"id": ["a"], "prompt": []})


def test_rows_need_no_engine():
    program = "import sys; import candle_gpt2; candle_gpt2.Rows; print([m for m in ('ray', 'pyarrow', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"


