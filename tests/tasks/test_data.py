"""Rows from real files, tasks and Python: what is read, what is refused, and how the message names the place."""

import json
import os
import subprocess
import sys

import datasets
import pytest
from huggingface_hub import constants

from gspo.config import Data, Eval
from gspo.errors import InputError
from gspo.tasks.data import held_out_rows, overlap, read_rows, repeated


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def refusal(data, **more):
    with pytest.raises(InputError) as caught:
        read_rows(data, **more)
    return str(caught.value)


def test_jsonl_keeps_every_column_and_type(tmp_path):
    # A reader that infers column types makes a date of the first answer and 7.0 of the second.
    first = {"prompt": "x", "answer": "2024-01-02", "meta": {"a": 1}, "n": 7}
    second = {
        "prompt": [{"role": "user", "content": "y"}],
        "answer": "2024-01-03",
        "meta": {"b": "z"},
        "n": 7.5,
        "late": [1],
    }
    rows = read_rows(Data(source=jsonl(tmp_path / "a.jsonl", first, "", second)))
    assert rows.rows == ({**first, "late": None}, second)
    assert type(rows.rows[0]["n"]) is int
    assert rows.columns == ("prompt", "answer", "meta", "n", "late")
    assert (rows.place(0), rows.place(1)) == ("row 0 (line 1)", "row 1 (line 3)")


def test_parquet_keeps_every_column(tmp_path):
    path = tmp_path / "a.parquet"
    table = {"question": ["x", "y"], "answer": ["1", None], "meta": [{"a": 1}, {"a": 2}]}
    datasets.Dataset.from_dict(table).to_parquet(str(path))
    rows = read_rows(Data(source=str(path), prompt="question"))
    assert rows.rows == tuple({key: table[key][i] for key in table} for i in (0, 1))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_changed_file_gives_the_changed_rows(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    seen = []
    for text in ("old", "new"):
        if kind == "jsonl":
            jsonl(path, {"prompt": text})
        else:
            datasets.Dataset.from_dict({"prompt": [text]}).to_parquet(str(path))
        os.utime(path, (1e9, 1e9))  # a cache that goes by size and time would not see the change
        seen.append(read_rows(Data(source=str(path))).rows)
    assert seen == [({"prompt": "old"},), ({"prompt": "new"},)]


def test_python_rows_and_limit():
    given = [{"prompt": "a", "answer": 1}, {"prompt": "b", "hint": "h"}, {"prompt": None}]
    rows = read_rows(Data(limit=2), rows=iter(given))
    assert rows.rows == ({"prompt": "a", "answer": 1, "hint": None}, {"prompt": "b", "answer": None, "hint": "h"})
    table = datasets.Dataset.from_list(list(rows.rows))
    assert read_rows(Data(), rows=table).rows == rows.rows


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (['{"prompt": "x"}', "", '{"prompt": "y"'], ["line 3 (row 1)", "not valid JSON"]),
        (['{"prompt": "x"}', "[1]"], ["line 2 (row 1)", "list"]),
        ([], ["no rows"]),
        (['{"promt": "x", "answer": 1}'], ["'prompt'", "promt, answer", "data.prompt=promt"]),
        (['{"prompt": "x"}', '{"prompt": null}', '{"prompt": " "}'], ["row 1 (line 2): the prompt is null", "row 2 (line 3): the prompt is empty"]),
        (['{"prompt": "x"}', '{"answer": "x"}'], ["row 1 (line 2): the prompt is null"]),
        (['{"prompt": 3}'], ["row 0 (line 1)", "not int"]),
        (['{"prompt": []}'], ["empty list"]),
        (['{"prompt": ["x"]}'], ['{"role": text, "content": text}']),
        (['{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}'], ['{"role": text, "content": text}']),
        (['{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'], ["leave it out"]),
        ([json.dumps({"prompt": None})] * 12, ["row 9 (line 10) and 2 more"]),
    ],
)  # fmt: skip
def test_bad_file_is_refused_with_its_place(tmp_path, lines, parts):
    path = jsonl(tmp_path / "bad.jsonl", *lines)
    message = refusal(Data(source=path))
    assert [part for part in [path, *parts] if part not in message] == []


def test_jsonl_that_is_not_utf8_names_the_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xe9"}\n')
    assert "line 2 (row 1)" in refusal(Data(source=str(path)))


def test_missing_file_suggests_the_nearest(tmp_path):
    jsonl(tmp_path / "train.jsonl", {"prompt": "x"})
    assert str(tmp_path / "train.jsonl") in refusal(Data(source=str(tmp_path / "trian.jsonl")))
    assert "no folder" in refusal(Data(source=str(tmp_path / "nowhere" / "train.jsonl")))


