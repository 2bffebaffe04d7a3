"""The rooms of the house: data goes one way, so that a room imports from those before it alone; and their picture."""

import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import outliers

PACKAGE = Path(outliers.__file__).parent
sys.path.append(str(PACKAGE.parent / "scripts"))
import rooms  # noqa: E402

MOST_FILES = 16
A_FILE_EACH = {".", "metrics", "variants", "views", "commands"}  # rooms of many things of one kind, a file each


def test_a_room_imports_from_those_before_it():
    place = {room: number for number, room in enumerate(rooms.ROOMS)}
    wrong = [
        f"{name}: {one}"
        for name, module in rooms.modules().items()
        for one in module.imports
        if place[rooms.room_of(one)] > place[module.room]
    ]
    assert wrong == []


def test_no_files_import_each_other_in_a_circle():
    modules = rooms.modules()

    def module_of(name: str) -> str:
        return name if name in modules or "." not in name else module_of(name.rpartition(".")[0])

    graph = {
        name: {*map(module_of, module.imports)} & {*modules} - {name, *rooms.SOURCES}
        for name, module in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_no_folder_is_crowded():
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")]
    folders = {file.parent for file in files if str(file.parent) not in A_FILE_EACH}
    assert [str(folder) for folder in folders if len(list((PACKAGE / folder).glob("*.py"))) > MOST_FILES] == []


def test_imports_are_counted():
    counts = rooms.imports()
    assert counts["views", "show"] > counts["views", "text"] > 0
    assert counts["models", "views"] == 0
    assert {room for pair in counts for room in pair} <= {*rooms.ROOMS}


def test_the_picture_has_every_room_and_hop():
    drawn = (PACKAGE.parent / "docs/rooms.svg").read_text(encoding="utf-8")
    named = {f"<!-- {name} -->" for pair in rooms.imports() for name in pair} | {f"<!-- {len(rooms.hops())} -->"}
    assert {name for name in named if name not in drawn} == set(), "run: python scripts/rooms.py"


CALLS = """
import json, os, runpy, sys, threading
root, out, *options = sys.argv[1:]
places = tuple(os.path.join(root, room, "") for room in ("outliers", "kernels/outlier_kernels"))
calls = {}
def see(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(places):
        calls[frame.f_code.co_filename[len(root) + 1:], frame.f_code.co_qualname] = None
sys.argv = ["", *options, "--out", out]
threading.setprofile(see)
sys.setprofile(see)
try:
    runpy.run_module("outliers.sweep", run_name="__main__", alter_sys=True)
finally:
    sys.setprofile(None)
    with open(os.path.join(out, "calls.json"), "w") as file:
        json.dump(list(calls), file)
"""


@pytest.mark.slow
def test_a_sweep_goes_the_way_of_the_tour(tmp_path):
    """Its functions are called in the order of the list, each for the first time."""
    few = ["--model", "pocket/gpt2-1.7m", "--block", "32", "--blocks", "1", "--scheme", "absmax,llm.int8"]
    subprocess.run([sys.executable, "-c", CALLS, str(rooms.ROOT), str(tmp_path), *few], check=True, capture_output=True)
    called = json.loads((tmp_path / "calls.json").read_text())
    calls = [(file, name.rpartition("<locals>.")[2]) for file, name in called]
    way = [tuple(hop) for hop in rooms.hops()]
    assert [hop for hop in way if hop not in calls] == []
    assert way == sorted(way, key=calls.index)
