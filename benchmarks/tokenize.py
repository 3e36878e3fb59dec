"""Speed and memory of the stage tokenize beside a plain `datasets.map` with `apply_chat_template` alone.

    python benchmarks/tokenize.py
    python benchmarks/tokenize.py --conversations 100000 --repeats 1
    python benchmarks/tokenize.py --quick

Both are given the same conversations (the demo's exchanges, mixed to conversations of one to eight turns, no two alike) and the
same cores, and run one after the other, in turn the one or the other first. The stage does all that it does in a run: it
reads the file, finds answers, checks, splits, writes its outputs and its cache, with as many processes as it chooses. The map
has one process a core and the data set in memory already, and only renders and encodes. Each pass is a process of its own that
has imported what it needs before the clock runs; if the stage starts others, they import while it does. After the last pass
a conversation is put on top of the file, and the stage runs again, in a new process.

Memory is the resident memory of the stage's process and all below it, of each less what a process has that only imports the
same. A busy neighbour slows the one or the other; so the seconds that processors worked for each are compared as well. One
line of JSON for each repetition, and last the medians.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig

if __name__ == "tokenize":
    # Python looks for modules in the folder of a script first: another benchmark that imports the library's finds this file.
    spec = importlib.machinery.PathFinder.find_spec("tokenize", [sysconfig.get_path("stdlib")])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["tokenize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tokenize"])
elif __name__ == "__main__":
    import typer
    from tokenize_ways import benchmark

    typer.run(benchmark)
