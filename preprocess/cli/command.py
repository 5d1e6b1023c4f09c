"""What the command line of ``vlmdata preprocess`` can ask for, beside what decides the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from vlmdata.options import OptionHelp
from vlmdata.preprocess.config import PreprocessConfig, data_option, run_option
from vlmdata.preprocess.registries import ENGINES, READERS
from vlmdata.preprocess.run.limits import parse_limits


@dataclass(frozen=True)
class PreprocessCommand:
    """What a command line asks for."""

    out: Annotated[
        str | None,
        OptionHelp(
            "Dataset to make or continue: a folder, or s3://, gs:// or az:// of one in a bucket. Required, except "
            "with --trace or --lengths.",
            flags=("--out", "-o"),
        ),
    ] = None
    split: Annotated[
        str | None,
        data_option(
            "Split to read. Default: train, or the only one. Several, as in `train,validation`, make one dataset "
            "each, in folders of --out."
        ),
    ] = None
    subset: Annotated[str | None, data_option("Configuration of a hub dataset.")] = None
    revision: Annotated[str | None, data_option("Branch, tag or commit of a hub dataset.")] = None
    reader: Annotated[
        str | None,
        data_option(
            f"Read only the source's files of one format: {', '.join(f'`{name}`' for name in READERS)}, or your own "
            "reader's as `module:attribute` or `file.py:attribute`. Default: by the names of the files.",
            shown_default=False,
        ),
    ] = None
    limit: Annotated[int | None, data_option("Read only this many rows, from the first (demo: draw this many).")] = None
    holdout: Annotated[
        float | None,
        data_option(
            "Hold out this share of the rows, such as 0.02, chosen by a hash of their content. Makes datasets "
            "`train` and `validation` in --out."
        ),
    ] = None
    holdout_by: Annotated[
        str | None,
        data_option(
            "Keep rows with the same image on one side of --holdout (`image`: by the bytes of the files that the "
            "recipe reads), or rows with the same value of a column (its name, such as `meta.document`).",
            metavar="image|COLUMN",
        ),
    ] = None
    #: Options that affect the bytes; its recipe, tokenizer and family count only if the user gave them.
    config: PreprocessConfig = field(default_factory=PreprocessConfig)
    workers: Annotated[
        int | None, run_option("Workers. Default: one per core (of the cluster, with Ray).", flags=("--workers", "-j"))
    ] = None
    engine: Annotated[
        str,
        run_option(
            f"What makes the shards: {', '.join(f'`{name}`' for name in ENGINES)}, or your own as `module:attribute` "
            "or `file.py:attribute`."
        ),
    ] = "local"
    engine_option: Annotated[
        Mapping[str, Any],
        run_option(
            "Option of the engine; repeat for several. `--engine-option help` describes them, also for your own "
            "--engine.",
            metavar="NAME=VALUE",
            shown_default=False,
        ),
    ] = field(default_factory=dict)
    ray_address: Annotated[
        str | None,
        run_option("Short for --engine-option address=…: the cluster, such as 10.0.0.1:6379 or auto."),
    ] = None
    reject_after_deaths: Annotated[
        int | None,
        run_option(
            "Short for --engine-option reject_after_deaths=N: reject a row, as `worker_died`, after it has ended N "
            "worker processes (out of memory, or a crash in a library). Default: the fifth death ends the run and "
            "names the row.",
            metavar="N",
        ),
    ] = None
    part: Annotated[
        str | None,
        run_option(
            "Make every N-th shard only, from the K-th, and no manifest; `vlmdata finish` closes the dataset when "
            "all parts are made.",
            metavar="K/N",
        ),
    ] = None
    max_reject_rate: Annotated[
        float, run_option("Exit with code 1 if a larger share of the rows is rejected, not counting rows of weight 0.")
    ] = 0.01
    overwrite: Annotated[bool, run_option("Remove a dataset in --out and start over.")] = False
    hash_source: Annotated[
        bool,
        run_option(
            "Know the source's files by their bytes, not by footers, times or a bucket's checksums; and when "
            "continuing, read all image files of finished shards, not only those touched since."
        ),
    ] = False
    trace: Annotated[
        int | None,
        run_option(
            "Write nothing; show the recipe's and tokenizer's result for this row, or the traceback.", metavar="ROW"
        ),
    ] = None
    lengths: Annotated[
        str | None,
        run_option(
            "Write nothing; report what these limits for --max-length would cost in samples and tokens, and the images "
            "that cause it: `4096,8192,16384`.",
            metavar="N,N",
        ),
    ] = None
    as_json: Annotated[
        bool,
        run_option("Print the summary as JSON on stdout, and progress as lines of JSON on stderr.", flags=("--json",)),
    ] = False
    source: str = "demo"
    given: frozenset[str] = frozenset()  # names of the options that the user gave

    @property
    def engine_options(self) -> dict[str, Any]:
        """The engine's own options, with those that have an option of the command as a short form."""
        short = {"address": self.ray_address, "reject_after_deaths": self.reject_after_deaths}
        given = {name: str(value) for name, value in short.items() if value is not None}
        if twice := given.keys() & self.engine_option.keys():
            raise ValueError(f"--engine-option {min(twice)}: given twice, also by its short form")
        return {**self.engine_option, **given}

    def __post_init__(self) -> None:
        _ = self.engine_options  # refuses one that is given twice
        if self.config.media.private_hosts and not self.config.media.allow_urls:
            raise ValueError("--allow-private-host has no effect without --allow-urls")
        if not 0 <= self.max_reject_rate <= 1:
            raise ValueError(f"max_reject_rate is {self.max_reject_rate}; it must be between 0 and 1")
        if self.holdout is not None and not 0 < self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout}; it must be between 0 and 1")
        if self.holdout_by is not None and (self.holdout is None or not self.holdout_by):
            raise ValueError(f"holdout_by is {self.holdout_by!r}; give `image` or a column, and --holdout with it")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
        if self.trace is not None and self.as_json:
            raise ValueError("--trace prints text; omit --json")
        if self.part is not None and self.trace is not None:
            raise ValueError("--trace shows one row and makes no shards; omit --part")
        if self.lengths is not None:
            parse_limits(self.lengths)
            for name in ("trace", "part", "holdout"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--lengths makes no dataset; omit --{name}")
        if self.part is not None and self.overwrite:
            raise ValueError("--overwrite would remove the shards of other parts; omit it, or remove the folder")
