"""Texts, tables and names as they occur in the world: accents as separate characters, empty lines,
quotes, repeated keys, names in other encodings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import checkpoint
from xformer.checkpoint import Checkpoint
from xformer.data.errors import BadInput
from xformer.data.store import UNSEEN, open_store
from xformer.data.tokenizers import load_tokenizer
from xformer.preprocess import workers as encoders
from xformer.preprocess.tasks import predict
from xformer.preprocess.tasks.tables import RowTable
from xformer.tasks.tag import entity_f1

OPTIONS = {"delimiter": None, "quoting": None, "no_header": False}
TSV: dict[str, Any] = {"text": "sentence", "text_b": None, "label": "label", "task": "tsv"}
TSV |= {"options": OPTIONS}


@pytest.fixture(scope="module")
def english() -> Checkpoint:
    return checkpoint.load("micro/english")


class Reader:
    """Reads files as the rows to predict of a checkpoint whose head recorded these columns."""

    def __init__(self, folder: Path, english: Checkpoint):
        self.folder, self.tokenizer, self.number = folder, english.tokenizer, 0

    def __call__(
        self, name: str, content: str, columns: dict[str, Any], kind: str = "classify", **more: Any
    ) -> list[str]:
        """The texts that are read from a file with this content."""
        file, self.number = self.folder / name, self.number + 1
        file.write_text(content, encoding="utf-8")
        labels = ["O", "B-X"] if kind == "tag" else ["a", "b"]
        head = {"kind": kind, "labels": labels, "pair": kind == "span", "max_tokens": 64}
        store = self.folder / f"store{self.number}"
        predict.write_rows(file, head | {"columns": columns}, self.tokenizer, store, **more)
        split = open_store(store).split("input")
        texts = split.columns["question.input" if kind == "span" else "input"]
        return [texts.text(i) for i in range(len(texts))]


@pytest.fixture
def read(tmp_path: Path, english: Checkpoint) -> Reader:
    return Reader(tmp_path, english)


# ------------------------------------------------------------------------------- answers


def test_answers_keep_their_accents(
    tmp_path: Path, preprocess: Any, english: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary deletes accents, vowel signs and voicing marks, but an answer has them."""
    answers = ["Cafe\u0301", "बोलते", "か\u3099", "Ole\u0301s"]
    paragraphs = []
    for i, answer in enumerate(answers * 3):
        context = f"It is {answer} in the end."
        qas = [{"id": str(i), "question": "What " + "on earth " * 9 + "?", "answers": []}]
        qas[0]["answers"] = [{"text": answer, "answer_start": 6}]  # type: ignore[list-item]
        paragraphs.append({"context": context, "qas": qas})
    file = tmp_path / "train.json"
    data = [{"title": str(i), "paragraphs": [p]} for i, p in enumerate(paragraphs)]
    file.write_text(json.dumps({"data": data}))
    (tmp_path / "dev.json").write_text(json.dumps({"data": data[:4]}))
    limits = ["--max-tokens", "48", "--max-question", "8", "--stride", "16"]
    line = ["task", "squad", "--input", tmp_path, "--tokenizer", "micro/english", *limits]
    preprocess(*line, "--output", tmp_path / "s")
    said = capsys.readouterr()
    assert "the tokens of 12 answers reproduce the exact text" in said.out
    cut = "warning: train: 12 of the 12 questions were cut to 8 tokens"
    assert cut in said.err
    assert "in no window" not in said.err
    (ids, starts, ends), *_ = english.tokenizer.encode_with_offsets(["Cafe\u0301 e\u0301a a\u0301"])
    covered = ["Cafe\u0301 e\u0301a a\u0301"[a:b] for a, b in zip(starts, ends, strict=True)]
    assert "".join(covered) == "Cafe\u0301e\u0301aa\u0301"
    assert len(ids) == len(covered)


