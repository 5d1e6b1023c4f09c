"""``vlmdata preprocess`` as its user meets it: help, output, exit codes, and words for what goes wrong."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.preprocess.command_line import COMMAND, SMALL_IMAGES, TOKENIZER, Ended, environment, run, start
from tests.preprocess.extend_pages import write_example
from vlmdata import __version__, registry
from vlmdata.cli.main import COMMANDS, main
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.loader.config import loader_options
from vlmdata.preprocess.registries import RECIPES

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "torchvision", "pandas", "PIL")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 rows, of which 3 are bad in two ways."""
    rows = [cord_row(n, width=64 + 32 * (n % 5)) for n in range(40)]
    rows[4]["ground_truth"] = rows[5]["ground_truth"] = "{"
    rows[30]["image"]["bytes"] = b"nothing to see"
    return write_cord_parquet(tmp_path_factory.mktemp("command") / "train.parquet", rows)


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of the command off a terminal, in this process, and its folder."""
    out = tmp_path_factory.mktemp("finished") / "out"
    options = ("--rows-per-shard", 16, "-j", 1, "--max-reject-rate", 0.2, *SMALL_IMAGES)
    arguments = ["vlmdata", *map(str, ("preprocess", source, "--out", out, *options))]
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", arguments)
        patch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as ended:
            main()
    return out, subprocess.CompletedProcess(arguments, int(ended.value.code or 0), stdout.getvalue(), stderr.getvalue())


class TestHelp:
    def test_imports_nothing_heavy(self) -> None:
        """Neither do the packages, nor the help of commands."""
        program = (
            "import sys, vlmdata.preprocess\n"
            "from vlmdata.cli.main import main\n"
            "def tell(what): print('heavy:', what, [name for name in {HEAVY!r} if name in sys.modules])\n"
            "tell('imports')\n"
            "for command in ([], ['preprocess'], ['verify']):\n"
            "    sys.argv = ['vlmdata', *command, '--help']\n"
            "    try: main()\n"
            "    except SystemExit as end: assert not end.code\n"
            "    tell(command)\n"
        ).replace("{HEAVY!r}", repr(HEAVY))
        done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^heavy: (.*)$", done.stdout, re.MULTILINE)
        assert found == ["imports []", "[] []", "['preprocess'] []", "['verify'] []"]
        assert done.stdout.count("Usage") == 3

    @pytest.mark.parametrize(
        ("name", "words"),
        [("preproces", "Did you mean preprocess?"), ("teach", "Commands: preprocess, finish, ")],
    )
    def test_an_unknown_command_is_answered_with_known_ones(
        self, vlmdata: Callable[..., Ended], name: str, words: str
    ) -> None:
        ended = vlmdata(name)
        assert ended.code == 2
        assert f"No such command '{name}'. {words}" in ended.said

    def test_of_the_program_names_its_commands(
        self, vlmdata: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of other packages are what was installed; its own do not depend on that."""
        monkeypatch.setattr(registry, "_installed", lambda group: {"count": "collections:Counter"})
        ended = vlmdata("--help")
        assert ended.code == 0
        assert re.findall(r"^│ ([\w-]+) ", ended.stdout, re.MULTILINE)[-16:] == [*COMMANDS, "count"]
        for place in COMMANDS.values():
            assert callable(EntryPoint("", place, "").load())

    def test_a_command_of_the_users_file_runs_by_its_file_or_as_an_installed_one(
        self, vlmdata: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """That of docs/extend/command.md."""
        name = f"{tmp_path / write_example('command.md', tmp_path)}.py:shards"
        (tmp_path / "manifest.json").write_text("{}")
        ended = vlmdata(name, tmp_path)
        assert (ended.code, "has no shards" in ended.said) == (2, True), ended.said
        assert "Print the names and sizes of shards." in vlmdata(name, "--help").said
        assert "has no attribute 'nothing'" in vlmdata(name.replace(":shards", ":nothing")).said
        assert "vlmdata shards" not in vlmdata("shards").stdout
        monkeypatch.setattr(registry, "_installed", lambda group: {"shards": name})
        assert vlmdata("shards", tmp_path).said == ended.said

    def test_is_there_without_docstrings(self, vlmdata: Callable[..., Ended]) -> None:
        """Under ``python -OO``, for the command and for each option of the loader."""
        code = """
import json, sys
from vlmdata.cli.main import app
from vlmdata.loader.config import loader_options
from vlmdata.train import app as train
assert app.__init__.__doc__ is None
print(json.dumps({each.name: each.help for each in loader_options().values()}))
print(json.dumps(train.registered_commands[0].help))
sys.argv[1:] = ["plan", "--help"]
app()
"""
        ended = subprocess.run([sys.executable, "-OO", "-c", code], env=environment(), capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        options, train, said = ended.stdout.split("\n", 2)
        assert json.loads(options) == {each.name: each.help for each in loader_options().values()}
        assert json.loads(train).startswith("Train Qwen3.5-VL")
        usual = vlmdata("plan", "--help").stdout
        words = [re.findall(r"\w+", each.partition("[OPTIONS]")[2]) for each in (said, usual)]
        assert words[0] == words[1]

    def test_of_preprocess_has_examples_exit_codes_and_every_option_with_its_default(
        self, vlmdata: Callable[..., Ended]
    ) -> None:
        said = vlmdata("preprocess", "--help").said
        assert "Examples" in said
        assert "vlmdata preprocess demo --out build/demo" in said
        assert "Exit codes" in said
        options = """--recipe --split --tokenizer --min-pixels --max-pixels --max-length --pad-multiple --rows-per-shard
            --workers --limit --recipe-option --max-reject-rate --json --overwrite --overlong --train-turns
            --train-think --special-text --image-root --allow-urls --out"""
        assert {option for option in options.split() if option not in said} == set()
        assert "[default: (the family's, 200,704 for qwen3_5)]" in said
        assert "[default: (the family's, 1,003,520 for qwen3_5)]" in said
        assert (FAMILY.min_pixels, FAMILY.max_pixels) == (200_704, 1_003_520)

    def test_version(self, vlmdata: Callable[..., Ended]) -> None:
        assert vlmdata("--version") == Ended(0, f"vlmdata {__version__}\n", "")

    def test_the_installed_script_works(self) -> None:
        assert run("--version", anew=True).stdout == f"vlmdata {__version__}\n"

    def test_without_arguments_shows_help(self, vlmdata: Callable[..., Ended]) -> None:
        ended = vlmdata()
        assert ended.code == 2
        assert "Usage" in ended.said


class TestSummary:
    def test_is_a_table_of_what_was_made(self, finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        out, done = finished
        assert done.returncode == 0, done.stderr
        totals = json.loads((out / "manifest.json").read_text())["totals"]
        cells = {}
        for line in done.stdout.splitlines():
            if line.startswith("│"):
                name, value, note = (cell.strip() for cell in line.strip("│").split("│"))
                cells[name] = (value, note)
        fields = {"target tokens": "targets", "images": "items"}
        for name in ("samples", "tokens", "target tokens", "images", "patches", "bytes", "rows", "rejected"):
            assert cells[name][0] == f"{totals[fields.get(name, name)]:,}"
        assert cells["malformed_ground_truth"][0] == "2"
        assert cells["not_an_image"][0] == "1"
        assert cells["rejected"][1] == "7.50 % of rows"
        assert re.fullmatch(r"\d+\.\d s|\d+ s|\d+ min.*", cells["time"][0])  # in short: `vlmdata.wording.duration`
        assert cells["time"][1] == "3 shards made"
        assert list(cells)[8:10] == ["malformed_ground_truth", "not_an_image"]  # commonest first

    def test_has_the_length_distribution(self, finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        _, done = finished
        bins = re.findall(r"^([\d,]+)–([\d,]+) +(\d+)", done.stdout, re.MULTILINE)
        assert sum(int(count) for *_, count in bins) == 37
        assert re.search(r"mean [\d,]+, p50 [\d,]+, p95 [\d,]+, p99 [\d,]+", done.stdout)

    def test_says_why_rows_were_rejected_where_they_are_and_what_comes_next(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        out, done = finished
        lines = done.stdout.splitlines()[-5:]
        assert lines[0].startswith("recipe cord_v2, tokenizer embedded (6,144 ids, for trials only:")
        assert lines[1].startswith("malformed_ground_truth, for example row 4 (train.parquet, row 4): ground_truth is ")
        assert lines[2].startswith("not_an_image, for example row 30 (train.parquet, row 30): image: ")
        assert lines[3:] == [f"rejected rows, with reasons: {out / 'rejected.jsonl'}", f"next: vlmdata verify {out}"]

    def test_progress_off_a_terminal_is_plain_lines_on_stderr(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]], source: Path
    ) -> None:
        _, done = finished
        opened, chosen, started, last = done.stderr.splitlines()
        assert opened == f"opening {source} …"
        assert chosen == "recipe cord_v2, chosen by the columns"
        assert started == "40 rows in 3 shards: recipe cord_v2, tokenizer embedded, 1 worker"
        reasons = r"2 malformed_ground_truth, 1 not_an_image"
        assert re.fullmatch(rf"shard 3/3, 100 %, [\d,.]+ rows/s, [\d,.]+ MB/s, 3 rejected \({reasons}\)", last)
        assert "\x1b" not in done.stderr + done.stdout
        assert "\r" not in done.stderr + done.stdout

    def test_as_json_is_all_there_is_on_stdout(
        self, vlmdata: Callable[..., Ended], finished: tuple[Path, subprocess.CompletedProcess[str]], source: Path
    ) -> None:
        """Again over the finished dataset: the same numbers, with nothing made anew."""
        out, _ = finished
        before = tree_bytes(out)
        options = ("--rows-per-shard", 16, "-j", 1, "--max-reject-rate", 0.2, *SMALL_IMAGES)
        done = vlmdata("preprocess", source, "--out", out, "--json", *options)
        assert done.code == 0, done.stderr
        summary = json.loads(done.stdout)
        manifest = json.loads((out / "manifest.json").read_text())
        assert summary["totals"] == manifest["totals"]
        assert summary["rejects"] == {"malformed_ground_truth": 2, "not_an_image": 1}
        assert summary["reject_rate"] == 3 / 40
        assert [(each["row"], each["reason"]) for each in summary["reject_examples"]] == [
            (4, "malformed_ground_truth"),
            (30, "not_an_image"),
        ]
        assert (summary["recipe"], summary["tokenizer"]) == ("cord_v2", "embedded")
        assert (summary["shards"], summary["shards_made"], summary["shards_kept"]) == (3, 0, 3)
        assert sum(summary["lengths"]["counts"]) == 37
        assert summary["lengths"]["percentiles"]["100"] < max(summary["lengths"]["edges"])
        assert summary["seconds"] > 0
        assert tree_bytes(out) == before

    def test_names_folders_with_brackets_as_they_are(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "[bold]out[/]"
        ended = vlmdata("preprocess", source, "--out", out, "-j", 1, "--limit", 6, *SMALL_IMAGES)
        assert ended.code == 1
        assert f"next: vlmdata verify '{out}'" in ended.stdout
        assert f"{out / 'rejected.jsonl'} has the reasons" in ended.stderr


class TestTerminal:
    def test_shows_a_live_bar_with_rates_rejects_and_remaining_time(self, source: Path, tmp_path: Path) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        options = ("--rows-per-shard", 16, "-j", 1, "--max-reject-rate", 0.2, *SMALL_IMAGES)
        process = start(
            "preprocess",
            source,
            "--out",
            tmp_path / "out",
            *options,
            stderr=follower,
            env=environment(TERM="xterm-256color", COLUMNS="140"),
        )
        os.close(follower)
        shown = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not chunk:
                break
            shown += chunk
        os.close(leader)
        stdout, _ = process.communicate(timeout=240)
        text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
        assert process.returncode == 0, text
        assert "━" in text
        rates = r"[\d,.]+ rows/s, [\d,]+ tokens/s, [\d,.]+ MB/s"
        assert re.search(rf"100% ━+ 40/40 {rates}, 3 rejected \(2 malformed_ground_truth, 1 \w+\) \d:\d\d:\d\d", text)
        assert "shard 3/3" not in text  # the bar says it
        assert "samples" in stdout  # the summary goes to stdout, which is no terminal here
        assert "\x1b" not in stdout


class TestExitCodes:
    def test_more_rejects_than_allowed_is_1_and_the_dataset_is_complete(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        options = ("-j", 1, *SMALL_IMAGES)
        ended = vlmdata("preprocess", source, "--out", out, *options)
        assert ended.code == 1
        assert "failed: 3 of 40 rows rejected (7.5 %), more than --max-reject-rate 0.01 allows." in ended.stderr
        assert f"{out / 'rejected.jsonl'} has the reasons" in ended.stderr
        assert len((out / "rejected.jsonl").read_text().splitlines()) == 3
        assert vlmdata("verify", out, "-j", 1).code == 0
        assert vlmdata("preprocess", source, "--out", out, *options, "--max-reject-rate", 3 / 40).code == 0
        assert vlmdata("preprocess", source, "--out", out, *options, "--max-reject-rate", 0.07).code == 1
        ended = vlmdata("preprocess", source, "--out", out, *options, "--json")
        assert ended.code == 1
        assert json.loads(ended.stdout)["max_reject_rate"] == 0.01

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--min-pixels", 10], "min_pixels is 10; it must be at least 1024"),
            (["--max-pixels", 2000], "max_pixels is 2000, less than min_pixels 200704 (the default of family qwen3_5)"),
            (["--max-source-pixels", 0], "max_source_pixels is 0; it must be positive"),
            (["--max-length", 0], "max_length is 0; it must be at least 1"),
            (["--pad-multiple", 0], "pad_multiple is 0; it must be at least 1"),
            (["--rows-per-shard", -1], "rows_per_shard is -1; it must be at least 1"),
            (["--workers", 0], "workers is 0; it must be at least 1"),
            (["--max-reject-rate", 1.5], "max_reject_rate is 1.5; it must be between 0 and 1"),
            (["--special-text", "yaml"], "'yaml' is not one of 'reject', 'plain'"),
            (["--max-length", "many"], "Invalid value for '--max-length'"),
            (["--limit", 0], "--limit 0: it must be at least 1"),
            (["--frobnicate"], "No such option"),
            (
                ["--recipe", "nope"],
                f"--recipe nope: unknown recipe. Known: {', '.join(RECIPES)}; or your own as module:attribute or "
                "file.py:attribute.",
            ),
            (
                ["--recipe", "no_such_module:Recipe"],
                "--recipe no_such_module:Recipe: cannot load no_such_module:Recipe: No module named 'no_such_module'. "
                "Set PYTHONPATH to the module's folder, or write path/to/no_such_module.py:Recipe. Built in: cord_v2",
            ),
            (["--recipe", "json:Recipe"], "json has no attribute 'Recipe'"),
            (["--recipe", "mine.py:X"], "--recipe mine.py:X: cannot load mine.py:X: [Errno 2] No such file"),
            (["--tokenizer", "/nowhere/at/all"], "--tokenizer /nowhere/at/all: cannot load it"),
            (["--tokenizer", "Qwen/Qwen3.5-9B"], "--tokenizer Qwen/Qwen3.5-9B: cannot load it from the hub"),
            (["--split", "test"], "--split test"),
        ],
        ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
    )
    def test_wrong_options_are_2_and_reported_in_a_line(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path, options: list[Any], words: str
    ) -> None:
        out = tmp_path / "out"
        ended = vlmdata("preprocess", source, "--out", out, "-j", 1, *TOKENIZER, *options)
        assert ended.code == 2
        assert words in ended.said
        assert "Traceback" not in ended.said
        assert ended.stdout == ""
        assert not out.exists()

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ("/no/such/file.parquet", "SOURCE /no/such/file.parquet: no such file or folder"),
            ("naver-clova-ix/cord-v2", "the Hugging Face hub cannot be reached"),
            ("{tmp}/empty", "SOURCE"),
            ("{tmp}/notes.txt", "notes.txt is no data file"),
            ("{tmp}/broken.parquet", "it does not end with a Parquet footer"),
        ],
    )
    def test_a_source_that_cannot_be_opened_is_2_and_reported_in_a_line(
        self, vlmdata: Callable[..., Ended], tmp_path: Path, spec: str, words: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("hello")
        (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing of the kind")
        ended = vlmdata("preprocess", spec.format(tmp=tmp_path), "--out", tmp_path / "out", *TOKENIZER)
        assert ended.code == 2
        assert words in ended.said
        assert "error:" in ended.stderr
        assert "Traceback" not in ended.said
        assert not (tmp_path / "out").exists()

    def test_no_out_is_2(self, vlmdata: Callable[..., Ended]) -> None:
        ended = vlmdata("preprocess", "demo")
        assert ended.code == 2
        assert "Invalid value for --out: missing" in ended.said

    def test_another_configuration_in_the_folder_is_2_with_the_differences(
        self, vlmdata: Callable[..., Ended], finished: tuple[Path, Any], source: Path
    ) -> None:
        out, _ = finished
        before = tree_bytes(out)
        ended = vlmdata("preprocess", source, "--out", out, "-j", 1, "--rows-per-shard", 20, *SMALL_IMAGES)
        assert ended.code == 2
        assert "config.options.rows_per_shard: 16 there, 20 now" in ended.stderr
        assert "give another --out" in ended.stderr
        assert tree_bytes(out) == before

    def test_a_folder_that_cannot_be_written_is_3_and_reported_in_a_line(
        self, vlmdata: Callable[..., Ended], source: Path
    ) -> None:
        ended = vlmdata("preprocess", source, "--out", "/proc/out", "-j", 1, *TOKENIZER)
        assert ended.code == 3
        assert "/proc/out: cannot be written: " in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_no_workers_left_is_3(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every process that is given a row dies."""
        module = tmp_path / "deadly_recipe.py"
        module.write_text(
            "import multiprocessing, os\nfrom vlmdata.preprocess.recipes.cord_v2 import CordV2\n\n\n"
            "class Deadly(CordV2):\n    def __call__(self, row):\n"
            "        if multiprocessing.parent_process() is not None:\n            os.kill(os.getpid(), 9)\n"
            "        return super().__call__(row)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        options = ("--recipe", "deadly_recipe:Deadly", "--rows-per-shard", 20, "-j", 2, *SMALL_IMAGES)
        ended = vlmdata("preprocess", source, "--out", tmp_path / "out", *options)
        assert ended.code == 3
        assert "5 worker processes died in a row on shard " in ended.stderr
        assert re.search(
            r"shard (0 \(rows 0 to 19\)|1 \(rows 20 to 39\)), the last one by SIGKILL, as when memory is short, at row "
            r"(0|20)\. Finished",
            ended.stderr,
        )
        assert "fewer --workers" in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_ctrl_c_is_130_and_reported_in_a_line(
        self, vlmdata: Callable[..., Ended], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

        monkeypatch.setattr("vlmdata.preprocess.cli.run_command.preprocess_dataset", interrupted)
        ended = vlmdata("preprocess", source, "--out", tmp_path / "out", "-j", 1, *TOKENIZER)
        assert ended.code == 130
        assert ended.stderr.endswith("error: interrupted; finished work is kept, and the same command continues\n")
        assert "Traceback" not in ended.stderr

    def test_ctrl_c_promises_nothing_of_a_command_that_only_reads(
        self, vlmdata: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr("vlmdata.format.manifest.Manifest.read", interrupted)
        ended = vlmdata("verify", tmp_path)
        assert (ended.code, ended.stderr) == (130, "error: interrupted\n")

    def test_a_reader_that_goes_away_is_no_error_of_ours(self) -> None:
        piped = subprocess.Popen(
            [*COMMAND, "preprocess", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert piped.stdout is not None
        assert piped.stderr is not None
        piped.stdout.close()
        assert b"Traceback" not in piped.stderr.read()
        piped.wait(timeout=240)