def test_file_of_another_kind_folder_and_broken_parquet(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    assert ".jsonl" in refusal(Data(source=str(tmp_path / "a.csv")))
    assert "folder" in refusal(Data(source=str(tmp_path)))
    (tmp_path / "a.parquet").write_text("not parquet")
    assert "not a readable Parquet file" in refusal(Data(source=str(tmp_path / "a.parquet")))


def test_what_is_no_file_says_what_it_is(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    assert "x.jsonl: is a folder: name a file in it" in refusal(Data(source=str(tmp_path / "x.jsonl")))
    assert "/dev/null: is no file with rows in it" in refusal(Data(source="/dev/null"))
    assert "no source is named" in refusal(Data(source=""))


def test_a_parquet_file_without_rows_has_no_rows(tmp_path, capfd):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"prompt": ["x"]}).select([]).to_parquet(path)
    capfd.readouterr()
    assert refusal(Data(source=str(path))) == f"{path}: no rows"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "line", ['{"prompt": "x", "prompt": "y"}', '{"prompt": "x", "more": [{"prompt": 1, "prompt": 1}]}']
)
def test_a_key_that_stands_twice_is_refused(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "more": {"prompt": 1}}\n' + line + "\n")
    assert refusal(Data(source=str(path))) == f"{path}: line 2 (row 1): the key 'prompt' stands in it twice: leave one"


def test_misspelt_task_is_not_looked_for_on_the_hub():
    assert "did you mean 'addition'" in refusal(Data(source="additon"))
    assert "did you mean 'addition:1-9'" in refusal(Data(source="adition:1-9"))
    assert "did you mean 'addition:1-9'" in refusal(Data(source="ADDITION:1-9"))


def test_hub_failure_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refusal(Data(source="nobody/nothing-at-all:main", split="validation"))
    assert [
        part
        for part in ["addition", "'nobody/nothing-at-all'", "'validation'", ":CONFIGURATION"]
        if part not in message
    ] == []


def test_row_that_is_no_mapping():
    assert "row 1: expected a mapping" in refusal(Data(), rows=[{"prompt": "x"}, "y"])


def test_held_out_rows_come_from_eval_source_then_task_then_nowhere(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", {"prompt": "x"})
    test = jsonl(tmp_path / "test.jsonl", {"prompt": "y"}, {"prompt": "z"})
    assert held_out_rows(Data(source=train), Eval()) is None
    assert held_out_rows(Data(source=train, limit=9), Eval(source=test, limit=1)).rows == ({"prompt": "y"},)
    task = held_out_rows(Data(), Eval())
    assert task == held_out_rows(Data(source=train), Eval(source="addition"))
    given = read_rows(Data(), rows=[{"prompt": "x"}])
    assert held_out_rows(Data(), Eval(), train=given) is None
    longer = held_out_rows(Data(source="sort:3"), Eval(source="sort:5", limit=2))
    assert [len(row["prompt"]) for row in longer.rows] == [6, 6]


def test_overlap_is_a_warning_with_its_count(tmp_path):
    train = read_rows(Data(), rows=[{"prompt": "x"}, {"prompt": [{"role": "user", "content": "y"}]}])
    held_out = read_rows(
        Data(), rows=[{"prompt": "n"}, {"prompt": [{"content": "y", "role": "user"}]}, {"prompt": "x"}]
    )
    assert "2 of 3" in overlap(train, held_out, Data())
    assert "row 1, row 2" in overlap(train, held_out, Data())
    assert overlap(train, read_rows(Data(), rows=[{"prompt": "n"}]), Data()) is None


def test_reading_lines_and_tasks_loads_no_heavy_module(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"})
    code = (
        "import sys, gspo.rewards.score, gspo.tasks.render, gspo.tasks.sampler\n"
        "from gspo.config import Data\nfrom gspo.tasks.data import read_rows\n"
        f"read_rows(Data(source={path!r})), read_rows(Data())\n"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_repeated_prompts_stay_and_are_counted():
    given = [{"prompt": p, "answer": a} for p, a in [("x", "1"), ("y", "2"), ("x", "1"), ("x", "3")]]
    rows = read_rows(Data(), rows=given)
    assert len(rows) == 4
    said = repeated(rows, "prompt")
    assert "2 of 4 prompts repeat an earlier one (row 2, row 3); each row stays" in said
    assert said.endswith("1 of them differ in other columns, as row 3 does from row 0")
    assert "differ" not in repeated(read_rows(Data(), rows=given[:3]), "prompt")
    assert repeated(read_rows(Data(), rows=given[:2]), "prompt") is None
