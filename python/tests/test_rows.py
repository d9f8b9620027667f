"""`Rows`: results do not depend on other rows, the batch type or the process."""

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
# A prompt that exceeds the context of every model in these tests.
TOO_LONG = "to be or not to be " * 2000


def rows(**options):
    return Rows(**{"max_new_tokens": LENGTH, **options})


def completions(**options):
    return rows(**options)({"id": IDS, "prompt": PROMPTS})["text"]


@pytest.fixture(scope="module")
def model():
    return candle_gpt2.Model.from_pretrained()


@pytest.mark.parametrize(
    ("seed", "row_id", "expected"),
    # The output of `printf '0:a' | b2sum -l 64` as a little-endian number, halved.
    [(0, "a", 8281872861307171038), (7, 42, 5619980143770806507), (7, "42", 5619980143770806507)],
)
def test_row_seed_is_the_documented_hash(seed, row_id, expected):
    assert row_seed(seed, row_id) == expected


def test_completions_match_the_model_with_the_row_seed(model):
    for prompt, row_id, text in zip(PROMPTS, IDS, completions(seed=7), strict=True):
        assert text == model.generate(prompt, seed=row_seed(7, row_id), max_new_tokens=LENGTH)


def test_different_ids_sample_different_completions():
    texts = completions(temperature=1.0)
    assert len({texts[0], texts[2], texts[5]}) == 3


def test_different_job_seeds_give_different_completions():
    assert completions(seed=1) == completions(seed=1)
    assert completions(seed=1) != completions(seed=2)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_completions_do_not_depend_on_the_batch_size(size):
    one = rows()
    batches = [one({"id": IDS[start : start + size], "prompt": PROMPTS[start : start + size]}) for start in range(0, len(IDS), size)]
    assert [text for batch in batches for text in batch["text"]] == completions()


def test_completions_do_not_depend_on_row_order():
    reversed_rows = rows()({"id": IDS[::-1], "prompt": PROMPTS[::-1]})["text"]
    assert reversed_rows[::-1] == completions()


def test_seed_column_takes_precedence_over_ids(model):
    seeds = [3, 3, 3, 4, 2**64 - 1, 0, 1, 2]
    result = rows(seed_column="draw")({"prompt": PROMPTS, "draw": seeds})
    assert result["text"] == [
        model.generate(prompt, seed=seed, max_new_tokens=LENGTH) for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]


def test_rows_without_ids_share_the_seed(model):
    result = rows(id_column=None, seed=9)({"prompt": PROMPTS})
    assert result["text"] == [model.generate(prompt, seed=9, max_new_tokens=LENGTH) for prompt in PROMPTS]
    assert result["text"][0] == result["text"][2]


def test_greedy_decoding_needs_no_ids(model):
    result = rows(do_sample=False)({"prompt": PROMPTS})
    assert result["text"] == [model.generate(prompt, do_sample=False, max_new_tokens=LENGTH) for prompt in PROMPTS]


@pytest.fixture(params=[{"do_sample": False}, {"num_beams": 3, "do_sample": False}], ids=["greedy", "beams"])
def non_sampling(request, tmp_path):
    """Folder with a model whose generation configuration does not sample."""
    folder = shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / "searching")
    (folder / "generation_config.json").write_text(json.dumps(request.param))
    return folder


def test_seeds_do_not_enable_sampling(non_sampling):
    model = candle_gpt2.Model.from_pretrained(non_sampling)
    expected = model.generate(PROMPTS, max_new_tokens=LENGTH)
    batch = {"id": IDS, "prompt": PROMPTS, "draw": [7] * len(IDS)}
    for options in ({"seed": 7}, {"seed_column": "draw"}, {"id_column": None, "seed": 7}):
        assert rows(model=non_sampling, **options)(batch)["text"] == expected
    for options in ({"do_sample": True}, {"top_k": 5}):
        sampled = [model.generate(p, seed=row_seed(7, i), max_new_tokens=LENGTH, **options) for p, i in zip(PROMPTS, IDS)]
        assert sampled != expected
        assert rows(model=non_sampling, seed=7, **options)(batch)["text"] == sampled


def test_non_sampling_model_matches_the_cli(non_sampling, program, tmp_path):
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    flags = ["--prompts-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", str(LENGTH)]
    printed = program("generate", "--model", str(non_sampling), *flags).splitlines()
    assert rows(model=non_sampling, seed=7)({"id": IDS, "prompt": PROMPTS})["text"] == [
        json.loads(line)["text"] for line in printed
    ]


def test_prompts_may_be_token_ids(model):
    ids = [int(token) for token in model.encode(PROMPTS[0])]
    result = rows()({"id": ["a", "a"], "prompt": [PROMPTS[0], ids]})
    assert result["error"] == [None, None]
    assert result["text"][0] == result["text"][1]


