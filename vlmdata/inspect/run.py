"""Runs each form of ``vlmdata inspect``: describes, then prints, writes or serves."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vlmdata.errors import ResourceError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.dataset import DatasetCard, describe_dataset, suspicious_samples
from vlmdata.inspect.duplicates import duplicate_pairs, grouped
from vlmdata.inspect.findings import IndexFindings
from vlmdata.inspect.packs import EpochPacks
from vlmdata.inspect.page.build import HtmlPage, choose_samples, mixture_document, page_document, write_page
from vlmdata.inspect.query import candidates, parse_query, search
from vlmdata.inspect.sample import SampleDescriber, describe_sample, position_of
from vlmdata.inspect.serialise import to_json
from vlmdata.inspect.terminal.card import print_card
from vlmdata.inspect.terminal.duplicates import print_pairs
from vlmdata.inspect.terminal.sample import print_sample
from vlmdata.inspect.terminal.trace import print_found, print_row, print_step
from vlmdata.inspect.terminal.versions import print_versions
from vlmdata.inspect.tokens import TokenTexts
from vlmdata.inspect.trace import describe_row, describe_step, found_samples, step_of_run
from vlmdata.inspect.versions import VersionHistory
from vlmdata.loader.mixture import expanded, mixture_in
from vlmdata.select.marks import read_report
from vlmdata.storage.choices import DEFAULT_CACHE_BYTES
from vlmdata.storage.open import open_dataset, open_for_loading
from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.loader.loader import StreamingLoader
    from vlmdata.loader.run_record import LoaderChoice

#: Number of samples that ``--find`` lists in the terminal; ``--json`` lists all.
_LISTED = 50


@dataclasses.dataclass(frozen=True)
class Inspection:
    """One run of the command, on some datasets, with the given loader options and an epoch for packs.

    ``steps`` is the number of steps of the mixture in the page; None is those of the epoch.
    """

    data: Sequence[str]
    choice: LoaderChoice
    epoch: int
    as_json: bool
    steps: int | None = None

    def card(self, check: int | None) -> None:
        """Prints the dataset card."""
        card = self._card(self._dataset("a card"), check)
        self._show(card, lambda console: print_card(console, card))

    def versions(self) -> None:
        """Prints the versions of the dataset."""
        found = VersionHistory(self._dataset("--versions")).describe()
        self._show({"versions": found}, lambda console: print_versions(console, found))

    def sample(self, which: str, tokens: bool) -> None:
        """Prints one sample."""
        found = describe_sample(self._dataset("--sample"), which)
        self._show(found, lambda console: print_sample(console, found, tokens))

    def row(self, source_row: int, tokens: bool) -> None:
        """Prints the outcome of a source row: its samples and their uses, and the reasons for rejections."""
        dataset = self._dataset("--row")
        # Planning imports torch and takes seconds, so steps are shown only if a capacity is given.
        loader = self._loader([dataset]) if "capacity" in self.choice.given or self.choice.run is not None else None
        trace = describe_row(dataset, source_row, loader, self.epoch)
        positions = [candidate.index for candidate in trace.candidates]
        describe = SampleDescriber(dataset) if any(i is not None for i in positions) else None
        samples = [None if i is None or describe is None else describe(i) for i in positions]
        self._show({"trace": trace, "samples": samples}, lambda console: print_row(console, trace, samples, tokens))

    def find(self, text: str, check: int | None) -> None:
        """Lists the samples that match a query."""
        dataset = self._dataset("--find")
        query = parse_query(text)
        # Tokens are checked only if the query asks for suspicious samples.
        suspicious = suspicious_samples(self._card(dataset, check)) if "is:suspicious" in query.flags else ()
        order = candidates(IndexFindings(dataset.index, dataset.family), query, suspicious)
        hits = search(dataset, TokenTexts(dataset.directory, dataset.manifest), order, query.text, limit=len(dataset))
        samples = found_samples(dataset, hits.samples)
        self._show(
            {"query": query, "samples": samples}, lambda console: print_found(console, samples, len(dataset), _LISTED)
        )

    def pack(self, number: int) -> None:
        """Prints a packed batch."""
        from vlmdata.inspect.terminal.batch import print_batch

        found = EpochPacks(self._loader(self._datasets()), self.epoch).describe(number)
        self._show(found, lambda console: print_batch(console, found))

    def step(self, epoch: int | None, step: int) -> None:
        """Prints the samples of an optimizer step. Without an epoch, the step counts over the whole run, from 1."""
        loader = self._loader(self._datasets())
        if epoch is None:
            epoch, step = step_of_run(loader, step)
        found = describe_step(loader, epoch, step, self.choice.given.get("dp_rank"))
        self._show(found, lambda console: print_step(console, found))

    def duplicates(self, report: Path) -> None:
        """Prints near duplicates beside the samples that stay for them."""
        dataset = self._dataset("--duplicates")
        found = duplicate_pairs(dataset, read_report(report))
        self._show({"duplicates": found}, lambda console: print_pairs(console, found[:_LISTED], len(found)))

    def html(
        self,
        path: Path,
        count: int,
        keys: list[str] | None,
        packs: int,
        check: int | None,
        duplicates: Path | None = None,
    ) -> None:
        """Writes the one-file page; of near duplicates, each group of samples in a row."""
        if self._is_mixture():
            if keys is not None or duplicates is not None:
                raise UsageError("--html of several datasets shows no samples, so leave out --keys and --duplicates")
            found = self._packs()
            shown = found.page(0, packs)
            document = mixture_document(self._mixture_name(), shown, found.mixture())
            self._written(path, document, 0, len(shown["batches"]))
            return
        dataset = self._dataset("--html")
        card = self._card(dataset, check)
        if duplicates is not None:
            chosen = grouped(dataset, read_report(duplicates), count)
        elif keys is None:
            chosen = choose_samples(card, len(dataset), count, int(self.choice["seed"]))
        else:
            chosen = dict.fromkeys((position_of(dataset, key.strip()) for key in keys), "asked for")
        found = self._packs(dataset)
        shown = found.page(0, packs)
        document = page_document(dataset, card, chosen, shown, found.mixture())
        self._written(path, document, len(chosen), len(shown["batches"]))

    def _written(self, path: Path, document: HtmlPage, samples: int, batches: int) -> None:
        write_page(path, document)
        size = path.stat().st_size
        written = {"file": str(path), "samples": samples, "packs": batches, "bytes": size}
        line = f"{path}: {counted(samples, 'sample')}, {counted(batches, 'pack')}, {size / 1e6:,.1f} MB"
        self._show(written, lambda console: console.print(line, markup=False, soft_wrap=True))

    def serve(self, host: str, port: int, names: Sequence[str], check: int | None) -> None:
        """Serves the page until interrupted."""
        from vlmdata.inspect.connections import server_of
        from vlmdata.inspect.server import InspectApp, MixtureApp, build_app

        if self._is_mixture():
            name = self._mixture_name()
            served = MixtureApp(name, self._packs())
        else:
            dataset = self._dataset("--serve")
            name, served = dataset.name, InspectApp(dataset, self._card(dataset, check), self._packs(dataset))
        with _listen(host, port) as listening:
            port = listening.getsockname()[1]
            app = build_app(served, host=host, port=port, names=names)
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{port}/"
            line = f"{name}: {url}  (Ctrl-C to stop)"
            self._show({"url": url}, lambda console: console.print(line, markup=False, soft_wrap=True))
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server
                server_of(app).run(sockets=[listening])

    def _card(self, dataset: VlmDataset, check: int | None) -> DatasetCard:
        return describe_dataset(dataset, check=check, seed=int(self.choice["seed"]))

    def _packs(self, dataset: VlmDataset | None = None) -> EpochPacks:
        """Returns the packs of one dataset, none if it has no sample; without it, those of the mixture."""
        datasets = self._datasets() if dataset is None else [dataset]
        return EpochPacks(self._loader(datasets) if any(map(len, datasets)) else None, self.epoch, self.steps)

    def _is_mixture(self) -> bool:
        """Returns True if the page is one of several datasets, or of a mixture file."""
        return mixture_in(self.data) is not None or len(self.data) > 1

    def _mixture_name(self) -> str:
        return counted(len(self.data), "dataset") if len(self.data) > 1 else Path(self.data[0]).name

    def _dataset(self, what: str) -> VlmDataset:
        if len(self.data) > 1:
            raise UsageError(
                f"{what} reads one dataset, got {len(self.data)}; only --pack, --step, --html and --serve take several"
            )
        return open_dataset(self.data[0])

    def _datasets(self) -> list[VlmDataset]:
        """Opens datasets for packs and steps. These read only indexes, so URLs work as well as folders."""
        return [open_for_loading(location, None, DEFAULT_CACHE_BYTES)[0] for location in expanded(self.data)]

    def _loader(self, datasets: Sequence[VlmDataset]) -> StreamingLoader:
        """Opens a loader with the chosen options that reads no pixels."""
        from vlmdata.loader.loader import StreamingLoader

        config = self.choice.config(datasets, self.data)
        if self.choice.run is not None:
            self.choice.run.require_same_data(datasets)
        rank = config.parallelism.dp_rank or 0
        return StreamingLoader(self.data, config, dp_rank=rank, parts=("tokens", "labels"))

    def _show(self, found: Any, draw: Callable[[Console], None]) -> None:
        if self.as_json:
            print(to_json(found, indent=2), flush=True)
        else:
            draw(Console(highlight=False, emoji=False))


def _listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket, so that the port is known and reserved before it is printed."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"--host {host} --port {port}: cannot listen there: {error}. Choose another --port; 0 picks a free one."
        ) from error
