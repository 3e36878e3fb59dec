"""``draftsmith store``: what a store holds, whether all of it is sound, and what could go.

Tables are for people; with ``--json`` standard output is JSON and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith import config
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.store.leftovers import Leftover

app = typer.Typer(no_args_is_help=True, help="Look into the store of hidden states: verify, stats, clean.")

Folder = Annotated[
    Path | None,
    typer.Argument(help="The store, or the folder of one fingerprint; left out: the config's extract.store."),
]
Whole = Annotated[
    str, typer.Option("--config", envvar="DRAFTSMITH_CONFIG", help="A config file, whose extract.store is looked into.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def verify(
    folder: Folder = None,
    manifest: Annotated[
        Path | None, typer.Option(help="results/NAME/extract/manifest.json: are its rows there?", dir_okay=False)
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Files that are read at once.")] = 8,
    whole: Whole = "",
    as_json: AsJson = False,
) -> None:
    """Read every file and compare it with its checksums; exit code 1 when something is damaged or missing.

    Nothing is changed, but for a note in the journal: the next extraction reads no sound file again, and computes the rows
    of damaged ones anew.
    """
    from draftsmith.store import tables
    from draftsmith.store.audit import audit

    store = _store(folder, whole)
    if manifest is not None:
        named = Path(_manifest(manifest)["store"])
        # The manifest knows where its rows are.
        store = named.parent if folder is None else store
        # A store may have been moved; what is in it has kept its name.
        if store.is_dir() and store.name != named.name and not (store / named.name).is_dir():
            raise DraftsmithError(f"{manifest}: is of the store {named.parent}, not of {store}; name that one, or none")
    with tables.Progress() as progress:
        found = audit(store, manifest, threads, progress)
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        tables.show_audit(found)
    if not found.sound:
        raise typer.Exit(1)


@app.command()
def stats(folder: Folder = None, whole: Whole = "", as_json: AsJson = False) -> None:
    """What the store holds, by the heads of its files alone."""
    from draftsmith.store import tables
    from draftsmith.store.inventory import contents, folders

    store = _store(folder, whole)
    found = [contents(path) for path in folders(store)]
    if as_json:
        listed = [each.model_dump(mode="json") for each in found]
        print(json.dumps({"store": str(store), "fingerprints": listed}, indent=2))
    else:
        tables.show_stats(found)


@app.command()
def clean(
    folder: Folder = None,
    staging: Annotated[
        bool, typer.Option("--staging", help="Staging folders of processes of this host that are gone.")
    ] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="Damaged files that were moved aside.")] = False,
    fingerprint: Annotated[
        list[str] | None, typer.Option(help="The folder of this fingerprint; may be repeated.")
    ] = None,
    others: Annotated[
        bool, typer.Option("--others", help="The folders of all fingerprints that neither --keep nor --manifest names.")
    ] = False,
    keep: Annotated[list[str] | None, typer.Option(help="A fingerprint that stays; may be repeated.")] = None,
    manifest: Annotated[
        list[Path] | None, typer.Option(help="A manifest whose fingerprint stays; may be repeated.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is asked for, instead of only showing it.")] = False,
    whole: Whole = "",
    as_json: AsJson = False,
) -> None:
    """Show what could go, and with --yes remove the kinds that are asked for; nothing is ever removed otherwise."""
    from draftsmith.store import leftovers, tables
    from draftsmith.store.inventory import folders

    manifests = [_manifest(path) for path in manifest or []]
    store = _store(folder, whole)
    if folder is None and manifests:
        store = Path(manifests[0]["store"]).parent
    every = folders(store)
    kept = {*(keep or []), *(each["fingerprint"] for each in manifests)}
    named = set(fingerprint or [])
    _check_request(
        store, {path.name for path in every}, named, kept, others, yes and not (staging or damaged or named or others)
    )
    items = [item for path in every for item in (*leftovers.staging(path), *leftovers.damaged(path))]
    # Without a word on what is needed, no fingerprint is less so than another.
    items += [leftovers.fingerprint(path) for path in every if path.name in named or (kept and path.name not in kept)]
    if stuck := [item for item in items if item.path.name in named and not item.removable]:
        raise DraftsmithError(f"{stuck[0].path}: stays, as {stuck[0].note}")

    def asked(item: Leftover) -> bool:
        whole_folder = item.kind == "fingerprint" and (others or item.path.name in named)
        return item.removable and (
            whole_folder or (staging and item.kind == "staging") or (damaged and item.kind == "damaged")
        )

    chosen = [item for item in items if asked(item)]
    for done, item in enumerate(chosen if yes else []):
        try:
            leftovers.remove(item, store)
        except OSError as error:
            raise DraftsmithError(
                f"{item.path}: cannot be removed as a whole ({error.strerror}), and {len(chosen) - done} of {len(chosen)} are still to go, "
                f"{', '.join(each.path.name for each in chosen[done:])}; make the store writable, and run the same command again"
            ) from None
    if as_json:
        listed = [
            item.model_dump(mode="json") | {"asked_for": item in chosen, "removed": yes and item in chosen}
            for item in items
        ]
        print(json.dumps({"store": str(store), "items": listed}, indent=2))
    else:
        tables.show_leftovers(store, items, chosen, removed=yes)


def _manifest(path: Path) -> dict[str, str]:
    """The manifest at ``path``; a file that is none is named as what it is."""
    try:
        values = json.loads(path.read_text())
        found = {"store": values["store"], "fingerprint": values["fingerprint"]}
        if not all(isinstance(value, str) for value in found.values()):
            raise TypeError
        return found
    except FileNotFoundError:
        raise DraftsmithError(
            f"{path}: no such file; merge_manifest writes results/NAME/extract/manifest.json"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise DraftsmithError(f"{path}: is no manifest; name results/NAME/extract/manifest.json") from None


def _store(folder: Path | None, whole: str) -> Path:
    if folder is not None:
        return folder
    return Path((config.settings(whole) if whole else config.Config()).extract.store)


def _check_request(
    store: Path, present: set[str], named: set[str], kept: set[str], others: bool, nothing: bool
) -> None:
    if nothing:
        raise DraftsmithError("--yes: say what to remove: --staging, --damaged, --fingerprint KEY or --others")
    if others and not kept:
        raise DraftsmithError(
            "--others: say what stays, with --manifest results/NAME/extract/manifest.json or --keep KEY"
        )
    if absent := sorted((named | kept) - present):
        raise DraftsmithError(f"{store}: holds no fingerprint {absent[0]}; `draftsmith store stats` lists them")
    if both := sorted(named & kept):
        raise DraftsmithError(f"--fingerprint {both[0]}: is also to be kept; leave out one of the two")