def test_an_answer_in_no_window(
    tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    context = "word " * 40
    answers = [{"text": context.strip(), "answer_start": 0}]
    qas = [{"id": "1", "question": "What?", "answers": answers}]
    data = [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": data}))
    line = ["task", "squad", "--input", tmp_path, "--tokenizer", "micro/english"]
    preprocess(
        *line,
        "--max-tokens",
        "24",
        "--max-question",
        "8",
        "--stride",
        "8",
        "--output",
        tmp_path / "s",
    )
    said = capsys.readouterr().err
    words = "warning: train: 1 of the 1 answers is in no window: no model can learn or find them"
    assert words in said
    assert "train: 1 of the 1 answers has more than 30 tokens, the most that is predicted" in said


def test_text_under_few_unknown_tokens_of_a_context(
    tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word of more than 100 characters is one [UNK]."""
    context = "word " * 150 + "a" * 120
    answers = [{"text": "word", "answer_start": 0}]
    qas = [{"id": "1", "question": "What?", "answers": answers}]
    data = [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": data}))
    line = ["task", "squad", "--input", tmp_path, "--tokenizer", "micro/english"]
    line += ["--max-tokens", "384"]
    preprocess(*line, "--output", tmp_path / "s")
    words = "does not know 0.654 % of the tokens and 13.8 % of the text of train"
    assert words in capsys.readouterr().err


def test_unseen_classes_of_words_are_missed_entities() -> None:
    """A type that training lacks is an entity that nothing finds; neighbours count as one."""
    classes = ["B-PER", "I-PER", "O"]
    gold = np.array([0, 1, 2, 2, UNSEEN, UNSEEN])
    said = np.array([0, 1, 2, 2, 2, 2])
    assert entity_f1(said, gold, np.zeros(6), classes) == pytest.approx(2 / 3)
    assert entity_f1(np.array([0, 2]), np.array([0, UNSEEN]), np.zeros(2), classes) < 1


# ------------------------------------------------------------------------------- rows to predict


def test_an_empty_line_is_an_empty_text(read: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["First one.", "", "Second one.", "  ", "Third one."]
    assert read("lines.txt", "\n".join(lines) + "\n\n", TSV) == lines
    assert "warning: no text in 2 of the 5 rows" in capsys.readouterr().err


def test_an_empty_line_is_no_sequence(read: Reader) -> None:
    dna = {"text": "sequence", "task": "dna", "uppercase": True, "options": {}}
    assert read("seqs.txt", "ACGTACGTAACC\n\nGGGTTTAACC\n\n", dna) == ["ACGTACGTAACC", "GGGTTTAACC"]
    pitches = {"text": "pitches", "task": "music/maestro", "options": {}}
    assert read("n.txt", "60 62\n\n64\n", pitches) == ["60 62", "64"]


def test_sentences_that_begin_with_a_quote(read: Reader) -> None:
    columns = TSV | {"options": OPTIONS | {"quoting": '"'}}
    lines = ['"Hello," she said.', "The second line."]
    assert read("quoted.txt", "\n".join(lines) + "\n", columns) == lines


def test_a_separator_of_training_is_named(read: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of sentences with semicolons looks like the training file, which had columns."""
    options = OPTIONS | {"delimiter": ";", "no_header": True}
    columns = TSV | {"text": "2", "label": "1", "options": options}
    assert read("s.txt", "It rains; nobody is glad.\n", columns) == [" nobody is glad."]
    said = capsys.readouterr().err
    assert "s.txt is read as in training: without a header, separated by ';', column 2" in said


def test_quotes_in_a_tsv_are_noted(read: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    content = 'question\tcontext\n"Who ""barks""?"\t"The ""big"" dog."\n'
    assert read("q.tsv", content, {"task": "squad"}, "span") == ['"Who ""barks""?"']
    said = capsys.readouterr().err
    assert "cells in quotes are read with their quotes (from line 2)" in said
    assert "if a program for csv wrote them, write the file as .csv" in said
    assert "--quoting" not in said
    assert read("bare.tsv", '"a ""b"" c"\nplain\n', TSV) == ['"a ""b"" c"', "plain"]
    assert "(from line 1)" in capsys.readouterr().err
    assert predict.read_texts(read.folder / "q.tsv", "context") == ['"The ""big"" dog."']
    assert "write the file as .csv" in capsys.readouterr().err


def test_questions_need_different_ids(read: Reader) -> None:
    content = "id,question,context\n1,Who?,A dog\n2,What?,A cat\n1,Where?,A house\n"
    with pytest.raises(BadInput, match=r"q.csv: 2 questions have the id '1'"):
        read("q.csv", content, {"task": "squad"}, "span")
    assert read("q.csv", content.replace("1,Where", "3,Where"), {}, "span") == [
        "Who?",
        "What?",
        "Where?",
    ]


def test_ndjson_is_json_lines(read: Reader) -> None:
    content = '{"sentence": "A new one"}\n{"sentence": "and another"}\n'
    assert read("a.ndjson", content, TSV) == ["A new one", "and another"]
    assert predict.read_texts(read.folder / "a.ndjson", "sentence")[1] == "and another"


def test_a_text_called_pitches_is_a_text(read: Reader) -> None:
    columns = TSV | {"text": "pitches"}
    content = "pitches\nour startup pitch number 3\n"
    assert read("p.tsv", content, columns) == ["our startup pitch number 3"]
    with pytest.raises(BadInput, match="'number' is not a pitch"):
        read("p.tsv", content, {"text": "pitches", "task": "music/maestro"})


def test_own_columns_of_pitches(read: Reader) -> None:
    columns = {"text": "pitches", "task": "music/maestro", "options": {}}
    content = "piece,notes\na,60 62 64\nb,65 67\n"
    rows = read("own.csv", content, columns, given=("notes",), key="piece")
    assert rows == ["60 62 64", "65 67"]
    with pytest.raises(BadInput, match=r"names MIDI files, and their names are the ids"):
        read("m.csv", "midi_filename,key\nx.mid,1\n", columns, key="key")


def test_lines_of_single_words_are_noted(read: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"text": "1", "label": "2", "task": "conll"}
    assert len(read("zh.txt", "我喜欢北京。\n他去上海。\n\n第三句话。\n", columns, "tag")) == 2
    said = capsys.readouterr().err
    assert "zh.txt is read as CoNLL's columns: it has one word in each line" in said


# ------------------------------------------------------------------------------- names


def test_columns_that_look_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Gro\u0308\u00dfe,x\n1,2\n", encoding="utf-8")
    error = RowTable(tmp_path / "a.csv").missing("Gr\u00f6\u00dfe")
    assert "it looks the same, but its accents are separate characters in one" in str(error)


def test_other_encodings_are_named(read: Reader) -> None:
    for name, encoding in (("a.csv", "utf-16"), ("b.csv", "latin-1")):
        (read.folder / name).write_bytes("sentence,größe\nein,1\n".encode(encoding))
    (read.folder / "c.csv").write_bytes("sentence,size\nein,1\n".encode("utf-16-le"))
    head = {"kind": "classify", "labels": ["a", "b"], "pair": False, "max_tokens": 64}
    for name, words in (
        ("a.csv", r"a.csv looks like UTF-16"),
        ("b.csv", "b.csv:1: not valid UTF-8"),
        ("c.csv", r"c.csv looks like UTF-16: convert it to UTF-8"),
    ):
        with pytest.raises(BadInput, match=words):
            predict.write_rows(
                read.folder / name, head | {"columns": TSV}, read.tokenizer, read.folder / "s"
            )


def test_other_encodings_that_are_valid_utf8(tmp_path: Path, preprocess: Any) -> None:
    """UTF-16 of scripts whose numbers have a small high byte, and ISO-2022-JP."""
    arabic = "\u0627\u0644\u0643\u062a\u0627\u0628 \u0639\u0644\u0649\n" * 40
    thai = "\u0e44\u0e1b\u0e40\u0e17\u0e35\u0e48\u0e22\u0e27\u0e17\u0e30\u0e40\u0e25\n" * 40
    japanese = "\u65e5\u672c\u8a9e\u306e\u6587\u3002\n" * 40
    line = ["--tokenizer", "micro/english", "--valid", tmp_path / "v"]
    line += ["--output", tmp_path / "s", "--overwrite"]
    (tmp_path / "v").write_text("words\n" * 40)
    for text, encoding, words in (
        (arabic, "utf-16-le", "looks like UTF-16: convert it to UTF-8"),
        (thai, "utf-16-be", "looks like UTF-16"),
        (japanese, "iso-2022-jp", "holds escapes of ISO-2022-JP or the like: convert it"),
    ):
        (tmp_path / "t").write_bytes(text.encode(encoding))
        with pytest.raises(BadInput, match=words):
            preprocess("text", "--input", tmp_path / "t", *line)
        (tmp_path / "t").write_bytes(text.encode())
        preprocess("text", "--input", tmp_path / "t", *line)


def test_names_of_files_that_are_not_utf8(tmp_path: Path, preprocess: Any) -> None:
    try:
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/Fr\xe9d\xe9ric"))
        folder.mkdir()
    except OSError:
        pytest.skip("this file system allows only names in UTF-8")
    (folder / "a.mid").write_bytes(b"MThd")
    with pytest.raises(BadInput, match=r"the file name 'Fr\\udce9d\\udce9ric/a.mid' is not UTF-8"):
        preprocess("task", "music/maestro", "--input", tmp_path, "--output", tmp_path / "s")


# ------------------------------------------------------------------- what a tokenizer deletes


HINDI = "नमस्ते दुनिया मैं हिन्दी सीख रहा हूँ बच्चे स्कूल जाते हैं"
VIETNAMESE = "Mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm"
RUSSIAN = "Каждый имеет право на жизнь, на свободу и на личную неприкосновенность"
GERMAN = "Die Würde des Menschen ist unantastbar, sie zu achten ist Verpflichtung für alle Gewalt"


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (HINDI, "31.9 %"),
        ("น้ำ ท่วม ใหญ่ ปู่ ป่า ป้า ปา", "31.8 %"),
        (VIETNAMESE, "30.8 %"),
        (f"{'the words of English are in most lines of it ' * 9}{HINDI}", "4.14 %"),
        ("It is a café in English, and not the only one of them", ""),
        (GERMAN, ""),
        ("Die Wu\u0308rde des Menschen ist unantastbar, sie zu achten ist Pflicht", ""),
        (RUSSIAN, ""),
    ],
    ids=["hi", "th", "vi", "en and hi", "en", "de", "de decomposed", "ru"],
)
def test_letters_that_a_new_tokenizer_deletes_are_told(
    text: str,
    share: str,
    tmp_path: Path,
    preprocess: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An uncased WordPiece deletes vowel signs and tone marks. Accents are told if there are many,
    so German and Russian are not."""
    (tmp_path / "t.txt").write_text(f"{text}\n" * 20, encoding="utf-8")
    line = ["tokenizer", "--kind", "wordpiece", "--input", tmp_path / "t.txt"]
    line += ["--vocab-size", "400", "--output"]
    preprocess(*line, tmp_path / "t")
    said = capsys.readouterr().err
    assert (f"note: {share} of the text's characters are deleted" in said) == bool(share)
    assert ("; --keep-accents keeps them, and --cased" in said) == bool(share)
    for option in ("--keep-accents", "--cased"):
        preprocess(*line, tmp_path / option, option)
        assert capsys.readouterr().err == ""
        tokenizer = load_tokenizer(tmp_path / option)
        kept = text.lower() if option == "--keep-accents" else text
        decoded = tokenizer.decode(tokenizer.encode_batch([text])[0])
        assert decoded.replace(" ", "") == kept.replace(" ", "")


@pytest.mark.parametrize(
    ("more", "option", "told"),
    [
        ([], "", "(texts lose their accents, so pieces with accents or vowel signs (2) are never"),
        ([], "--cased", ""),
        ([], "--keep-accents", ""),
        (
            ["Café"],
            "",
            "(texts are lower-cased and lose their accents, so pieces with capitals (1) and with "
            "accents or vowel signs (3) are never used; see --cased)",
        ),
    ],
)
def test_pieces_whose_accents_are_deleted_are_told(
    more: list[str],
    option: str,
    told: str,
    tmp_path: Path,
    preprocess: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "हिन्दी", "##é", "a", *more]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    line = ["tokenizer", "--from", tmp_path / "vocab.txt", "--output", tmp_path / "t"]
    preprocess(*line, *filter(None, [option]))
    said = capsys.readouterr().out
    assert told in said
    assert ("never used" in said) == bool(told)
    ids = load_tokenizer(tmp_path / "t").encode_batch(["हिन्दी aé"])[0]
    assert ids.tolist() == ([5, 7, 6] if option else [1, 1])


def test_a_published_option_is_not_overruled(tmp_path: Path, preprocess: Any) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"strip_accents": true}')
    line = ["tokenizer", "--from", tmp_path / "vocab.txt", "--keep-accents"]
    with pytest.raises(BadInput, match="strip_accents is true in the files next to it; leave out"):
        preprocess(*line, "--output", tmp_path / "t")


def test_a_sentencepiece_model_keeps_its_letters(tmp_path: Path, preprocess: Any) -> None:
    """A model of one's own has the ids of SentencePiece with --cased. ALBERT's rules, which strip
    accents, apply without an option, and if its files say how they treat capitals."""
    preprocess(
        *("tokenizer", "--kind", "unigram", "--vocab-size", 39, "--output", tmp_path / "own"),
        *("--input", _written(tmp_path / "t.txt", f"{HINDI} Café über\n" * 20)),
    )
    own = load_tokenizer(tmp_path / "own")
    texts = [HINDI, "Café über"]
    ids = [part.tolist() for part in own.encode_batch(texts)]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "spiece.model").write_bytes((tmp_path / "own/spiece.model").read_bytes())

    def imported(*options: str) -> list[list[int]]:
        line = ["tokenizer", "--from", folder, "--output", tmp_path / "t", "--overwrite"]
        preprocess(*line, *options)
        return [part.tolist() for part in load_tokenizer(tmp_path / "t").encode_batch(texts)]

    assert imported("--cased") == ids
    assert imported("--keep-accents")[0] == ids[0]
    assert imported("--keep-accents")[1] != ids[1]  # lower-cased
    assert imported()[0] != ids[0]
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert imported("--cased")[0] != ids[0]
    assert imported("--keep-accents") == ids
    (folder / "tokenizer_config.json").write_text('{"keep_accents": false}')
    with pytest.raises(BadInput, match="keep_accents is false in the files next to it; leave out"):
        imported("--keep-accents")


def test_characters_that_a_unigram_leaves_out_are_told(
    tmp_path: Path, preprocess: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a text of some words\n" * 400 + "🚀 🚀 😀 and so on\n"
    line = ["tokenizer", "--kind", "unigram", "--input", _written(tmp_path / "t.txt", text)]
    line += ["--vocab-size", 20, "--output"]
    preprocess(*line, tmp_path / "a")
    said = capsys.readouterr().err
    told = "note: 2 of the text's 14 different characters are left out (0.0468 % of the text "
    assert said == f"{told}becomes <unk>), such as 🚀 😀; --character-coverage 1 keeps all\n"
    preprocess(*line, tmp_path / "b", "--character-coverage", "1")
    assert capsys.readouterr().err == ""
    tokenizer = load_tokenizer(tmp_path / "b")
    assert tokenizer.special["unk"] not in tokenizer.encode_batch(["🚀 😀"])[0]
    line[2] = "bpe"
    with pytest.raises(BadInput, match="--character-coverage goes with --kind unigram"):
        preprocess(*line, tmp_path / "c", "--character-coverage", "1")


@pytest.mark.parametrize("workers", [1, 2])
def test_long_words_do_not_vanish_without_a_line(
    workers: int,
    tmp_path: Path,
    preprocess: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clause of Thai is one word. If it is long, WordPiece makes one unknown token of it, which
    is 0.27 % of the tokens, but 12 % of the text."""
    monkeypatch.setattr(encoders, "FEW", 1)
    short, long = "ท่วม ใหญ่ " * 25, "ท่วมใหญ่" * 13
    _written(tmp_path / "t.txt", f"{short}\n\n" * 4 + f"{short}{long}\n\n" * 2)
    _written(tmp_path / "v.txt", f"{short}\n\n")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ท่วม", "ใ", "##ห", "##ญ", "##่"]
    _written(tmp_path / "vocab.txt", "\n".join(pieces) + "\n")
    line = ["tokenizer", "--from", tmp_path / "vocab.txt", "--cased", "--output", tmp_path / "tok"]
    preprocess(*line)
    line = ["text", "--input", tmp_path / "t.txt", "--valid", tmp_path / "v.txt"]
    line += ["--tokenizer", tmp_path / "tok", "--workers", workers]
    preprocess(*line, "--output", tmp_path / "s")
    said = capsys.readouterr().err
    told = "does not know 0.266 % of the tokens and 12.2 % of the text of train"
    assert f"{told}, which became [UNK]" in said
    assert "of valid" not in said.replace("rows of valid", "")
    assert "more than 100 characters; for text without spaces, such as Thai" in said
    rows = "".join(f"{short}{long if i % 3 == 0 else ''}\t{'ab'[i % 2]}\n" for i in range(60))
    _written(tmp_path / "t.tsv", f"text\tlabel\n{rows}")
    line = ["task", "tsv", "--train", tmp_path / "t.tsv", "--valid", tmp_path / "t.tsv"]
    line += ["--text", "text", "--label", "label", "--tokenizer", tmp_path / "tok"]
    preprocess(*line, "--output", tmp_path / "c")
    assert told in capsys.readouterr().err


def _written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file