def test_several_completions_are_returned_as_a_list():
    options = {"num_return_sequences": 3, "temperature": 1.5, "min_p": 0.0}
    result = rows(**options)({"id": ["a"], "prompt": ["One day"]})
    assert len(set(result["text"][0])) == 3
    assert result["error"] == [None]
    batch = {"id": np.array([1, 2]), "prompt": np.array(["One day", "Once there was"], object)}
    arrays = rows(**options)(batch)
    assert arrays["text"].shape == (2,)
    assert [len(set(texts)) for texts in arrays["text"]] == [3, 3]
    assert rows(**options)({name: list(column) for name, column in batch.items()})["text"] == list(arrays["text"])


@pytest.mark.parametrize("bad", [TOO_LONG, None, 5, float("nan"), ["a"], [1.5], [2**31]])
def test_invalid_row_does_not_affect_other_rows(bad):
    prompts = [*PROMPTS[:3], bad, *PROMPTS[3:]]
    ids = [*IDS[:3], "bad", *IDS[3:]]
    result = rows()({"id": ids, "prompt": prompts})
    assert result["text"][3] is None
    assert isinstance(result["error"][3], str) and result["error"][3]
    assert result["text"][:3] + result["text"][4:] == completions()
    assert result["error"][:3] + result["error"][4:] == [None] * len(IDS)


@pytest.mark.parametrize("row_id", [None, ["a"], {"a": 1}])
def test_row_without_a_valid_id_has_an_error(row_id):
    result = rows()({"id": ["a", row_id], "prompt": ["One day", "One day"]})
    assert result["text"][0] == completions()[0]
    assert result["text"][1] is None
    assert result["error"][1].startswith("id: expected a string or a number, found ")


@pytest.mark.parametrize("seed", [None, -1, 2**64, "7", True, 1.5])
def test_row_with_an_invalid_seed_has_an_error(seed):
    result = rows(seed_column="seed_of_row")({"prompt": ["One day"], "seed_of_row": [seed]})
    assert result["error"][0].startswith("seed: expected a whole number from 0 to 2^64 - 1, found ")


def test_temperature_zero_is_greedy_for_any_seed():
    batch = {"id": ["a", "b"], "prompt": ["One day", "One day"]}
    result = rows(temperature=0, max_new_tokens=6)(batch)
    assert result["error"] == [None, None]
    assert result["text"] == rows(do_sample=False, max_new_tokens=6)(batch)["text"]


def test_invalid_options_fail_the_whole_batch():
    with pytest.raises(TypeError, match="max_new_token"):
        rows(max_new_token=5)({"id": ["a"], "prompt": ["One day"]})
    with pytest.raises(ValueError, match="temperature"):
        rows(temperature=-1.0)({"id": ["a", "b"], "prompt": ["One day", "One day"]})


def test_missing_model_fails_the_whole_batch(tmp_path):
    with pytest.raises(FileNotFoundError):
        rows(model=str(tmp_path / "nothing"))({"id": ["a"], "prompt": ["One day"]})


def test_batch_of_invalid_rows_returns_row_errors():
    result = rows()({"id": ["a", "b"], "prompt": [TOO_LONG, TOO_LONG]})
    assert result["text"] == [None, None]
    assert all(result["error"])


