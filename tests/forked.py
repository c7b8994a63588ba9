"""What conftest.script runs in a forked process; apart from conftest, which a fork shall not import."""
import os
import runpy
import signal
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def run_forked(stdout, stderr, cwd, words, env, first):
    """In a process that has forked: a script as Python would start it, but for the imports, which take 3 to 8 seconds.

    first: called before anything else, or None.
    """
    for number, path in ((1, stdout), (2, stderr)):
        with open(path, "wb") as f:
            os.dup2(f.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which pytest ignores where a shell's & has started it
    os.environ.update(env)
    if first:
        first()
    loaded = [getattr(sys.modules[name], "__file__", "") for name in ("predict", "figures", "train_imbanid", "pretrain", "rot")]
    assert all(Path(path).parent == REPO for path in loaded), loaded
    os.chdir(cwd)
    sys.path[:] = [path for path in sys.path if Path(path) not in (REPO, REPO / "tests")]
    sys.path.insert(0, str(cwd if words[0] == "-m" else REPO))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
