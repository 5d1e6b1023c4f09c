"""What ``vlmdata preprocess`` refuses before it works: missing, useless and misplaced options; and how it chooses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.conftest import cord_row, write_cord_parquet
from tests.preprocess.command_line import SMALL_IMAGES, TOKENIZER, Ended
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.cli.effects import RECIPE_DEPENDENT, flag, obeyed
from vlmdata.preprocess.conversation import Document
from vlmdata.preprocess.registries import RECIPES

Command = Callable[..., Ended]
CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}
#: A value for each option that a recipe may not obey.
VALUES = {
    "image_root": (".",),
    "allow_urls": (),
    "allow_private_host": ("localhost", "--allow-urls"),
    "train_turns": ("last",),
    "train_think": ("never",),
    "chat_template_kwargs": ('{"enable_thinking": false}',),
}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "chats.jsonl", CHAT, CHAT)


@pytest.fixture
def preprocess(vlmdata: Command, tmp_path: Path) -> Command:
    """Runs the command with one worker into ``tmp_path / "out"``, with a tokenizer unless told otherwise."""

    def call(source: Path | str, *options: Any, tokenizer: bool = True) -> Ended:
        named = TOKENIZER if tokenizer else ()
        return vlmdata("preprocess", source, "--out", tmp_path / "out", "-j", 1, *named, *options)

    return call


def refused(ended: Ended, words: str, *, opened: bool) -> None:
    assert ended.code == 2
    assert ended.stdout == ""
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert words in error
    assert ("opening " in ended.stderr) is opened


class TestTokenizer:
    @pytest.mark.parametrize("name", ["/nowhere/at/all", "Qwen/Qwen3.5-9B"])
    def test_that_cannot_be_loaded_is_refused_before_the_source_is_opened(
        self, preprocess: Command, chats: Path, name: str
    ) -> None:
        ended = preprocess(chats, "--tokenizer", name, tokenizer=False)
        refused(ended, f"--tokenizer {name}: cannot load it", opened=False)

    def test_must_be_named_before_the_source_is_opened(self, preprocess: Command, chats: Path) -> None:
        refused(preprocess(chats, tokenizer=False), "give the tokenizer of your model, e.g. --tokenizer", opened=False)

    def test_of_the_demo_is_the_embedded_one(self, preprocess: Command, tmp_path: Path) -> None:
        ended = preprocess("demo", "--limit", 1, "--recipe", "chat", *SMALL_IMAGES[2:], tokenizer=False)
        assert ended.code == 0, ended.stderr
        assert "recipe chat, tokenizer embedded (6,144 ids" in ended.stdout
        manifest = Manifest.read(tmp_path / "out")
        assert manifest.config["options"]["tokenizer"] == manifest.tokenizer.name == "embedded"

    def test_may_be_a_folder_and_the_summary_names_it(
        self, preprocess: Command, chats: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        folder = tmp_path / "mine"
        tokenizer.save(folder)
        ended = preprocess(chats, "--tokenizer", folder, tokenizer=False)
        assert ended.code == 0, ended.stderr
        assert f"recipe chat, tokenizer {folder} (6,144 ids)\n" in ended.stdout
        refused(
            preprocess(chats, "--tokenizer", folder, "--tokenizer-revision", "main", tokenizer=False),
            f"--tokenizer-revision has no effect: the tokenizer {folder} is a local folder",
            opened=False,
        )


class TestOptionsWithoutEffect:
    @pytest.mark.parametrize(
        ("source", "options", "words"),
        [
            ("demo", ["--split", "test"], "--split has no effect: the demo"),
            ("demo", ["--subset", "x"], "--subset has no effect: the demo"),
            ("demo", ["--revision", "x"], "--revision has no effect: the demo"),
            ("demo", ["--image-root", "."], "--image-root has no effect: the demo's rows contain their images"),
            ("demo", ["--allow-urls"], "--allow-urls has no effect: the demo's rows contain their images"),
            ("{chats}", ["--revision", "x"], "--revision has no effect: SOURCE {chats} is local"),
            ("{chats}", ["--subset", "x"], "--subset has no effect: SOURCE {chats} has no configurations"),
            ("{chats}", ["--tokenizer-revision", "x"], "the tokenizer embedded is included in vlmdata"),
        ],
        ids=str,
    )
    def test_with_a_source_or_tokenizer_are_refused_before_it_is_opened(
        self, preprocess: Command, chats: Path, source: str, options: list[str], words: str
    ) -> None:
        ended = preprocess(source.format(chats=chats), *options)
        refused(ended, words.format(chats=chats), opened=False)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("option", sorted(RECIPE_DEPENDENT))
    def test_with_the_named_recipe_are_refused_before_the_source_is_opened(
        self, preprocess: Command, recipe: str, option: str
    ) -> None:
        """With a source that is not there, an option that is obeyed gets as far as opening it."""
        ended = preprocess("missing.parquet", "--recipe", recipe, flag(option), *VALUES[option])
        if option in obeyed(recipe):
            refused(ended, "SOURCE missing.parquet: no such file", opened=True)
        else:
            refused(ended, f"{flag(option)} has no effect with --recipe {recipe}. Omit it", opened=False)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("localhost",), "--allow-private-host has no effect without --allow-urls"),
            (("http://localhost/", "--allow-urls"), "'http://localhost/' is no host; write it as images.example"),
        ],
    )
    def test_a_private_host_needs_urls_and_is_a_host(
        self, preprocess: Command, chats: Path, options: tuple[str, ...], words: str
    ) -> None:
        ended = preprocess(chats, "--allow-private-host", *options)
        assert (ended.code, words in " ".join(ended.stderr.split())) == (2, True), ended.stderr

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_splitting_needs_documents(self, preprocess: Command, recipe: str) -> None:
        ended = preprocess("missing.parquet", "--recipe", recipe, "--overlong", "split")
        if Document in RECIPES.find(recipe).makes:
            refused(ended, "SOURCE missing.parquet: no such file", opened=True)
        else:
            refused(ended, f"--overlong split has no effect with --recipe {recipe}", opened=False)

    def test_with_the_chosen_recipe_are_refused(self, preprocess: Command, chats: Path, tmp_path: Path) -> None:
        ended = preprocess(chats, "-O", "prompt=Read it.")
        refused(ended, "recipe chat has no option prompt (--recipe cord_v2, caption or grounding has it)", opened=True)
        assert not (tmp_path / "out").exists()

    def test_strict_has_an_effect_with_both_recipes_of_rows(self, preprocess: Command, tmp_path: Path) -> None:
        for n, row in enumerate([CHAT, {"image": "a.png", "ground_truth": {"gt_parse": {"a": "1"}}}]):
            (tmp_path / "a.png").write_bytes(cord_row(0)["image"]["bytes"])
            source = write_rows(tmp_path / f"{n}.jsonl", row | {"score": 3})
            ended = preprocess(source, "--strict", *SMALL_IMAGES)
            assert ended.code == 1
            assert "unknown_keys, for example row 0 (" in ended.stdout

    def test_that_depend_on_the_recipe_are_obeyed_by_one_of_ones_own(
        self, preprocess: Command, chats: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "own_recipe.py").write_text(
            "from vlmdata.preprocess.recipes.chat import Chat\n\n"
            "def own(media):\n    return Chat(Chat.Options(), media)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        ended = preprocess(chats, "--recipe", "own_recipe:own", "--train-turns", "last")
        assert ended.code == 0, ended.stderr
        del sys.modules["own_recipe"]


class TestRecipe:
    @pytest.mark.parametrize(("row", "recipe"), [(CHAT, "chat"), (cord_row(0), "cord_v2")])
    def test_is_chosen_by_the_columns_of_a_table(
        self, preprocess: Command, tmp_path: Path, row: dict[str, Any], recipe: str
    ) -> None:
        source = tmp_path / "rows.parquet"
        Dataset.from_list([row]).to_parquet(str(source))
        ended = preprocess(source, *SMALL_IMAGES)
        assert ended.code == 0, ended.stderr
        assert f"recipe {recipe}, chosen by the columns\n" in ended.stderr
        assert Manifest.read(tmp_path / "out").config["options"]["recipe"] == recipe

    def test_is_chosen_by_the_keys_of_the_first_lines_that_can_be_read(
        self, preprocess: Command, tmp_path: Path
    ) -> None:
        source = write_rows(tmp_path / "rows.jsonl", "{", {"id": 1}, CHAT)
        ended = preprocess(source, "--max-reject-rate", 1)
        assert ended.code == 0, ended.stderr
        assert "recipe chat, chosen by the columns\n" in ended.stderr

    def test_needs_a_name_where_none_fits(self, preprocess: Command, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "rows.jsonl", {"picture": "a.png", "label": 3})
        ended = preprocess(source)
        refused(ended, f"SOURCE {source}: no built-in recipe fits its columns, picture, label.", opened=True)
        assert "cord_v2 needs image and ground_truth; chat needs messages" in ended.stderr
        assert "module:attribute" in ended.stderr
        assert not (tmp_path / "out").exists()

    def test_needs_a_name_where_several_fit(self, preprocess: Command, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "rows.jsonl", {"image": "a.png", "text": "A.", "question": "?", "answer": "B."})
        ended = preprocess(source)
        refused(ended, "several recipes fit (caption, vqa) its columns, image, text, question, answer", opened=True)

    def test_needs_a_name_where_no_line_can_be_read(self, preprocess: Command, tmp_path: Path) -> None:
        ended = preprocess(write_rows(tmp_path / "rows.jsonl", "{", "}"))
        refused(ended, "none of the first rows can be read: row 0: malformed_row: not JSON", opened=True)

    def test_that_cannot_be_meant_is_refused_before_work(self, preprocess: Command, tmp_path: Path) -> None:
        source = write_cord_parquet(tmp_path / "train.parquet", [cord_row(n) for n in range(20)])
        ended = preprocess(source, "--recipe", "chat")
        refused(ended, "--recipe chat needs messages, conversations, or a pair", opened=True)
        assert (
            f"SOURCE {source} has the columns image, ground_truth. It rejects the first 8 rows: row 0: " in ended.stderr
        )
        assert not (tmp_path / "out").exists()

    def test_that_does_not_fit_the_first_of_many_lines_runs_after_a_warning(
        self, preprocess: Command, tmp_path: Path
    ) -> None:
        source = write_rows(tmp_path / "rows.jsonl", *[{"id": n} for n in range(100)], CHAT)
        ended = preprocess(source, "--recipe", "chat", "--max-reject-rate", 1)
        assert ended.code == 0, ended.stderr
        assert "warning: --recipe chat needs" in ended.stderr

    def test_that_is_named_wins_where_another_fits(self, preprocess: Command, tmp_path: Path) -> None:
        """A recipe that reads the rows, though it says that they do not fit."""
        source = write_rows(tmp_path / "rows.jsonl", CHAT | {"image": None, "ground_truth": None})
        ended = preprocess(source, "--recipe", "chat")
        assert ended.code == 0, ended.stderr
        assert "warning" not in ended.stderr


class TestPlaces:
    @pytest.mark.parametrize("url", ["memory://x", "https://host/x", "FTP://b/c", "file://x/y"])
    def test_out_on_a_url_is_refused_and_no_folder_is_made(
        self, vlmdata: Command, chats: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        ended = vlmdata("preprocess", chats, "--out", url, *TOKENIZER)
        refused(ended, f"{url}: datasets are made in local folders and in object stores", opened=False)
        assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]

    def test_file_urls_are_paths(self, vlmdata: Command, chats: Path, tmp_path: Path) -> None:
        ended = vlmdata("preprocess", f"file://{chats}", "--out", f"file://{tmp_path}/my%20out", "-j", 1, *TOKENIZER)
        assert ended.code == 0, ended.stderr
        assert Manifest.read(tmp_path / "my%20out").totals.samples == 2
        assert f"next: vlmdata verify {tmp_path}/my%20out" in ended.stdout

    def test_the_next_command_quotes_a_space(self, vlmdata: Command, chats: Path, tmp_path: Path) -> None:
        ended = vlmdata("preprocess", chats, "--out", tmp_path / "my out", *TOKENIZER)
        assert f"next: vlmdata verify '{tmp_path}/my out'" in ended.stdout

    @pytest.mark.parametrize("inside", ["", "/deeper/still"])
    def test_out_on_a_file_is_refused(self, vlmdata: Command, chats: Path, inside: str) -> None:
        ended = vlmdata("preprocess", chats, "--out", f"{chats}{inside}", *TOKENIZER)
        refused(ended, f"--out {chats}{inside}: {chats} is a file", opened=False)
        assert chats.read_text().count("\n") == 2

    def test_empty_places_are_not_the_current_folder(self, vlmdata: Command, chats: Path) -> None:
        refused(vlmdata("preprocess", chats, "--out", "", *TOKENIZER), "a folder or URL is empty", opened=False)
        refused(vlmdata("preprocess", "", "--out", "out", *TOKENIZER), "SOURCE is empty", opened=False)

    def test_finish_of_a_file_is_refused(self, vlmdata: Command, chats: Path) -> None:
        refused(vlmdata("finish", chats), f"OUT {chats}: {chats} is a file. Give a folder.", opened=False)

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("hf://datasets/naver-clova-ix/cord-v2", "give only the id of a hub dataset"),
        ],
    )
    def test_a_hub_dataset_as_a_url_is_refused(self, preprocess: Command, url: str, words: str) -> None:
        refused(preprocess(url), words, opened=False)


class TestNothingAccepted:
    def test_shows_the_commonest_reasons_and_suggests_no_verify(self, preprocess: Command, tmp_path: Path) -> None:
        silent = {"messages": [{"role": "user", "content": "Hi?"}]}
        source = write_rows(tmp_path / "rows.jsonl", {"messages": []}, silent, silent, "{", "{", "{", {"messages": 7})
        ended = preprocess(source, "--recipe", "chat", "--max-reject-rate", 1)
        assert ended.code == 1
        shown = [line for line in ended.stdout.splitlines() if ", for example row " in line]
        assert [line.split(":")[0] for line in shown] == [
            "malformed_row, for example row 3 (rows.jsonl, row 3)",
            "malformed_messages, for example row 0 (rows.jsonl, row 0)",
            "no_assistant_turn, for example row 1 (rows.jsonl, row 1)",
        ]
        assert "vlmdata verify" not in ended.stdout
        assert "failed: 7 rows gave no samples, so there is nothing to train on." in ended.stderr

    def test_images_that_are_all_missing_suggest_their_folder(self, preprocess: Command, tmp_path: Path) -> None:
        turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A cat."}]
        source = write_rows(tmp_path / "rows.jsonl", {"messages": turns, "images": ["cat.png"]})
        ended = preprocess(source, "--recipe", "chat")
        assert ended.code == 1
        assert "No image was found: set --image-root to the folder" in ended.stderr

    def test_another_recipe_needs_no_overwrite(self, preprocess: Command, tmp_path: Path) -> None:
        rows = [{"messages": [], "image": cord_row(0)["image"], "ground_truth": '{"gt_parse": {"a": "1"}}'}]
        source = tmp_path / "rows.parquet"
        Dataset.from_list(rows).to_parquet(str(source))
        assert preprocess(source, "--recipe", "chat", *SMALL_IMAGES).code == 1
        ended = preprocess(source, "--recipe", "cord_v2", *SMALL_IMAGES)
        assert ended.code == 0, ended.stderr
        assert Manifest.read(tmp_path / "out").totals.samples == 1
        assert preprocess(source, "--recipe", "chat", *SMALL_IMAGES).code == 2  # now there is something to lose

    def test_the_same_command_tries_again(self, preprocess: Command, tmp_path: Path) -> None:
        """Pictures that were missing may be there now."""
        row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, CHAT["messages"][1]]}
        source = write_rows(tmp_path / "rows.jsonl", row)
        ended = preprocess(source, *SMALL_IMAGES)
        assert ended.code == 1
        assert "missing_image, for example row 0" in ended.stdout
        (tmp_path / "a.png").write_bytes(cord_row(0)["image"]["bytes"])
        ended = preprocess(source, *SMALL_IMAGES)
        assert ended.code == 0, ended.stderr