def test_missing_column_is_named():
    with pytest.raises(ValueError, match="missing column 'prompt'; found 'id', 'text_of_it'"):
        rows()({"id": ["a"], "text_of_it": ["One day"]})
    with pytest.raises(ValueError, match="pass id_column, seed_column, or id_column=None"):
        rows()({"prompt": ["One day"]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "translate"}, "task: expected one of generate, score"),
        ({"prompt_column": "text"}, "column 'text' is both an input and an output"),
        ({"seed": None}, "pass id_column=None as well"),
        ({"seed": -1}, "seed: expected a whole number"),
        ({"details": True}, "details: not supported by Rows"),
    ],
)
def test_invalid_arguments_are_rejected_by_the_constructor(arguments, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        Rows(**arguments)


def test_scores_match_the_model(model):
    result = Rows(task="score")({"prompt": ["What say you to this?", "", None, "Good morrow"]})
    [first, *_, last] = model.score(["What say you to this?", "Good morrow"])
    for row, score in ((0, first), (3, last)):
        assert result["error"][row] is None
        assert result["loss"][row] == score["loss"]
        assert result["perplexity"][row] == pytest.approx(math.exp(result["loss"][row]), rel=1e-5)
        assert result["tokens"][row] == len(score["ids"])
        # The first token has no log-probability.
        assert result["logprob"][row] == pytest.approx(-result["loss"][row] * (result["tokens"][row] - 1), rel=1e-5)
    for row in (1, 2):
        assert [result[name][row] for name in ("tokens", "logprob", "loss", "perplexity")] == [None] * 4
        assert result["error"][row]


def test_rows_pickle_without_the_model():
    one = rows(seed=7)
    expected = one({"id": IDS, "prompt": PROMPTS})["text"]
    content = pickle.dumps(one)
    assert len(content) < 1000
    assert pickle.loads(content)({"id": IDS, "prompt": PROMPTS})["text"] == expected


def test_relative_paths_survive_a_directory_change(tmp_path, monkeypatch):
    for name in ("here", "draft"):
        shutil.copytree(FIXTURES / "tiny-checkpoint", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    one = rows(model="here", model_options={"tokenizer": "here", "assistant_model": "draft", "dtype": "f32"})
    absolute = {"tokenizer": str(tmp_path / "here"), "assistant_model": str(tmp_path / "draft"), "dtype": "f32"}
    assert (one.model, one.model_options) == (str(tmp_path / "here"), absolute)
    monkeypatch.chdir("/")
    result = pickle.loads(pickle.dumps(one))({"id": IDS, "prompt": PROMPTS})
    assert result["error"] == [None] * len(IDS)
    assert rows(model="gpt2").model == "gpt2"


def test_open_model_is_rejected(model):
    with pytest.raises(TypeError, match="model: expected a name or a path, found Model; each process opens its own model"):
        Rows(model)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("task", ["generate", "score"])
def test_fork_raises_instead_of_row_errors(python, task):
    done = python(
        f"""
import os, sys, warnings
from candle_gpt2 import Gpt2Error, Rows
warnings.simplefilter("ignore")  # Python warns about forks in processes with threads
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


def test_another_process_gives_the_same_completions():
    program = (
        "import pickle, sys; rows, batch = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(pickle.dumps(rows(batch)['text']))"
    )
    content = pickle.dumps((rows(), {"id": IDS, "prompt": PROMPTS}))
    done = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, check=True, timeout=100)
    assert pickle.loads(done.stdout) == completions()


def test_model_is_opened_once_per_process(monkeypatch):
    opened = []

    class CountingModel:
        @staticmethod
        def from_pretrained(*arguments, **options):
            opened.append((arguments, options))
            return real_model.from_pretrained(*arguments, **options)

    real_model = candle_gpt2.Model
    monkeypatch.setattr("candle_gpt2.rows._opened", None)
    monkeypatch.setattr(candle_gpt2, "Model", CountingModel)
    one = rows()
    for _ in range(2):
        pickle.loads(pickle.dumps(one))({"id": ["a"], "prompt": ["One day"]})
    assert opened == [((None,), {})]


def test_numpy_batches_return_arrays():
    batch = {"id": np.array([5, 6]), "prompt": np.array(["The king", "One day"]), "kept": np.array([1.5, 2.5])}
    for column in batch.values():
        column.flags.writeable = False
    result = rows()(batch)
    assert result["text"].dtype == object
    assert result["text"].tolist() == [completions()[4], completions()[5]]
    assert result["kept"] is batch["kept"]
    scored = Rows(task="score")(batch)
    assert (scored["tokens"].dtype, scored["loss"].dtype) == (np.int64, np.float64)


def test_pandas_batches_return_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": IDS, "prompt": PROMPTS}, index=range(10, 18))
    frame.loc[12, "prompt"] = None
    result = rows()(frame)
    assert list(result.columns) == ["id", "prompt", "text", "error"]
    assert list(result.index) == list(frame.index)
    kept = [0, 1, *range(3, 8)]
    assert [result["text"].iloc[row] for row in kept] == [completions()[row] for row in kept]
    assert result["error"].iloc[2].startswith("prompt: expected a string")


def test_arrow_schema_does_not_depend_on_errors():
    pyarrow = pytest.importorskip("pyarrow")
    tables = [
        rows()(pyarrow.table({"id": ["a"], "prompt": pyarrow.array([prompt], pyarrow.string())}))
        for prompt in ("One day", None)
    ]
    assert tables[0].schema == tables[1].schema
    assert tables[0].column_names == ["id", "prompt", "text", "error"]
    assert tables[0]["text"].to_pylist() == [completions()[0]]
    assert tables[1]["text"].to_pylist() == [None]


def test_empty_batch_returns_no_rows():
    assert rows()({"id": [], "prompt": []}) == {"id": [], "prompt": [], "text": [], "error": []}


def test_columns_of_different_lengths_are_rejected():
    with pytest.raises(ValueError, match="must have the same length"):
        rows()({"id": ["a"], "prompt": []})


def test_rows_import_no_data_library():
    program = "import sys; import candle_gpt2; candle_gpt2.Rows; print([m for m in ('ray', 'pyarrow', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"


